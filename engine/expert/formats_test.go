package expert

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"hash/crc32"
	"io"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"deltafin/engine/checkpoint"

	"github.com/klauspost/compress/zstd"
)

// little is a config of two MoE layers with five experts.
var little = &checkpoint.Config{Layers: 3, FirstDense: 1, Experts: 5, TopK: 2}

func TestHeatComesBack(t *testing.T) {
	path := filepath.Join(t.TempDir(), "heat")
	print := [32]byte{1, 2, 3}
	warn := func(line string) { t.Errorf("said %q", line) }
	h := LoadHeat(path, little, print, warn) // not there yet: nothing to say
	h.Observe(1, []int32{4, 4, 2, 0})
	h.Observe(2, []int32{2, 3, 2})
	if err := h.Save(path); err != nil {
		t.Fatal(err)
	}
	h = LoadHeat(path, little, print, warn)
	if h.Count(1, 4) != 2 || h.Count(2, 2) != 2 || h.Count(1, 1) != 0 {
		t.Errorf("counts %v", h.count)
	}
	if got, want := h.Hottest(3), []int32{5 + 2, 4, 0}; !slices.Equal(got, want) {
		t.Errorf("hottest %v, want %v", got, want)
	}
	if got := h.Hottest(100); len(got) != 5 {
		t.Errorf("%d experts were routed, hottest gives %v", 5, got)
	}
	h.count[0] = math.MaxUint32
	h.Observe(1, []int32{0})
	if h.Count(1, 0) != math.MaxUint32/2+1 || h.Count(1, 4) != 1 {
		t.Errorf("counts after an overflow %v", h.count)
	}
	entries, _ := os.ReadDir(filepath.Dir(path))
	if len(entries) != 1 {
		t.Errorf("%v are left", entries)
	}
}

func TestABadHeatIsIgnoredAndReplaced(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "heat")
	good := NewHeat(little, [32]byte{7})
	good.Observe(1, []int32{1})
	sound := good.encode()
	flip := func(i int) []byte {
		b := slices.Clone(sound)
		b[i] ^= 1
		return b
	}
	resum := func(b []byte) []byte {
		return append(b, crcBytes(b)...)
	}
	other := NewHeat(little, [32]byte{8})
	larger := NewHeat(&checkpoint.Config{Layers: 4, FirstDense: 1, Experts: 5}, [32]byte{7})
	for _, c := range []struct {
		name string
		file []byte
		say  string
	}{
		{"empty", nil, "no heat file"},
		{"something else", []byte(strings.Repeat("hello ", 20)), "no heat file"},
		{"cut", sound[:len(sound)-1], "checksum"},
		{"a count changed", flip(len(sound) - 6), "checksum"},
		{"its checksum changed", flip(len(sound) - 1), "checksum"},
		{"a later version", flip(len(heatMagic)), "version"},
		{"another model's", other.encode(), "another model"},
		{"a larger model's", larger.encode(), "another model"},
		{"counts missing", resum(slices.Clone(sound[:len(sound)-6])), "a count is missing"},
		{"more after the counts", resum(append(slices.Clone(sound[:len(sound)-4]), 0)), "more follows"},
	} {
		if err := os.WriteFile(path, c.file, 0o644); err != nil {
			t.Fatal(err)
		}
		var lines []string
		h := LoadHeat(path, little, [32]byte{7}, func(l string) { lines = append(lines, l) })
		if len(lines) != 1 || !strings.Contains(lines[0], c.say) || !strings.HasPrefix(lines[0], path) {
			t.Errorf("%s: said %q", c.name, lines)
		}
		if len(h.Hottest(9)) != 0 {
			t.Errorf("%s: counts %v", c.name, h.count)
		}
		if err := h.Save(path); err != nil {
			t.Fatal(err)
		}
		LoadHeat(path, little, [32]byte{7}, func(l string) { t.Errorf("%s: after Save: %s", c.name, l) })
	}
	if err := good.Save(filepath.Join(dir, "no", "heat")); err == nil || !strings.Contains(err.Error(), "can be written") {
		t.Errorf("saved into a directory that is not there: %v", err)
	}
}

// crcBytes is the checksum that ends a heat file.
func crcBytes(b []byte) []byte {
	return binary.LittleEndian.AppendUint32(nil, crc32.Checksum(b, crc32.MakeTable(crc32.Castagnoli)))
}

func FuzzHeat(f *testing.F) {
	h := NewHeat(little, [32]byte{7})
	f.Add(h.encode())
	h.Observe(1, []int32{1, 2, 3, 3})
	f.Add(h.encode())
	f.Add(h.encode()[:40])
	f.Fuzz(func(t *testing.T, b []byte) {
		h := NewHeat(little, [32]byte{7})
		// Past the checksum, which no fuzzer finds.
		if len(b) > 4 {
			b = append(slices.Clone(b[:len(b)-4]), crcBytes(b[:len(b)-4])...)
		}
		if h.decode(b) == nil && len(h.count) != 10 {
			t.Fatalf("%d counts", len(h.count))
		}
	})
}

// routes makes up the routes of a layer.
func routes(rng *rand.Rand, rows, topK, experts int) []int32 {
	var ids []int32
	for range rows {
		p := rng.Perm(experts)[:topK]
		slices.Sort(p)
		for _, id := range p {
			ids = append(ids, int32(id))
		}
	}
	return ids
}

func writeTrace(t testing.TB, passes []int) (file []byte, ids [][]int32) {
	rng := rand.New(rand.NewPCG(1, 2))
	var b bytes.Buffer
	c := &checkpoint.Config{Layers: 93, FirstDense: 1, Experts: 896, TopK: 16}
	w, err := NewTraceWriter(&b, c, [32]byte{9})
	if err != nil {
		t.Fatal(err)
	}
	for _, rows := range passes {
		for l := c.FirstDense; l < c.Layers; l++ {
			r := routes(rng, rows, c.TopK, c.Experts)
			ids = append(ids, r)
			if err := w.Write(l, r); err != nil {
				t.Fatal(err)
			}
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes(), ids
}

func TestATraceComesBack(t *testing.T) {
	passes := []int{17, 1, 1, 3}
	file, ids := writeTrace(t, passes)
	r, err := NewTraceReader(bytes.NewReader(file))
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	if h := (TraceHeader{[32]byte{9}, 1, 92, 896, 16}); r.TraceHeader != h {
		t.Errorf("header %+v", r.TraceHeader)
	}
	for i, want := range ids {
		x, err := r.Next()
		if err != nil {
			t.Fatal(err)
		}
		if x.Layer != 1+i%92 || x.Rows != passes[i/92] || x.NewPass != (i%92 == 0 && i > 0) || !slices.Equal(x.IDs, want) {
			t.Fatalf("record %d is layer %d with %d rows, new pass %v", i, x.Layer, x.Rows, x.NewPass)
		}
	}
	if _, err := r.Next(); err != io.EOF {
		t.Errorf("at the end: %v", err)
	}
	t.Logf("%d bytes for %d routes", len(file), 22*92*16)
}

func TestACutTraceIsSoundAsFarAsItGoes(t *testing.T) {
	file, ids := writeTrace(t, []int{40, 40})
	for _, n := range []int{len(file) - 1, len(file) / 2} {
		r, err := NewTraceReader(bytes.NewReader(file[:n]))
		if err != nil {
			t.Fatal(err)
		}
		got := 0
		for {
			x, err := r.Next()
			if err != nil {
				if !errors.Is(err, io.ErrUnexpectedEOF) {
					t.Errorf("after %d of %d bytes: %v", n, len(file), err)
				}
				break
			}
			if !slices.Equal(x.IDs, ids[got]) {
				t.Fatalf("record %d differs", got)
			}
			got++
		}
		r.Close()
		if got == 0 || got >= len(ids) {
			t.Errorf("%d of %d records", got, len(ids))
		}
	}
}

// compress makes a zstd stream.
func compress(b []byte) []byte {
	w, _ := zstd.NewWriter(nil, zstd.WithEncoderConcurrency(1))
	return w.EncodeAll(b, nil)
}

func TestABadTraceIsRefused(t *testing.T) {
	head := append(append([]byte(traceMagic), traceVersion), make([]byte, 32)...)
	numbers := func(b []byte, ns ...uint64) []byte {
		b = slices.Clone(b)
		for _, n := range ns {
			b = binary.AppendUvarint(b, n)
		}
		return b
	}
	for _, c := range []struct {
		name string
		file []byte
		say  string
	}{
		{"empty", nil, "is no trace"},
		{"no zstd", []byte("some text that is no zstd stream"), "is no trace"},
		{"other content", compress([]byte("hello, this is something else")), "is no trace"},
		{"a later version", compress(append([]byte(traceMagic), 9)), "version 9"},
		{"a cut header", compress(head), "inside its header"},
		{"no experts", compress(numbers(head, 1, 2, 0, 0)), "damaged"},
		{"more routed than there are", compress(numbers(head, 1, 2, 5, 6)), "damaged"},
		{"absurd layers", compress(numbers(head, 1, 1<<40, 5, 2)), "damaged"},
		{"a layer that is not there", compress(numbers(head, 1, 2, 5, 2, 2, 1, 0, 1)), "layer 2"},
		{"absurd rows", compress(numbers(head, 1, 2, 5, 2, 1, 1<<50)), "damaged"},
		{"an expert that is not there", compress(numbers(head, 1, 2, 5, 2, 1, 1, 4, 1)), "expert 5"},
		{"an expert twice", compress(numbers(head, 1, 2, 5, 2, 1, 1, 4, 0)), "expert 4"},
		{"ids that overflow", compress(numbers(head, 1, 2, 5, 2, 1, 1, 4, 1<<63)), "damaged"},
		{"rows that are not there", compress(numbers(head, 1, 2, 5, 2, 1, 1<<20, 0)), "unexpected EOF"},
	} {
		r, err := NewTraceReader(bytes.NewReader(c.file))
		if err == nil {
			_, err = r.Next()
			r.Close()
		}
		if err == nil || !strings.Contains(err.Error(), c.say) {
			t.Errorf("%s: %v", c.name, err)
		}
	}
}

func FuzzTrace(f *testing.F) {
	var b bytes.Buffer
	w, _ := NewTraceWriter(&b, little, [32]byte{1})
	_ = w.Write(1, []int32{0, 4, 1, 2})
	_ = w.Write(2, []int32{3, 4, 1, 2})
	_ = w.Close()
	z, _ := zstd.NewReader(nil)
	plain, err := z.DecodeAll(b.Bytes(), nil)
	z.Close()
	if err != nil {
		f.Fatal(err)
	}
	f.Add(plain, true)
	f.Add(b.Bytes(), false)
	f.Add(plain[:50], true)
	f.Fuzz(func(t *testing.T, b []byte, pack bool) {
		if pack { // the fuzzer gets past the compression
			b = compress(b)
		}
		r, err := NewTraceReader(bytes.NewReader(b))
		if err != nil {
			return
		}
		defer r.Close()
		for range 1000 {
			x, err := r.Next()
			if err != nil {
				return
			}
			if len(x.IDs) != x.Rows*r.TopK || x.Layer < r.First || x.Layer >= r.First+r.Layers || slices.Max(x.IDs) >= int32(r.Experts) {
				t.Fatalf("%+v of %+v", x, r.TraceHeader)
			}
		}
	})
}

func packedExample() *packed {
	p := &packed{layer: 3, ids: []int32{0, 2, 5}, expertBytes: 5000, fingerprint: [32]byte{4}}
	for i := range p.ids {
		p.digests = append(p.digests, sha256.Sum256([]byte{byte(i)}))
	}
	return p
}

// sized is a reader of a file that is zero behind its first bytes.
type sized struct {
	b    []byte
	size int64
}

func (s sized) ReadAt(p []byte, off int64) (int, error) {
	clear(p)
	if off < int64(len(s.b)) {
		copy(p, s.b[off:])
	}
	return len(p), nil
}

func TestAPackedHeaderComesBackAndAnyChangeIsNoticed(t *testing.T) {
	want := packedExample()
	b := want.encode()
	size := packedBytes(3, 5000)
	got, err := readPacked(sized{b, size}, size)
	if err != nil {
		t.Fatal(err)
	}
	if got.layer != 3 || !slices.Equal(got.ids, want.ids) || !slices.Equal(got.digests, want.digests) || got.base != 4096 || got.stride != 8192 || got.fingerprint != want.fingerprint {
		t.Errorf("read %+v", got)
	}
	for i := range b {
		bad := slices.Clone(b)
		bad[i] ^= 0x10
		if _, err := readPacked(sized{bad, size}, size); err == nil {
			t.Errorf("a change of byte %d went unnoticed", i)
		}
	}
	for _, n := range []int64{0, 71, 72, 4096, size - 1, size + 1} {
		if _, err := readPacked(sized{b, n}, n); err == nil {
			t.Errorf("a file of %d bytes was taken for one of %d", n, size)
		}
	}
	for _, ids := range [][]int32{{0, 0, 1}, {2, 1, 5}, {1, 2, 1 << 20}} {
		p := packedExample()
		p.ids = ids
		if _, err := readPacked(sized{p.encode(), size}, size); err == nil {
			t.Errorf("ids %v were taken", ids)
		}
	}
}

func FuzzPacked(f *testing.F) {
	b := packedExample().encode()
	f.Add(b, packedBytes(3, 5000))
	f.Add(b[:100], int64(100))
	f.Fuzz(func(t *testing.T, b []byte, size int64) {
		if len(b) >= packedFixed { // past the digest
			n := int(binary.LittleEndian.Uint32(b[16:]))
			if end := packedFixed + n*packedEntry; n < 1000 && len(b) >= end+sha256.Size {
				b = slices.Clone(b)
				sum := sha256.Sum256(b[:end])
				copy(b[end:], sum[:])
			}
		}
		p, err := readPacked(sized{b, size}, size)
		if err != nil {
			return
		}
		if len(p.ids) != len(p.digests) || !slices.IsSorted(p.ids) || p.base+int64(len(p.ids))*p.stride != size {
			t.Fatalf("%+v of %d bytes", p, size)
		}
	})
}

package spine

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"deltafin/engine/checkpoint"
	"deltafin/engine/checkpoint/checkpointtest"
	"deltafin/engine/disk"
	"deltafin/engine/drive"
	"deltafin/engine/k3"
	"deltafin/engine/kernel"
	"deltafin/golden"
)

var update = flag.Bool("update", false, "write testdata/int8.json from this run")

func packed(t testing.TB, ck *checkpoint.Checkpoint, narrow bool) string {
	t.Helper()
	out := filepath.Join(t.TempDir(), "spine.bin")
	if err := Pack(context.Background(), ck, out, narrow, nil); err != nil {
		t.Fatal(err)
	}
	return out
}

func TestAPackedSpineGivesTheSameBits(t *testing.T) {
	for _, key := range []string{"tiny-a/len5", "tiny-b/len5", "nano/france"} {
		c := find(t, key)
		ck := openCheckpoint(t, c.Set)
		p := newPasses(t, ck, c, 0)
		pack := packed(t, ck, false)
		need, floor := sizes(t, ck, Options{Pack: pack})
		d := newDrives(t, drive.Options{})
		for _, o := range []Options{
			{Ring: floor[0]},
			{Ring: floor[0], KeepRouters: true},
			{Ring: 3 * floor[0]},
			{Resident: need[0] + need[1] + need[2], Ring: floor[3]},
			{Resident: plenty},
		} {
			o.Pack = pack
			s := openSpine(t, ck, d, o)
			if !s.Exact() || strings.Contains(s.Label(), "not") {
				t.Errorf("%s: exact %v, %q", key, s.Exact(), s.Label())
			}
			for _, x := range s.plan.pieces {
				if len(x.runs) != 1 || x.runs[0].off%packBlock != 0 {
					t.Errorf("%s: %s is read in %v", key, x.name, x.runs)
				}
			}
			p.check(t, s)
			s.Close()
		}
		if least, err := Floor(ck, pack); err != nil || least < floor[0] {
			t.Errorf("%s: floor %d: %v", key, least, err)
		}
	}
}

// The narrowed model is one of its own, with tokens of its own.
func TestInt8HasItsOwnGoldenTokens(t *testing.T) {
	path := filepath.Join("testdata", "int8.json")
	want := map[string][]int{}
	b, err := os.ReadFile(path)
	if err == nil {
		err = json.Unmarshal(b, &want)
	}
	if err != nil && !*update {
		t.Fatal(err)
	}
	ck := openCheckpoint(t, "nano")
	exact, pack := packed(t, ck, false), packed(t, ck, true)
	wide, err1 := os.Stat(exact)
	slim, err2 := os.Stat(pack)
	if err := errors.Join(err1, err2); err != nil || slim.Size() > wide.Size()*6/10 {
		t.Fatalf("%d bytes in eight bits, %d in sixteen: %v", slim.Size(), wide.Size(), err)
	}
	_, floor := sizes(t, ck, Options{Pack: pack})
	d := newDrives(t, drive.Options{})
	for _, name := range []string{"france", "saturn"} {
		c := find(t, "nano/"+name)
		p := newPasses(t, ck, c, 0)
		for _, o := range []Options{{Pack: pack, Ring: floor[0]}, {Pack: pack, Resident: plenty}} {
			s := openSpine(t, ck, d, o)
			if s.Exact() || !strings.Contains(s.Label(), "not weight-exact") {
				t.Errorf("exact %v, %q", s.Exact(), s.Label())
			}
			got, err := p.greedy(s)
			if err != nil {
				t.Fatal(err)
			}
			s.Close()
			if *update {
				want[name] = got
			}
			if !slices.Equal(got, want[name]) {
				t.Errorf("%s: tokens %v, frozen %v", name, got, want[name])
			}
		}
		if hash, err := p.hash(context.Background(), openSpine(t, ck, d, Options{Pack: pack, Resident: plenty})); err != nil || hash == c.LogitsSHA256 {
			t.Errorf("%s: the logits are those of the exact model: %v", name, err)
		}
	}
	if *update {
		b, err := json.Marshal(want)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, append(b, '\n'), 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

// greedy generates as many tokens as the case has.
func (p *passes) greedy(s k3.Spine) (ids []int, err error) {
	p.m.Spine = s
	state, feed := k3.NewState(p.m.Config), p.c.PromptIDs
	for range p.c.Greedy {
		logits, err := p.m.Forward(context.Background(), state, feed, k3.Pass{Logits: 1})
		if err != nil {
			return nil, err
		}
		ids = append(ids, kernel.ArgMax(logits.Row(0)))
		feed = ids[len(ids)-1:]
	}
	return ids, nil
}

func TestQuantizedRows(t *testing.T) {
	bf16 := func(v ...float32) (b []byte) {
		for _, x := range v {
			b = binary.LittleEndian.AppendUint16(b, uint16(math.Float32bits(x)>>16))
		}
		return b
	}
	for _, tt := range []struct {
		name  string
		in    []byte
		scale float32
		q     []int8
	}{
		{"the largest is 127", bf16(127, -127, 1, 0), 1, []int8{127, -127, 1, 0}},
		{"ties go to even", bf16(254, 1, 3, 5, -1, -3, -5), 2, []int8{127, 0, 2, 2, 0, -2, -2}},
		{"zeros", bf16(0, float32(math.Copysign(0, -1))), 1, []int8{0, 0}},
		{"too small for a scale", []byte{1, 0, 1, 0x80}, math.Float32frombits(1 << 16 / 127), []int8{127, -127}},
		{"large", bf16(-math.MaxFloat32, math.MaxFloat32/2), bfloat(math.MaxFloat32) / 127, []int8{-127, 64}},
	} {
		q := make([]byte, len(tt.in)/2)
		scale, err := quantize(q, tt.in)
		got := make([]int8, len(q))
		for i, b := range q {
			got[i] = int8(b)
		}
		if err != nil || math.Abs(float64(scale-tt.scale)) > 1e-6*float64(tt.scale)+2e-45 || !slices.Equal(got, tt.q) {
			t.Errorf("%s: scale %g, %v: %v; expected %g, %v", tt.name, scale, got, err, tt.scale, tt.q)
		}
	}
	for _, bad := range []float32{float32(math.Inf(1)), float32(math.Inf(-1)), float32(math.NaN())} {
		if _, err := quantize(make([]byte, 2), bf16(1, bad)); err == nil || !strings.Contains(err.Error(), "no finite number") {
			t.Errorf("%g: %v", bad, err)
		}
	}
}

// bfloat is x cut to the upper half of its bits.
func bfloat(x float32) float32 { return math.Float32frombits(math.Float32bits(x) &^ 0xffff) }

func TestDamagedPacksAreRefused(t *testing.T) {
	ck := openCheckpoint(t, "tiny-a")
	good, err := os.ReadFile(packed(t, ck, false))
	if err != nil {
		t.Fatal(err)
	}
	h, err := parseHeader(bytes.NewReader(good), int64(len(good)))
	if err != nil {
		t.Fatal(err)
	}
	piece := h.Units[slices.IndexFunc(h.Units, func(u headerUnit) bool { return u.Name == "layer 1 attention" })]
	_, floor := sizes(t, ck, Options{})
	for _, tt := range []struct {
		name   string
		damage func(b []byte) []byte
		want   string
	}{
		{"no magic", func(b []byte) []byte { b[0]++; return b }, "is no packed spine"},
		{"a later version", func(b []byte) []byte { b[7] = 9; return b }, "has format version 9, this program reads 1"},
		{"a huge table", func(b []byte) []byte { b[11] = 0xff; return b }, "has a table of"},
		{"a wrong table", func(b []byte) []byte { b[40] ^= 1; return b }, "does not match its digest"},
		{"cut", func(b []byte) []byte { return b[:len(b)-4096] }, "it was cut or added to"},
		{"too long", func(b []byte) []byte { return append(b, 0) }, "it was cut or added to"},
		{"no more than the beginning", func(b []byte) []byte { return b[:100] }, "has a table of"},
		{"empty", func(b []byte) []byte { return nil }, "is no packed spine"},
		{"a vector", func(b []byte) []byte { b[h.Units[0].Offset] ^= 1; return b }, "vectors: "},
		{"a weight", func(b []byte) []byte { b[piece.Offset+piece.Bytes-1] ^= 1; return b }, "layer 1 attention has the digest"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "spine.bin")
			if err := os.WriteFile(path, tt.damage(bytes.Clone(good)), 0o600); err != nil {
				t.Fatal(err)
			}
			s, err := Open(context.Background(), ck, newDrives(t, drive.Options{}), Options{Pack: path, Ring: 2 * floor[0]})
			if err == nil {
				defer s.Close()
				_, release, e := s.Attention(context.Background(), 0)
				if e != nil {
					t.Fatal(e)
				}
				release()
				_, _, err = s.Attention(context.Background(), 1)
			}
			if err == nil || !strings.Contains(err.Error(), tt.want) || !strings.Contains(err.Error(), path) || !strings.Contains(err.Error(), repack) {
				t.Errorf("error %v; expected %q, the path and the remedy", err, tt.want)
			}
		})
	}
	if _, err := Floor(ck, filepath.Join(t.TempDir(), "none")); err == nil || !strings.Contains(err.Error(), "is not there") {
		t.Errorf("no file: %v", err)
	}
}

func TestPacksOfOtherCheckpointsAreRefused(t *testing.T) {
	a, b := openCheckpoint(t, "tiny-a"), openCheckpoint(t, "tiny-b")
	if _, err := Floor(b, packed(t, a, false)); err == nil || !strings.Contains(err.Error(), "was packed from another checkpoint") {
		t.Errorf("another configuration: %v", err)
	}
	// The same configuration and other weights.
	dir := checkpointtest.Copy(t, a.Dir())
	c, err := checkpoint.Open(dir.Path)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	last, err := c.Tensor(fmt.Sprintf("model.layers.%d.input_layernorm.weight", c.Config().Layers-1))
	if err != nil {
		t.Fatal(err)
	}
	f, err := os.OpenFile(c.Path(last.File), os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := f.WriteAt([]byte{0x12, 0x34}, last.Offset); err != nil {
		t.Fatal(err)
	}
	if _, err := Floor(c, packed(t, a, false)); err == nil || !strings.Contains(err.Error(), "was packed from another checkpoint") {
		t.Errorf("other weights: %v", err)
	}
}

func TestPackSaysHowFarItIs(t *testing.T) {
	ck := openCheckpoint(t, "tiny-b")
	out := filepath.Join(t.TempDir(), "s")
	last, of := int64(-1), int64(0)
	err := Pack(context.Background(), ck, out, true, func(done, total int64) {
		if done < last || done > total {
			t.Errorf("%d of %d after %d", done, total, last)
		}
		last, of = done, total
	})
	if info, e := os.Stat(out); err != nil || e != nil || last != of || of != 2*info.Size() {
		t.Errorf("%d of %d at the end: %v", last, of, errors.Join(err, e))
	}
}

func TestPackLeavesNothingBehindWhenItFails(t *testing.T) {
	ck := openCheckpoint(t, "tiny-a")
	ctx, cancel := context.WithCancel(context.Background())
	for _, tt := range []struct {
		name string
		ctx  context.Context
		w    *packer
		want string
	}{
		{"no room", context.Background(), &packer{free: func(string) (int64, error) { return 1000, nil }, step: func(string) {}}, "are needed and the file system has 0.001 MB free: make room"},
		{"cancelled", ctx, &packer{free: disk.Free, step: func(s string) {
			if s == "layer 1 attention" {
				cancel()
			}
		}}, context.Canceled.Error()},
	} {
		dir := t.TempDir()
		out := filepath.Join(dir, "s")
		if err := os.WriteFile(out, []byte("old"), 0o600); err != nil {
			t.Fatal(err)
		}
		tt.w.ck = ck
		if err := tt.w.pack(tt.ctx, out); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: error %v", tt.name, err)
		}
		if b, err := os.ReadFile(out); err != nil || string(b) != "old" {
			t.Errorf("%s: what was there before became %q: %v", tt.name, b, err)
		}
		if left, err := os.ReadDir(dir); err != nil || len(left) != 1 {
			t.Errorf("%s: left %v: %v", tt.name, left, err)
		}
	}
}

func TestOnePackAtATime(t *testing.T) {
	ck := openCheckpoint(t, "tiny-a")
	out := filepath.Join(t.TempDir(), "s")
	f, err := disk.LockFile(out + partSuffix)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := Pack(context.Background(), ck, out, false, nil); err == nil || !strings.Contains(err.Error(), "is being written by somebody else") {
		t.Errorf("error %v", err)
	}
}

const killAt = "SPINE_KILL_AT"

// packAndDie packs in a process of its own, which ends as by kill -9 at a step.
func packAndDie() {
	ck, err := checkpoint.Open(golden.ModelDir("tiny-a"))
	if err != nil {
		panic(err)
	}
	w := &packer{ck: ck, free: disk.Free, step: func(name string) {
		if name == os.Getenv(killAt) {
			p, _ := os.FindProcess(os.Getpid())
			_ = p.Kill()
			select {}
		}
	}}
	if err := w.pack(context.Background(), os.Getenv("SPINE_OUT")); err != nil {
		panic(err)
	}
}

func TestKilledBetweenAnyTwoSteps(t *testing.T) {
	ck := openCheckpoint(t, "tiny-a")
	out := filepath.Join(t.TempDir(), "spine.bin")
	_, floor := sizes(t, ck, Options{})
	sections, err := outline(ck.Config())
	if err != nil {
		t.Fatal(err)
	}
	p := newPasses(t, ck, find(t, "tiny-a/len1"), 2)
	for _, step := range []string{"locked", "vectors", "layer 1 router", sections[len(sections)-1].name, "written", "synced", "verified", "renamed", "never"} {
		os.Remove(out)
		cmd := exec.Command(os.Args[0], "-test.run=^$")
		cmd.Env = append(os.Environ(), killAt+"="+step, "SPINE_OUT="+out)
		msg, err := cmd.CombinedOutput()
		if killed := err != nil; killed != (step != "never") {
			t.Fatalf("%s: %v\n%s", step, err, msg)
		}
		_, err = os.Stat(out)
		if published := err == nil; published != (step == "renamed" || step == "never") {
			t.Errorf("killed when %s: published: %v", step, published)
		} else if published {
			s := openSpine(t, ck, newDrives(t, drive.Options{}), Options{Pack: out, Ring: 2 * floor[0]})
			p.check(t, s)
		}
	}
}

// Whatever a file holds, its header is refused or stands for exactly these bytes.
func FuzzHeader(f *testing.F) {
	ck, err := checkpoint.Open(golden.ModelDir("tiny-a"))
	if err != nil {
		f.Fatal(err)
	}
	defer ck.Close()
	for _, narrow := range []bool{false, true} {
		out := packed(f, ck, narrow)
		h, err := openHeader(out)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(h.marshal(), h.Bytes)
		h.Units = h.Units[:1]
		f.Add(h.marshal(), h.Bytes)
		h.Bytes = roundUp(h.Units[0].Offset+h.Units[0].Bytes, packBlock)
		f.Add(h.marshal(), h.Bytes)
		h.Units[0].Bytes = math.MaxInt64 - 10
		f.Add(h.marshal(), h.Bytes)
		h.Units = nil
		f.Add(h.marshal(), h.Bytes)
	}
	f.Add([]byte(magic+"\x01\xff\xff\xff\xff"), int64(1)<<40)
	f.Fuzz(func(t *testing.T, b []byte, size int64) {
		h, err := parseHeader(bytes.NewReader(b), size)
		if err != nil {
			return
		}
		again := h.marshal()
		if !bytes.HasPrefix(b, again) || h.Bytes != size {
			t.Errorf("%q of %d bytes became %q", b, size, again)
		}
		end := headerRoom(len(h.Units))
		for _, u := range h.Units {
			if u.Offset < end || u.Bytes <= 0 || u.Bytes > size-u.Offset {
				t.Errorf("unit %+v after byte %d of %d", u, end, size)
			}
			end = u.Offset + u.Bytes
		}
	})
}

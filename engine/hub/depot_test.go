package hub

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"errors"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sync/errgroup"

	"deltafin/engine/checkpoint"
	"deltafin/engine/hub/hubtest"
)

// shard is a small safetensors file: a dense tensor, three experts, another dense
// tensor. shardExperts are where the experts lie.
func shard() []byte {
	head := []byte(`{"__metadata__":{"format":"pt"},` +
		`"a.weight":{"dtype":"U8","shape":[150000],"data_offsets":[0,150000]},` +
		`"l.block_sparse_moe.experts.0.w1":{"dtype":"U8","shape":[20000],"data_offsets":[150000,170000]},` +
		`"l.block_sparse_moe.experts.1.w1":{"dtype":"U8","shape":[20000],"data_offsets":[170000,190000]},` +
		`"l.block_sparse_moe.experts.10.w1":{"dtype":"U8","shape":[20000],"data_offsets":[190000,210000]},` +
		`"z.weight":{"dtype":"U8","shape":[9],"data_offsets":[210000,210009]}}`)
	for len(head) != shardHeader-8 {
		head = append(head, ' ')
	}
	b := binary.LittleEndian.AppendUint64(nil, uint64(len(head)))
	b = append(b, head...)
	data := make([]byte, 210009)
	rand.NewChaCha8([32]byte{4}).Read(data)
	return append(b, data...)
}

const shardHeader = 1024

var shardExperts = []span{
	{shardHeader + 150000, shardHeader + 170000},
	{shardHeader + 170000, shardHeader + 190000},
	{shardHeader + 190000, shardHeader + 210000},
}

func shardRepo(t testing.TB) string {
	dir := t.TempDir()
	must(t, os.WriteFile(filepath.Join(dir, "big.safetensors"), shard(), 0o644))
	must(t, os.WriteFile(filepath.Join(dir, "small.json"), []byte("{}"), 0o644))
	return dir
}

func openTestDepot(t testing.TB, o DepotOptions) *Depot {
	t.Helper()
	d, err := OpenDepot(t.Context(), o)
	must(t, err)
	t.Cleanup(func() { d.Close() })
	return d
}

// Bytes that were asked for of shards.
func asked(h *hubtest.Hub) (ranges []span, n int64) {
	for _, r := range h.Requests() {
		if r.Kind == hubtest.Content && strings.HasSuffix(r.File, ".safetensors") {
			ranges = append(ranges, span{r.Off, r.End})
			n += r.End - r.Off
		}
	}
	return ranges, n
}

// A depot fetches the dense weights at first and then each expert once, however many
// ask for it at a time; filled up, it is the store that a full fetch makes.
func TestDepotFillsToTheFullStore(t *testing.T) {
	served, err := checkpoint.Open(nano)
	must(t, err)
	defer served.Close()
	c := served.Config()
	h := hubtest.New(t, nano)
	dir := t.TempDir()
	o := DepotOptions{Options: quick(h, dir), TrustHTTP: true}
	o.PartBytes = 1 << 20
	d := openTestDepot(t, o)

	experts := int64(0)
	for l := range c.Layers {
		if c.IsMoE(l) {
			experts += int64(c.Experts) * served.ExpertLayout().ExpertBytes
		}
	}
	total := int64(0)
	for i := range served.Files() {
		info, err := os.Stat(served.Path(i))
		must(t, err)
		total += info.Size()
	}
	if _, n := asked(h); n != total-experts {
		t.Errorf("%d bytes of shards were fetched at first, want %d: all but the experts", n, total-experts)
	}

	h.Forget()
	var g errgroup.Group
	var want atomic.Int64
	for l := range c.Layers {
		if !c.IsMoE(l) {
			continue
		}
		for range 2 {
			g.Go(func() error {
				for id := range c.Experts {
					e := served.Expert(l, id)
					name := filepath.Base(served.Path(e.File))
					a, b := make([]byte, e.Bytes), make([]byte, e.Bytes)
					if err := errors.Join(served.ReadExtent(e, a), d.Read(t.Context(), name, e.Offset, b)); err != nil {
						return err
					}
					if !bytes.Equal(a, b) || !d.Has(name, e.Offset, e.Bytes) {
						t.Errorf("layer %d expert %d came wrongly", l, id)
					}
					want.Add(1)
				}
				return nil
			})
		}
	}
	must(t, g.Wait())
	ranges, n := asked(h)
	if n != experts || int64(len(ranges)) != want.Load()/2 {
		t.Errorf("%d requests for %d bytes, want one for each of %d experts, %d bytes", len(ranges), n, want.Load()/2, experts)
	}
	if s := d.Stats(); s.Bytes != total || s.Kept != total || s.Rate <= 0 {
		t.Errorf("stats %+v of %d bytes", s, total)
	}
	d.Close()

	h.Forget()
	must(t, Fetch(t.Context(), o.Options))
	if _, n := asked(h); n != 0 {
		t.Errorf("a filled depot fetches %d bytes to become a full store", n)
	}
	complete(t, nano, dir)
}

func TestDepotRemembersAndGoesOnFromAFetch(t *testing.T) {
	served := shardRepo(t)
	h := hubtest.New(t, served)
	o := DepotOptions{Options: quick(h, t.TempDir()), TrustHTTP: true}
	// An interrupted fetch has brought the beginning, and power took a byte of it.
	o.Connections = 1
	h.SetFault(func(r hubtest.Request) *hubtest.Fault {
		if r.Off >= 3*32<<10 {
			return &hubtest.Fault{Status: 404}
		}
		return nil
	})
	if Fetch(t.Context(), o.Options) == nil {
		t.Fatal("no error")
	}
	h.SetFault(nil)
	part := filepath.Join(o.Dir, "big.safetensors.part")
	invert(t, part, 40_000)
	h.Forget()
	d := openTestDepot(t, o)
	if ranges, n := asked(h); n != shardHeader+150009-2*32<<10 {
		t.Errorf("%d bytes were fetched: %v", n, ranges)
	}
	x := shardExperts[1]
	must(t, d.Ensure(t.Context(), "big.safetensors", x.off, x.bytes()))
	d.Close()

	// As it is, it is sound, and says how much of it is away.
	r, err := Verify(t.Context(), o.Dir, VerifyOptions{Deep: true})
	must(t, err)
	if !r.OK() || r.Away != 40_000 {
		t.Errorf("%d bytes are away: %v", r.Away, r.Bad)
	}
	h.Forget()
	d = openTestDepot(t, o)
	if !d.Has("big.safetensors", x.off, x.bytes()) || d.Has("big.safetensors", x.off-1, 2) {
		t.Error("the depot does not remember what it holds")
	}
	if n := len(h.Requests()); n != 0 {
		t.Errorf("%d requests for what was here", n)
	}
	d.Close()
	must(t, Fetch(t.Context(), o.Options))
	complete(t, served, o.Dir)
}

// reads demands that an expert comes right, and reports whether it is kept.
func reads(t *testing.T, d *Depot, i int) bool {
	t.Helper()
	x, data := shardExperts[i], shard()
	b := make([]byte, x.bytes())
	must(t, d.Read(t.Context(), "big.safetensors", x.off, b))
	if !bytes.Equal(b, data[x.off:x.end]) {
		t.Errorf("expert %d comes wrongly", i)
	}
	return d.Has("big.safetensors", x.off, x.bytes())
}

// Where nothing can be dropped, what is beyond the bound is fetched each time.
func TestDepotWithoutHolesStopsKeeping(t *testing.T) {
	h := hubtest.New(t, shardRepo(t))
	o := DepotOptions{Options: quick(h, t.TempDir()), TrustHTTP: true, Keep: 30_000}
	var log []string
	o.Log = func(line string) { log = append(log, line) }
	o.hooks = &hooks{fixed: func() error { return errors.New("no holes here") }}
	d := openTestDepot(t, o)
	h.Forget()
	for range 2 {
		for i := range shardExperts {
			if kept := reads(t, d, i); kept != (i == 0) {
				t.Errorf("expert %d: kept %v", i, kept)
			}
		}
	}
	if ranges, _ := asked(h); len(ranges) != 5 {
		t.Errorf("%d requests", len(ranges))
	}
	x := shardExperts[2]
	if err := d.Ensure(t.Context(), "big.safetensors", x.off, x.bytes()); !errors.Is(err, ErrKeep) {
		t.Errorf("error %v", err)
	}
	if len(log) != 1 || !strings.Contains(log[0], "no holes here") {
		t.Errorf("%q", log)
	}
}

// canPunch skips a test where files cannot have holes punched.
func canPunch(t *testing.T) {
	t.Helper()
	if err := (*hooks)(nil).punch(t.TempDir()); err != nil {
		t.Skipf("NOT RUN: %v", err)
	}
}

// A bound drops what was not used for the longest time, in this run or in earlier ones,
// gives its room back to the drive, and never drops what is being read.
func TestDepotKeepsWithinItsBound(t *testing.T) {
	canPunch(t)
	h := hubtest.New(t, shardRepo(t))
	o := DepotOptions{Options: quick(h, t.TempDir()), TrustHTTP: true, Keep: 45_000}
	d := openTestDepot(t, o)
	has := func(want ...bool) {
		t.Helper()
		for i, x := range shardExperts {
			if d.Has("big.safetensors", x.off, x.bytes()) != want[i] {
				t.Errorf("expert %d is there: %v", i, !want[i])
			}
		}
	}
	reads(t, d, 0)
	reads(t, d, 1)
	reads(t, d, 0)
	reads(t, d, 2)
	has(true, false, true)
	disk, err := os.ReadFile(filepath.Join(o.Dir, "big.safetensors"))
	must(t, err)
	x := shardExperts[1]
	if holes := bytes.Count(disk[x.off:x.end], []byte{0}); holes < int(x.bytes())-8192 {
		t.Errorf("%d of %d bytes of what was dropped are zero", holes, x.bytes())
	}
	d.Close()

	// What an earlier run used is remembered to the hour, and nothing is fetched again.
	h.Forget()
	o.Sources, o.Keep = nil, 0
	d, err = OpenStream(t.Context(), o)
	must(t, err)
	has(true, false, true)
	reads(t, d, 0)
	if n := len(h.Requests()); n != 0 {
		t.Errorf("%d requests for what is here", n)
	}
	release, ok := d.Hold("big.safetensors", shardExperts[2].off, 20_000)
	if !ok {
		t.Fatal("what is there cannot be held")
	}
	reads(t, d, 1)
	has(false, true, true)
	release()
	reads(t, d, 0)
	has(true, true, false)
	if s := d.Stats(); s.Dropped != 40_000 || s.Kept != 40_000 {
		t.Errorf("%+v", s)
	}
	if _, ok := d.Hold("big.safetensors", shardExperts[2].off, 20_000); ok {
		t.Error("what is not there is held")
	}
	d.Close()

	// A lower bound holds from the next fetch on; without one nothing is dropped.
	o.Keep = 25_000
	d = openTestDepot(t, o)
	reads(t, d, 2)
	has(false, false, true)
	d.Close()
	o.Keep = -1
	d = openTestDepot(t, o)
	for i := range shardExperts {
		reads(t, d, i)
	}
	d.Prove()
	d.Close()
	if IsStream(o.Dir) {
		t.Error("a store that is complete still fills")
	}
	complete(t, h.Dir, o.Dir)
}

// With readers at work and a bound that holds two experts of three, every read gives
// the right bytes.
func TestDepotDropsNothingThatIsBeingRead(t *testing.T) {
	canPunch(t)
	h := hubtest.New(t, shardRepo(t))
	d := openTestDepot(t, DepotOptions{Options: quick(h, t.TempDir()), TrustHTTP: true, Keep: 45_000})
	data := shard()
	path := filepath.Join(d.o.Dir, "big.safetensors")
	var g errgroup.Group
	for w := range 4 {
		g.Go(func() error {
			b := make([]byte, 20_000)
			for i := range 40 {
				x := shardExperts[(i*(w+1)+w)%3]
				if release, ok := d.Hold("big.safetensors", x.off, x.bytes()); ok {
					f, err := os.Open(path)
					if err == nil {
						_, err = f.ReadAt(b, x.off)
						f.Close()
					}
					release()
					if err != nil {
						return err
					}
				} else if err := d.Read(t.Context(), "big.safetensors", x.off, b); err != nil {
					return err
				}
				if !bytes.Equal(b, data[x.off:x.end]) {
					return errors.New("wrong bytes")
				}
			}
			return nil
		})
	}
	must(t, g.Wait())
	if s := d.Stats(); s.Dropped == 0 {
		t.Error("nothing was dropped")
	}
}

// What of a store that fills on demand is not what arrived is named, and repaired: what
// is dense at once, an expert when it is next asked for.
func TestVerifyRepairsAStoreThatFills(t *testing.T) {
	served := shardRepo(t)
	h := hubtest.New(t, served)
	x, y := shardExperts[0], shardExperts[2]
	for name, c := range map[string]struct {
		harm func(dir, shard string)
		bad  int
		kept [2]bool // x and y, after the repair
	}{
		"an expert":        {func(_, shard string) { invert(t, shard, x.off+5) }, 1, [2]bool{false, true}},
		"dense":            {func(_, shard string) { invert(t, shard, shardHeader+7) }, 1, [2]bool{true, true}},
		"both":             {func(_, shard string) { invert(t, shard, shardHeader+7); invert(t, shard, y.off) }, 2, [2]bool{true, false}},
		"what is not here": {func(_, shard string) { invert(t, shard, shardExperts[1].off) }, 0, [2]bool{true, true}},
		"a cut shard":      {func(_, shard string) { must(t, os.Truncate(shard, y.off+5)) }, 1, [2]bool{true, false}},
		"a lost shard":     {func(_, shard string) { must(t, os.Remove(shard)) }, 1, [2]bool{false, false}},
		"a small file":     {func(dir, _ string) { must(t, os.WriteFile(filepath.Join(dir, "small.json"), []byte("[]"), 0o644)) }, 1, [2]bool{true, true}},
	} {
		o := DepotOptions{Options: quick(h, t.TempDir()), TrustHTTP: true}
		d := openTestDepot(t, o)
		for _, x := range []span{x, y} {
			must(t, d.Ensure(t.Context(), "big.safetensors", x.off, x.bytes()))
		}
		d.Close()
		c.harm(o.Dir, filepath.Join(o.Dir, "big.safetensors"))
		r, err := Verify(t.Context(), o.Dir, VerifyOptions{Deep: true})
		must(t, err)
		if len(r.Bad) != c.bad {
			t.Errorf("%s: %v", name, r.Bad)
		}
		r, err = Verify(t.Context(), o.Dir, VerifyOptions{Deep: true, Repair: &o.Options})
		must(t, err)
		if !r.OK() || len(r.Repaired) != c.bad {
			t.Errorf("%s: %v, repaired %v", name, r.Bad, r.Repaired)
		}
		d, err = OpenStream(t.Context(), o)
		must(t, err)
		for i, x := range []span{x, y} {
			if d.Has("big.safetensors", x.off, x.bytes()) != c.kept[i] {
				t.Errorf("%s: an expert is kept: %v", name, !c.kept[i])
			}
		}
		for i := range shardExperts {
			reads(t, d, i)
		}
		d.Prove()
		d.Close()
		complete(t, served, o.Dir)
	}
}

// A shard that comes out wrong though every range looked right is found out when it is
// complete, and a full fetch replaces it.
func TestDepotProvesCompleteShards(t *testing.T) {
	served := shardRepo(t)
	h := hubtest.New(t, served)
	o := DepotOptions{Options: quick(h, t.TempDir()), TrustHTTP: true}
	var mu sync.Mutex
	var log []string
	o.Log = func(line string) { mu.Lock(); defer mu.Unlock(); log = append(log, line) }
	d := openTestDepot(t, o)
	x := shardExperts[1]
	h.SetFault(func(r hubtest.Request) *hubtest.Fault {
		if r.Off == x.off {
			return &hubtest.Fault{Flip: 1 + r.Off + 77}
		}
		return nil
	})
	for _, x := range shardExperts {
		must(t, d.Ensure(t.Context(), "big.safetensors", x.off, x.bytes()))
	}
	d.Prove()
	d.Close()
	if len(log) != 1 || !strings.Contains(log[0], "is complete and its SHA-256 is") || !IsStream(o.Dir) {
		t.Errorf("%q", log)
	}
	h.SetFault(nil)
	must(t, Fetch(t.Context(), o.Options))
	complete(t, served, o.Dir)
}

func TestDepotRefusesWrongBytes(t *testing.T) {
	served := shardRepo(t)
	data := shard()
	digest := func(_ string, off, n int64) ([32]byte, bool) { return sha256.Sum256(data[off : off+n]), true }
	flip := func(kind hubtest.Kind, times int) func(hubtest.Request) *hubtest.Fault {
		return func(r hubtest.Request) *hubtest.Fault {
			if r.Kind == kind && r.Off == shardExperts[1].off {
				if times--; times >= 0 {
					return &hubtest.Fault{Flip: 1 + r.Off + 77}
				}
			}
			return nil
		}
	}
	for name, c := range map[string]struct {
		times  int
		mirror bool
		change func(*DepotOptions)
		want   string
	}{
		"once":          {1, false, nil, ""},
		"always":        {99, false, nil, "wrong digest"},
		"with a mirror": {99, true, nil, ""},
		"by the look":   {99, false, func(o *DepotOptions) { o.Digest, o.TrustHTTP = nil, true }, "cannot be right"},
	} {
		h := hubtest.New(t, served)
		o := DepotOptions{Options: quick(h, t.TempDir()), Digest: digest}
		if c.mirror {
			o.Sources = append(o.Sources, h.PlainURL)
		}
		if c.change != nil {
			c.change(&o)
		}
		d := openTestDepot(t, o)
		if o.Digest == nil {
			d.Check(seen(data))
		}
		h.SetFault(flip(hubtest.Content, c.times))
		x := shardExperts[1]
		b := make([]byte, x.bytes())
		err := d.Read(t.Context(), "big.safetensors", x.off, b)
		switch {
		case c.want == "" && (err != nil || !bytes.Equal(b, data[x.off:x.end])):
			t.Errorf("%s: %v", name, err)
		case c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want) || d.Has("big.safetensors", x.off, x.bytes())):
			t.Errorf("%s: error %v, want one with %q", name, err, c.want)
		}
	}
	h := hubtest.New(t, served)
	_, err := OpenDepot(t.Context(), DepotOptions{Options: quick(h, t.TempDir())})
	if err == nil || !strings.Contains(err.Error(), "is not https") {
		t.Errorf("plain HTTP without digests: %v", err)
	}
}

// seen is a check by content.
func seen(data []byte) func(string, int64, []byte) error {
	return func(_ string, off int64, b []byte) error {
		if !bytes.Equal(b, data[off:off+int64(len(b))]) {
			return errors.New("not seen before")
		}
		return nil
	}
}

func TestDepotSaysWhenTheDiskIsFullAndGoesOn(t *testing.T) {
	h := hubtest.New(t, shardRepo(t))
	var mu sync.Mutex
	full := false
	o := DepotOptions{Options: quick(h, t.TempDir()), TrustHTTP: true}
	o.hooks = &hooks{write: func(path string, _ int64, _ int) error {
		mu.Lock()
		defer mu.Unlock()
		if full {
			return &fs.PathError{Op: "write", Path: path, Err: syscall.ENOSPC}
		}
		return nil
	}}
	d := openTestDepot(t, o)
	full = true
	x := shardExperts[0]
	err := d.Ensure(t.Context(), "big.safetensors", x.off, x.bytes())
	if err == nil || !strings.Contains(err.Error(), "make room") || d.Has("big.safetensors", x.off, x.bytes()) {
		t.Errorf("error %v", err)
	}
	mu.Lock()
	full = false
	mu.Unlock()
	must(t, d.Ensure(t.Context(), "big.safetensors", x.off, x.bytes()))
	for _, bad := range []span{{-1, 5}, {0, 1 << 40}} {
		if d.Ensure(t.Context(), "big.safetensors", bad.off, bad.bytes()) == nil {
			t.Errorf("%v is accepted", bad)
		}
	}
	if d.Ensure(t.Context(), "small.json", 0, 1) == nil {
		t.Error("a file that is no shard is accepted")
	}
}

func FuzzDenseSpans(f *testing.F) {
	b := shard()
	f.Add(b[8:shardHeader], int64(shardHeader), int64(len(b)))
	f.Add([]byte(`{"x":{"data_offsets":[5,3]}}`), int64(8), int64(100))
	f.Fuzz(func(t *testing.T, head []byte, data, size int64) {
		if data < 8 || size < data || !json.Valid(head) {
			return
		}
		s, err := denseSpans(head, data, size)
		if err == nil && (s[0].off != 0 || s[len(s)-1].end > size) {
			t.Fatalf("%v of %d bytes", s, size)
		}
	})
}

func TestDenseSpansAreAllButExperts(t *testing.T) {
	b := shard()
	s, err := denseSpans(b[8:shardHeader], shardHeader, int64(len(b)))
	must(t, err)
	want := spans{{0, shardHeader + 150000}, {shardHeader + 210000, shardHeader + 210009}}
	if d := cmp.Diff(want, s, cmp.AllowUnexported(span{})); d != "" {
		t.Error(d)
	}
	for _, head := range []string{`[]`, `{"a":{}}`, `{"a":{"data_offsets":[0,99]}}`, `{"a":{"data_offsets":[-1,2]}}`, `{"a":{"data_offsets":[2,1]}}`, `{"a":{"data_offsets":["0",1]}}`} {
		if _, err := denseSpans([]byte(head), 8, 16); err == nil {
			t.Errorf("%s is accepted", head)
		}
	}
}

// What was installed and is lost is never taken for zeros: the store does not open, and
// is put right.
// TestVerifySaysThatAnInstallationIsUnfinished looks at a store whose installation was
// interrupted: what is dense is not there yet, and will not come on demand.
func TestVerifySaysThatAnInstallationIsUnfinished(t *testing.T) {
	h := hubtest.New(t, shardRepo(t))
	o := DepotOptions{Options: quick(h, t.TempDir()), TrustHTTP: true}
	d, err := OpenDepot(t.Context(), o)
	must(t, err)
	must(t, d.Close())
	if r, err := Verify(t.Context(), o.Dir, VerifyOptions{}); err != nil || !r.OK() {
		t.Fatalf("an installed store: %+v, %v", r, err)
	}
	s, err := openStore(o.Dir, nil)
	must(t, err)
	must(t, s.uninstall())
	if r, err := Verify(t.Context(), o.Dir, VerifyOptions{}); err != nil || r.OK() || !strings.Contains(r.Bad[0].Why, "fetch --stream") {
		t.Errorf("an unfinished one: %+v, %v", r, err)
	}
}

func TestDepotMissesWhatWasInstalled(t *testing.T) {
	h := hubtest.New(t, shardRepo(t))
	for name, lose := range map[string]func(path string) error{
		"the shard was cut":           func(p string) error { return os.Truncate(p, shardHeader+1000) },
		"the shard is gone":           os.Remove,
		"the ranges are gone":         func(p string) error { return os.Remove(p + rangesSuffix) },
		"the ranges were cut":         func(p string) error { return os.Truncate(p+rangesSuffix, journalHead+recordBytes) },
		"both are gone":               func(p string) error { return errors.Join(os.Remove(p), os.Remove(p+rangesSuffix)) },
		"the ranges are another file": func(p string) error { return os.WriteFile(p+rangesSuffix, make([]byte, 5000), 0o644) },
	} {
		o := DepotOptions{Options: quick(h, t.TempDir()), TrustHTTP: true}
		d, err := OpenDepot(t.Context(), o)
		must(t, err)
		must(t, d.Close())
		path := filepath.Join(o.Dir, "big.safetensors")
		must(t, lose(path))
		for range 2 { // opening it may have put files there
			if d, err := OpenStream(t.Context(), o); err == nil || !strings.Contains(err.Error(), "fetch --stream") || strings.Contains(err.Error(), "\n") {
				t.Errorf("%s: it opens: %v", name, err)
				if err == nil {
					d.Close()
				}
			}
		}
		if r, err := Verify(t.Context(), o.Dir, VerifyOptions{Deep: true}); err != nil || r.OK() {
			t.Errorf("%s: verify finds nothing: %+v, %v", name, r, err)
		}
		d, err = OpenDepot(t.Context(), o)
		must(t, err)
		must(t, d.Close())
		d, err = OpenStream(t.Context(), o)
		must(t, err)
		b, err := os.ReadFile(path)
		must(t, err)
		if want := shard(); !bytes.Equal(b[:shardExperts[0].off], want[:shardExperts[0].off]) || !bytes.Equal(b[shardExperts[2].end:], want[shardExperts[2].end:]) {
			t.Errorf("%s: other dense weights than were served", name)
		}
		must(t, d.Close())
	}
}

// A shard that is there already counts if its digest is right, and not otherwise.
func TestDepotComparesWhatItFinds(t *testing.T) {
	h := hubtest.New(t, shardRepo(t))
	for name, found := range map[string][]byte{"right": shard(), "wrong": make([]byte, len(shard()))} {
		o := DepotOptions{Options: quick(h, t.TempDir()), TrustHTTP: true}
		path := filepath.Join(o.Dir, "big.safetensors")
		must(t, os.WriteFile(path, found, 0o644))
		h.Forget()
		d := openTestDepot(t, o)
		x := shardExperts[1]
		b := make([]byte, x.bytes())
		must(t, d.Read(t.Context(), "big.safetensors", x.off, b))
		if !bytes.Equal(b, shard()[x.off:x.end]) {
			t.Errorf("%s: an expert of zeros", name)
		}
		if _, n := asked(h); (n > 0) != (name == "wrong") {
			t.Errorf("%s: %d bytes were fetched", name, n)
		}
	}
}

// A small file without which the others make no sense is named, and fetched alone.
func TestDepotIsRepairedOfASmallFile(t *testing.T) {
	h := hubtest.New(t, nano)
	o := DepotOptions{Options: quick(h, t.TempDir()), TrustHTTP: true}
	d, err := OpenDepot(t.Context(), o)
	must(t, err)
	must(t, d.Close())
	path := filepath.Join(o.Dir, "config.json")
	right, err := os.ReadFile(path)
	must(t, err)
	must(t, os.WriteFile(path, bytes.Repeat([]byte("x"), len(right)), 0o644))
	h.Forget()
	r, err := Verify(t.Context(), o.Dir, VerifyOptions{Deep: true, Repair: &o.Options})
	if err != nil || !r.OK() {
		t.Fatalf("%+v, %v", r, err)
	}
	if b, err := os.ReadFile(path); err != nil || !bytes.Equal(b, right) {
		t.Errorf("it was not put right: %v", err)
	}
	if _, n := asked(h); n > 0 {
		t.Errorf("%d bytes of shards were fetched", n)
	}
}

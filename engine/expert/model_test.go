package expert

import (
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"io/fs"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"deltafin/engine/checkpoint"
	"deltafin/engine/drive"
	"deltafin/engine/k3"
	"deltafin/engine/kernel"
	"deltafin/golden"
	"deltafin/prefill"
)

// inMemory is the simplest spine, so that these tests stand on experts alone. It
// also gives tensors to bind.
type inMemory struct {
	ck   *checkpoint.Checkpoint
	attn []*k3.Attention
	ffn  []*k3.FeedForward
	out  *k3.Output
}

func (m *inMemory) floats(name string) ([]float32, error) {
	x, err := m.ck.Tensor(name)
	if err != nil {
		return nil, err
	}
	b := make([]byte, x.Bytes)
	if err := m.ck.Read(x, b); err != nil {
		return nil, err
	}
	v := kernel.Floats(int(x.Bytes / x.DType.Size()))
	for i := range v {
		if x.DType == checkpoint.F32 {
			v[i] = math.Float32frombits(binary.LittleEndian.Uint32(b[4*i:]))
		} else {
			v[i] = math.Float32frombits(uint32(binary.LittleEndian.Uint16(b[2*i:])) << 16)
		}
	}
	return v, nil
}

func (m *inMemory) Matrix(name string, rows, cols int) (*kernel.Matrix, error) {
	x, err := m.ck.Tensor(name)
	if err != nil {
		return nil, err
	}
	b := kernel.Bytes(int(x.Bytes))
	f := kernel.BF16
	if x.DType == checkpoint.F32 {
		f = kernel.F32
	}
	if err := m.ck.Read(x, b); err != nil {
		return nil, err
	}
	return kernel.NewMatrix(f, rows, cols, b, nil)
}

func (m *inMemory) Vector(name string, n int) ([]float32, error) {
	v, err := m.floats(name)
	if err != nil {
		return nil, err
	}
	return v[:n], nil
}

func (m *inMemory) Attention(_ context.Context, l int) (*k3.Attention, func(), error) {
	return m.attn[l], func() {}, nil
}

func (m *inMemory) FeedForward(_ context.Context, l int) (*k3.FeedForward, func(), error) {
	return m.ffn[l], func() {}, nil
}

func (m *inMemory) Output(context.Context) (*k3.Output, func(), error) {
	return m.out, func() {}, nil
}

func (m *inMemory) Head(_ context.Context, use func(int, *kernel.Matrix) error) error {
	w, err := m.Matrix(k3.HeadName, m.ck.Config().Vocab, m.ck.Config().Hidden)
	if err != nil {
		return err
	}
	return use(0, w)
}

func (m *inMemory) Embed(_ context.Context, dst kernel.Mat, ids []int) error {
	v, err := m.floats("model.embed_tokens.weight")
	for r, id := range ids {
		copy(dst.Row(r), v[id*m.ck.Config().Hidden:][:m.ck.Config().Hidden])
	}
	return err
}

// world is a golden checkpoint with its dense weights in memory.
type world struct {
	ck    *checkpoint.Checkpoint
	spine *inMemory
	cases []golden.Case
}

var worlds sync.Map

// open returns a golden checkpoint; it stays open for all tests.
func openWorld(t testing.TB, set string) *world {
	t.Helper()
	if w, ok := worlds.Load(set); ok {
		return w.(*world)
	}
	ck, err := checkpoint.Open(golden.ModelDir(set))
	if err != nil {
		t.Fatal(err)
	}
	m := &inMemory{ck: ck}
	c := ck.Config()
	for l := range c.Layers {
		a, err := k3.BindAttention(c, l, m)
		if err != nil {
			t.Fatal(err)
		}
		f, err := k3.BindFeedForward(c, l, m)
		if err != nil {
			t.Fatal(err)
		}
		m.attn, m.ffn = append(m.attn, a), append(m.ffn, f)
	}
	if m.out, err = k3.BindOutput(c, m); err != nil {
		t.Fatal(err)
	}
	cases, err := golden.Cases(set)
	if err != nil {
		t.Fatal(err)
	}
	w := &world{ck, m, cases}
	worlds.Store(set, w)
	return w
}

// find returns a case of a golden set.
func (w *world) find(t testing.TB, name string) *golden.Case {
	for i := range w.cases {
		if w.cases[i].Name == name {
			return &w.cases[i]
		}
	}
	t.Fatalf("no golden case %s", name)
	return nil
}

// newSource opens a source over a golden checkpoint whose slots are spoilt when they
// are given back, so that a use after release shows in the result.
func (w *world) newSource(t testing.TB, d drive.Options, o Options) *Source {
	t.Helper()
	d.Buffered = true
	if d.Warn == nil {
		d.Warn = func(string) {}
	}
	drives := drive.NewSet(d)
	t.Cleanup(drives.Close)
	before := drive.Allocated()
	s, err := Open(w.ck, drives, o)
	if err != nil {
		t.Fatal(err)
	}
	s.release = func(sl *slot) {
		for _, b := range []*drive.Buffer{sl.main, sl.tail} {
			if b != nil && !b.Poisoned() {
				for v := b.Bytes(); len(v) > 0; v = v[min(len(v), 97):] {
					v[0] ^= 0xFF
				}
			}
		}
	}
	t.Cleanup(func() {
		most := Memory(w.ck, o, len(drives.Devices()))
		if got := drive.Allocated() - before; got > most {
			t.Errorf("%d bytes are allocated, the options allow %d", got, most)
		}
		if err := s.Close(); err != nil {
			t.Error(err)
		}
		if got := drive.Allocated() - before; got != 0 {
			t.Errorf("%d bytes are left after Close", got)
		}
	})
	return s
}

// unhinted hides from the model that a source takes hints: tests that do not look
// at read-ahead are then free of it, and the others give their own.
type unhinted struct{ k3.Experts }

func newModel(t testing.TB, w *world, s k3.Experts) *k3.Model {
	pool := kernel.NewPool(1)
	t.Cleanup(pool.Close)
	return &k3.Model{Config: w.ck.Config(), Spine: w.spine, Experts: unhinted{s}, Pool: pool}
}

// replay runs a golden case in passes of at most rows tokens and returns the
// logits rows that chose its tokens.
func replay(ctx context.Context, m *k3.Model, c *golden.Case, rows int) ([][]float32, error) {
	st := k3.NewState(m.Config)
	ids := append(slices.Clone(c.PromptIDs), c.Greedy[:len(c.Greedy)-1]...)
	var out [][]float32
	for at := 0; at < len(ids); {
		n := min(rows, len(ids)-at)
		got, err := m.Forward(ctx, st, ids[at:at+n], k3.Pass{Logits: n})
		if err != nil {
			return nil, err
		}
		for i := range n {
			if at+i >= len(c.PromptIDs)-1 {
				out = append(out, slices.Clone(got.Row(i)))
			}
		}
		at += n
	}
	return out, nil
}

// identity checks the counters' law.
func identity(t testing.TB, c prefill.Counters) {
	t.Helper()
	if c.Read+c.Resident-c.Wasted != c.Union || c.Ahead+c.Wasted > c.Read {
		t.Errorf("counters do not add up: %+v", c)
	}
}

// sameAsFrozen runs a case and demands the frozen hash and the counters' law.
func sameAsFrozen(t testing.TB, w *world, s *Source, name string, rows int, setup func(*k3.Model)) {
	t.Helper()
	c := w.find(t, name)
	m := newModel(t, w, s)
	if setup != nil {
		setup(m)
	}
	before := s.Counters()
	got, err := replay(t.Context(), m, c, rows)
	if err != nil {
		t.Fatal(err)
	}
	if h := golden.HashRows(got); h != c.LogitsSHA256 {
		t.Errorf("%s: logits hash %s, frozen %s", c.Key(), h, c.LogitsSHA256)
	}
	identity(t, s.Counters())
	union := s.Counters().Sub(before).Union
	if union == 0 || union%s.n != 0 {
		t.Errorf("%s: a union of %d bytes", c.Key(), union)
	}
	idle(t, s)
}

// idle demands that nothing is under way or held between streams, unread hints aside.
func idle(t testing.TB, s *Source) {
	t.Helper()
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.stream != nil || len(s.pending) > 0 || len(s.free)+s.ahead.held != s.made || s.ahead.held < len(s.ahead.loads) {
		t.Errorf("not idle: stream %v, %d pending, %d free and %d ahead of %d slots", s.stream != nil, len(s.pending), len(s.free), s.ahead.held, s.made)
	}
}

func copyFile(t testing.TB, from, to string) {
	t.Helper()
	b, err := os.ReadFile(from)
	if err == nil {
		err = os.MkdirAll(filepath.Dir(to), 0o755)
	}
	if err == nil {
		err = os.WriteFile(to, b, 0o644)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// mirror copies every step-th shard of a checkpoint to a new directory.
func mirror(t testing.TB, ck *checkpoint.Checkpoint, step int) string {
	t.Helper()
	dir := t.TempDir()
	for i := 0; i < ck.Files(); i += step {
		copyFile(t, ck.Path(i), filepath.Join(dir, filepath.Base(ck.Path(i))))
	}
	return dir
}

// loose writes every step-th expert as a file of its own, as raw-v1 stores have them.
func loose(t testing.TB, ck *checkpoint.Checkpoint, step int) string {
	t.Helper()
	root := t.TempDir()
	dir := filepath.Join(root, "k3-experts")
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	c := ck.Config()
	b := make([]byte, ck.ExpertLayout().ExpertBytes)
	for l := c.FirstDense; l < c.Layers; l++ {
		for id := 0; id < c.Experts; id += step {
			if err := ck.ReadExtent(ck.Expert(l, id), b); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(filepath.Join(dir, fmt.Sprintf("L%d-E%d.bin", l, id)), b, 0o644); err != nil {
				t.Fatal(err)
			}
		}
	}
	return root
}

func TestOneHashForEveryNumberOfSlots(t *testing.T) {
	for _, c := range []struct{ set, name string }{{"tiny-a", "len17"}, {"tiny-b", "len17"}, {"nano", "france"}} {
		w := openWorld(t, c.set)
		for i, o := range []Options{{Slots: 1}, {Slots: 2, Reorder: 1}, {Slots: 3}, {Reorder: 1}, {Slots: 200, Reorder: 200}} {
			if c.set == "nano" && i%2 == 1 {
				continue
			}
			s := w.newSource(t, drive.Options{}, o)
			sameAsFrozen(t, w, s, c.name, 100, nil)
			if o.Slots < 3 && c.set == "tiny-a" {
				sameAsFrozen(t, w, s, c.name, 1, nil)
			}
			if got := s.Counters(); got.Read != got.Union || got.Wasted+got.Ahead+got.Resident != 0 {
				t.Errorf("%+v: %+v", o, got)
			}
		}
	}
}

func TestOneHashForEveryResidency(t *testing.T) {
	w := openWorld(t, "tiny-a")
	all := int64(w.ck.Config().Experts*w.ck.Config().Layers) * SlotBytes(w.ck)
	for _, budget := range []int64{0, SlotBytes(w.ck) - 1, SlotBytes(w.ck), 31 * SlotBytes(w.ck), all} {
		s := w.newSource(t, drive.Options{}, Options{Slots: 3, Resident: budget})
		for range 2 {
			sameAsFrozen(t, w, s, "len17", 7, nil)
		}
		st, c := s.Stats(), s.Counters()
		if st.ResidentBytes > budget || budget >= SlotBytes(w.ck) && budget < all && st.ResidentBytes+SlotBytes(w.ck) <= budget {
			t.Errorf("budget %d: %d bytes are resident", budget, st.ResidentBytes)
		}
		if budget == all && c.Read != int64(st.ResidentExperts)*s.n {
			t.Errorf("with room for all, %d bytes were read for %d experts", c.Read, st.ResidentExperts)
		}
		if budget == 0 && c.Resident != 0 {
			t.Errorf("without room %d bytes came from memory", c.Resident)
		}
	}
}

// TestOneHashForEveryHome reads from copies of every kind, complete and partial,
// with drives that deliver in a shuffled order.
func TestOneHashForEveryHome(t *testing.T) {
	for _, set := range []string{"tiny-a", "tiny-b"} {
		w := openWorld(t, set)
		full, half, third := mirror(t, w.ck, 1), mirror(t, w.ck, 2), loose(t, w.ck, 3)
		staged := stageHalf(t, w.ck)
		mixes := [][]string{{full}, {half}, {third}, {staged}, {half, third, staged}, {full, half, third}, {full, filepath.Join(third, "k3-experts"), staged}}
		if set == "tiny-b" {
			mixes = mixes[4:]
		}
		for _, dirs := range mixes {
			synctest.Test(t, func(t *testing.T) {
				// Every call is as late as it likes, in fake time.
				rng, mu := rand.New(rand.NewPCG(1, 2)), sync.Mutex{}
				d := drive.Options{Pace: map[string]drive.Pace{}, Fault: func(string, int64, int) error {
					mu.Lock()
					wait := time.Duration(rng.IntN(60)) * time.Microsecond
					mu.Unlock()
					time.Sleep(wait)
					return nil
				}}
				for _, dir := range dirs {
					d.Pace[dir] = drive.Pace{}
				}
				s := w.newSource(t, d, Options{Dirs: dirs, Slots: 9})
				sameAsFrozen(t, w, s, "len17", 9, nil)
				served := 0
				for _, x := range s.Stats().Devices {
					if x.DemandBytes > 0 {
						served++
					}
				}
				if served != 1+len(dirs) {
					t.Errorf("%v: %d drives served, want all %d: %+v", dirs, served, 1+len(dirs), s.Stats().Devices)
				}
				var sum int64
				for _, x := range s.Stats().Devices {
					sum += x.DemandBytes
				}
				if c := s.Counters(); sum != c.Read {
					t.Errorf("drives account for %d bytes, the counters for %d", sum, c.Read)
				}
				balanceHomes.Set(false)
				s = w.newSource(t, d, Options{Dirs: dirs, Slots: 9})
				sameAsFrozen(t, w, s, "len5", 9, nil)
				balanceHomes.Set(true)
				if x := s.Stats().Devices[0]; x.DemandBytes != s.Counters().Read {
					t.Errorf("%v: unbalanced reads did not all go to the first home: %d of %d", dirs, x.DemandBytes, s.Counters().Read)
				}
			})
		}
	}
}

func TestReadAheadChangesNothingWhateverIsHinted(t *testing.T) {
	w := openWorld(t, "tiny-a")
	c := w.ck.Config()
	rng := rand.New(rand.NewPCG(3, 4))
	truth := w.find(t, "len17").Routes
	for _, h := range []struct {
		name string
		hint func(layer int, route []int32) []int32
		used bool
		gate func(p float64) bool
	}{
		{"right", func(l int, r []int32) []int32 { return r }, true, func(p float64) bool { return p == 1 }},
		{"wrong", func(l int, r []int32) []int32 {
			var ids []int32
			for id := range int32(c.Experts) {
				if !slices.Contains(r, id) {
					ids = append(ids, id)
				}
			}
			return ids[:min(len(ids), 4)]
		}, false, func(p float64) bool { return p < breakEven }},
		{"random", func(l int, r []int32) []int32 {
			var ids []int32
			for _, id := range rng.Perm(c.Experts)[:6] {
				ids = append(ids, int32(id))
			}
			return ids
		}, true, func(p float64) bool { return p < 1 }},
		{"nonsense", func(l int, r []int32) []int32 { return []int32{-1, 1 << 20, 3, 3, 3} }, false, func(p float64) bool { return p < 1 }},
	} {
		for _, slots := range []int{2, 3, 8, 40} {
			s := w.newSource(t, drive.Options{}, Options{Slots: slots, AheadSlots: slots})
			// The oracle's routes say what the next layer will want of this row.
			row := 0
			sameAsFrozen(t, w, s, "len17", 1, func(m *k3.Model) {
				m.ObserveRoutes = func(l int, ids []int32, _ []float32) {
					if l+1 < c.Layers {
						var next []int32
						for _, id := range truth[l+1-c.FirstDense].IDs32[row] {
							next = append(next, int32(id))
						}
						s.Hint(l+1, h.hint(l+1, next))
					} else {
						row++
					}
				}
			})
			k := s.Counters()
			if slots > 3 && h.name != "nonsense" && h.used != (k.Ahead > 0) {
				t.Errorf("%s hints, %d slots: %+v", h.name, slots, k)
			}
			if slots == 2 && k.Ahead+k.Wasted > 0 {
				t.Errorf("%s hints: the floor was read ahead: %+v", h.name, k)
			}
			if h.name == "right" && k.Wasted > 0 {
				t.Errorf("right hints were wasted: %+v", k)
			}
			if p := s.Stats().Layers[3].Precision; slots > 3 && !h.gate(p) {
				t.Errorf("%s hints: precision %v", h.name, p)
			}
			if h.name == "wrong" && slots == 40 && k.Wasted > 4*3*int64(c.Layers)*s.n {
				t.Errorf("the gate let %d wrong experts through", k.Wasted/s.n)
			}
		}
	}
}

func TestReadAheadOffReadsNothingAhead(t *testing.T) {
	w := openWorld(t, "tiny-a")
	readAhead.Set(false)
	defer readAhead.Set(true)
	s := w.newSource(t, drive.Options{}, Options{})
	sameAsFrozen(t, w, s, "len5", 3, func(m *k3.Model) {
		m.ObserveRoutes = func(l int, ids []int32, _ []float32) {
			if l+1 < m.Config.Layers {
				s.Hint(l+1, ids)
			}
		}
	})
	if k := s.Counters(); k.Ahead+k.Wasted != 0 {
		t.Errorf("%+v", k)
	}
}

func filesBelow(dir string) (files []string) {
	filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.Type().IsRegular() {
			files = append(files, path)
		}
		return err
	})
	return files
}

// A home that fails in any way is left, said so once, and the result stays.
func TestAHomeThatFailsMidRunIsLeft(t *testing.T) {
	w := openWorld(t, "tiny-a")
	other := mirror(t, w.ck, 1)
	slow := drive.Pace{Latency: 300 * time.Microsecond} // so that the one that fails is the one in use
	for _, c := range []struct {
		name string
		harm func(dir string, fail *error)
	}{
		{"an I/O error", func(_ string, fail *error) { *fail = syscall.EIO }},
		{"removed", func(dir string, _ *error) { os.RemoveAll(dir) }},
		{"truncated", func(dir string, _ *error) {
			for _, f := range filesBelow(dir) {
				os.Truncate(f, 1000)
			}
		}},
		{"replaced", func(dir string, _ *error) {
			for _, f := range filesBelow(dir) {
				b, _ := os.ReadFile(f)
				for i := range b {
					b[i] ^= 0x55
				}
				os.Remove(f)
				os.WriteFile(f, b, 0o644)
			}
		}},
	} {
		for i, dirs := range []func() string{
			func() string { return mirror(t, w.ck, 1) },
			func() string { return loose(t, w.ck, 1) },
			func() string { return stageHalf(t, w.ck) },
		} {
			if i > 0 && c.name != "removed" && c.name != "truncated" {
				continue
			}
			dir := dirs()
			synctest.Test(t, func(t *testing.T) {
				var mu sync.Mutex
				var fail error
				var lines []string
				d := drive.Options{MaxFiles: 1, Fault: func(path string, _ int64, _ int) error {
					mu.Lock()
					defer mu.Unlock()
					if strings.HasPrefix(path, dir) {
						return fail
					}
					return nil
				}, Pace: map[string]drive.Pace{dir: {}, other: slow, w.ck.Dir(): slow}}
				s := w.newSource(t, d, Options{Dirs: []string{dir, other}, Slots: 6, Warn: func(l string) {
					mu.Lock()
					lines = append(lines, l)
					mu.Unlock()
				}})
				passes := 0
				sameAsFrozen(t, w, s, "len5", 3, func(m *k3.Model) {
					m.ObserveRoutes = func(l int, _ []int32, _ []float32) {
						if l == 5 {
							if passes++; passes == 3 {
								mu.Lock()
								c.harm(dir, &fail)
								mu.Unlock()
							}
						}
					}
				})
				mu.Lock()
				if len(lines) != 1 || !strings.Contains(lines[0], dir) || strings.Contains(lines[0], "\n") {
					t.Errorf("%s of %s: said %q: %+v", c.name, dir, lines, s.Stats().Devices)
				}
				mu.Unlock()
			})
		}
	}
}

func TestAnExpertWithoutAHomeIsAnErrorThatNamesItAndTheDrive(t *testing.T) {
	w := openWorld(t, "tiny-a")
	for _, dirs := range [][]string{nil, {mirror(t, w.ck, 1)}} {
		fail := false
		var mu sync.Mutex
		s := w.newSource(t, drive.Options{Fault: func(string, int64, int) error {
			mu.Lock()
			defer mu.Unlock()
			if fail {
				return syscall.EIO
			}
			return nil
		}}, Options{Dirs: dirs, Warn: func(string) {}})
		mu.Lock()
		fail = true
		mu.Unlock()
		err := s.Stream(t.Context(), 2, []int32{3, 7, 9}, func(int, *k3.Expert) error { t.Error("used"); return nil }, nil)
		if err == nil || !strings.Contains(err.Error(), "layer 2 expert ") || !strings.Contains(err.Error(), "check the drive that holds") || strings.Contains(err.Error(), "\n") {
			t.Errorf("error %v", err)
		}
		identity(t, s.Counters())
		idle(t, s)
		mu.Lock()
		fail = false
		mu.Unlock()
		sameAsFrozen(t, w, s, "len5", 3, nil)
	}
}

// A copy with a scale that makes weights infinite is a failed home; in the only
// home it is the checkpoint's error.
func TestACorruptCopyIsNeverUsed(t *testing.T) {
	w := openWorld(t, "tiny-a")
	dir := loose(t, w.ck, 1)
	files, _ := filepath.Glob(dir + "/k3-experts/*")
	l := w.ck.ExpertLayout().Parts[checkpoint.W3Scale]
	for _, f := range files {
		h, err := os.OpenFile(f, os.O_RDWR, 0)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := h.WriteAt([]byte{0xFF}, l.Offset+l.Bytes-1); err != nil {
			t.Fatal(err)
		}
		h.Close()
	}
	lines := 0
	s := w.newSource(t, drive.Options{Pace: map[string]drive.Pace{dir: {}}}, Options{Dirs: []string{dir}, Slots: 8, Warn: func(string) { lines++ }})
	sameAsFrozen(t, w, s, "len17", 5, nil)
	if k := s.Counters(); k.Wasted == 0 || lines != 1 {
		t.Errorf("%+v, %d lines", k, lines)
	}
}

func TestACancelledStreamLeavesNothingBehind(t *testing.T) {
	w := openWorld(t, "tiny-a")
	c := w.find(t, "len17")
	dir := mirror(t, w.ck, 1)
	goroutines := runtime.NumGoroutine()
	rng := rand.New(rand.NewPCG(9, 9))
	o := Options{Dirs: []string{dir}, Slots: 5, AheadSlots: 2, Resident: 5 * SlotBytes(w.ck)}
	s := w.newSource(t, drive.Options{Pace: map[string]drive.Pace{
		dir: {BytesPerSecond: 400e6, Latency: 50 * time.Microsecond},
	}}, o)
	m := newModel(t, w, s)
	all := make([]int32, m.Config.Experts)
	for i := range all {
		all[i] = int32(i)
	}
	m.ObserveRoutes = func(l int, ids []int32, _ []float32) {
		if l+1 < m.Config.Layers {
			s.Hint(l+1, all[rng.IntN(len(all)):])
		}
	}
	cancelled, latest := 0, time.Duration(0)
	for range 200 {
		ctx, cancel := context.WithCancel(t.Context())
		var at atomic.Int64
		timer := time.AfterFunc(time.Duration(rng.IntN(4000))*time.Microsecond, func() {
			at.Store(time.Now().UnixNano())
			cancel()
		})
		_, err := replay(ctx, m, c, 17)
		if err != nil {
			cancelled++
			latest = max(latest, time.Since(time.Unix(0, at.Load())))
		}
		timer.Stop()
		cancel()
		identity(t, s.Counters())
		idle(t, s)
	}
	// A read takes less than a millisecond here; the rest is a busy machine's.
	if latest > time.Second {
		t.Errorf("returned %v after it was cancelled", latest)
	}
	if cancelled < 100 {
		t.Errorf("only %d of 200 were cancelled", cancelled)
	}
	sameAsFrozen(t, w, s, "len17", 17, nil)
	for end := time.Now().Add(2 * time.Second); runtime.NumGoroutine() > goroutines+2; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%d goroutines before, %d after", goroutines, runtime.NumGoroutine())
		}
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
	// No byte that came off a drive is missing in the account.
	var read int64
	for _, d := range s.drives.Devices() {
		st := d.Stats()
		read += st.Demand.Bytes + st.Ahead.Bytes
	}
	if got := s.Counters().Read; got != read {
		t.Errorf("the drives gave %d bytes, the counters have %d", read, got)
	}
	t.Logf("%d of 200 cancelled, the slowest returned after %v; %+v", cancelled, latest, s.Counters())
}

func TestAnErrorOfUseEndsTheStream(t *testing.T) {
	w := openWorld(t, "nano")
	s := w.newSource(t, drive.Options{}, Options{Slots: 6})
	for at := range 9 {
		err := s.Stream(t.Context(), 3, []int32{1, 2, 3, 5, 8, 13, 21, 34, 55}, func(i int, _ *k3.Expert) error {
			if i == at {
				return io.ErrClosedPipe
			}
			return nil
		}, nil)
		if err != io.ErrClosedPipe {
			t.Errorf("error %v", err)
		}
		identity(t, s.Counters())
		idle(t, s)
	}
}

func TestAStalledReadIsRetriedElsewhere(t *testing.T) {
	w := openWorld(t, "tiny-a")
	dir := mirror(t, w.ck, 1)
	hold := make(chan struct{})
	var stuck atomic.Bool
	d := drive.Options{Deadline: 20 * time.Millisecond, Pace: map[string]drive.Pace{dir: {}}, Fault: func(path string, _ int64, _ int) error {
		if strings.HasPrefix(path, dir) && stuck.CompareAndSwap(false, true) {
			<-hold
		}
		return nil
	}}
	// Not newSource: the stalled buffer stays allocated until the drive answers.
	d.Buffered, d.Warn = true, func(string) {}
	drives := drive.NewSet(d)
	defer drives.Close()
	before := drive.Allocated()
	s, err := Open(w.ck, drives, Options{Dirs: []string{dir}, Slots: 6, Warn: func(string) {}})
	if err != nil {
		t.Fatal(err)
	}
	sameAsFrozen(t, w, s, "len17", 4, nil)
	if err := s.Close(); err != nil {
		t.Error(err)
	}
	if got := drive.Allocated() - before; got != SlotBytes(w.ck) {
		t.Errorf("%d bytes are held by the stalled read", got)
	}
	close(hold)
	for end := time.Now().Add(2 * time.Second); drive.Allocated() != before; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("the stalled read's memory never came back")
		}
	}
}

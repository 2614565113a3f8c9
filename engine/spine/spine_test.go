package spine

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"deltafin/engine/checkpoint"
	"deltafin/engine/drive"
	"deltafin/engine/expert"
	"deltafin/engine/k3"
	"deltafin/engine/kernel"
	"deltafin/golden"
)

// Small heads are cut too, as K3's is.
func TestMain(m *testing.M) {
	headSlice = 100_000
	if os.Getenv(killAt) != "" {
		packAndDie()
	}
	before := runtime.NumGoroutine()
	code := m.Run()
	if flag.Lookup("test.fuzz").Value.String() != "" {
		os.Exit(code) // the coordinator of a fuzz target leaves goroutines of its own
	}
	for range 100 { // a goroutine that was told to end may take a moment
		if runtime.NumGoroutine() <= before {
			break
		}
		time.Sleep(10 * time.Millisecond)
	}
	if n := runtime.NumGoroutine(); code == 0 && n > before {
		b := make([]byte, 1<<20)
		fmt.Printf("%d goroutines at the end, %d at the start\n%s\n", n, before, b[:runtime.Stack(b, true)])
		code = 1
	}
	if n := drive.Allocated(); code == 0 && n != 0 {
		fmt.Printf("%d bytes of buffers are not freed\n", n)
		code = 1
	}
	os.Exit(code)
}

func openCheckpoint(t testing.TB, set string) *checkpoint.Checkpoint {
	t.Helper()
	ck, err := checkpoint.Open(golden.ModelDir(set))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ck.Close() })
	return ck
}

func newDrives(t testing.TB, o drive.Options) *drive.Set {
	t.Helper()
	if o.Warn == nil {
		o.Warn = func(string) {}
	}
	d := drive.NewSet(o)
	t.Cleanup(d.Close)
	return d
}

// openSpine opens a spine whose freed memory is spoilt.
func openSpine(t testing.TB, ck *checkpoint.Checkpoint, d *drive.Set, o Options) *Spine {
	t.Helper()
	o.poison = true
	s, err := Open(context.Background(), ck, d, o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	return s
}

// passes runs a case over one spine after another.
type passes struct {
	m k3.Model
	c *golden.Case
	n int // tokens

	closeExperts func()
	// want is the hash of the first n: the frozen one, or that of the resident spine, which
	// TestEveryBudgetGivesTheSameBits holds to the frozen ones.
	want string
}

// newPasses runs the whole case if n is 0, else n tokens of it.
func newPasses(t testing.TB, ck *checkpoint.Checkpoint, c *golden.Case, n int) *passes {
	t.Helper()
	pool := kernel.NewPool(2)
	t.Cleanup(pool.Close)
	drives := drive.NewSet(drive.Options{Buffered: true})
	experts, err := expert.Open(ck, drives, expert.Options{Resident: 1 << 30})
	if err != nil {
		t.Fatal(err)
	}
	closeExperts := sync.OnceFunc(func() {
		if err := experts.Close(); err != nil {
			t.Error(err)
		}
		drives.Close()
	})
	t.Cleanup(closeExperts)
	p := &passes{closeExperts: closeExperts, m: k3.Model{Config: ck.Config(), Experts: experts, Pool: pool}, c: c, n: n, want: c.LogitsSHA256}
	if n == 0 {
		p.n = len(c.Greedy)
		return p
	}
	d := drive.NewSet(drive.Options{Warn: func(string) {}})
	defer d.Close()
	s, err := Open(context.Background(), ck, d, Options{Resident: plenty})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if p.want, err = p.hash(context.Background(), s); err != nil {
		t.Fatal(err)
	}
	return p
}

// hash feeds the case's prompt and then its tokens one by one, as in decoding.
func (p *passes) hash(ctx context.Context, s k3.Spine) (string, error) {
	p.m.Spine = s
	state := k3.NewState(p.m.Config)
	var rows [][]float32
	feed := p.c.PromptIDs
	for i := range p.n {
		logits, err := p.m.Forward(ctx, state, feed, k3.Pass{Logits: 1})
		if err != nil {
			return "", err
		}
		rows = append(rows, append([]float32(nil), logits.Row(0)...))
		feed = p.c.Greedy[i:][:1]
	}
	return golden.HashRows(rows), nil
}

func find(t testing.TB, key string) *golden.Case {
	t.Helper()
	set, name, _ := strings.Cut(key, "/")
	c, err := golden.Find(set, name)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// check demands the case's hash.
func (p *passes) check(t testing.TB, s k3.Spine) {
	t.Helper()
	got, err := p.hash(context.Background(), s)
	if err != nil {
		t.Fatal(err)
	}
	if got != p.want {
		t.Errorf("%s: logits hash of %d tokens %s, expected %s", p.c.Key(), p.n, got, p.want)
	}
}

func setAhead(t testing.TB, on bool) {
	was := ahead.On()
	ahead.Set(on)
	t.Cleanup(func() { ahead.Set(was) })
}

const plenty = int64(1) << 40

// sizes is the memory that each piece needs, and the floor of the ring for every
// number of resident pieces.
func sizes(t testing.TB, ck *checkpoint.Checkpoint, o Options) (need, floor []int64) {
	t.Helper()
	p, err := newPlan(ck, o)
	if err != nil {
		t.Fatal(err)
	}
	floor = append(floor, p.ringFloor())
	for _, x := range p.pieces {
		need = append(need, x.need)
		x.resident = true
		floor = append(floor, p.ringFloor())
	}
	return need, floor
}

func TestEveryBudgetGivesTheSameBits(t *testing.T) {
	for _, key := range []string{"tiny-a/len5", "tiny-b/len17", "nano/france"} {
		c := find(t, key)
		ck := openCheckpoint(t, c.Set)
		whole, few := newPasses(t, ck, c, 0), newPasses(t, ck, c, 3)
		for _, on := range []bool{true, false} {
			t.Run(fmt.Sprintf("%s/ahead=%v", key, on), func(t *testing.T) {
				setAhead(t, on)
				d := newDrives(t, drive.Options{})
				_, floor := sizes(t, ck, Options{})
				for i, o := range []Options{
					{Resident: plenty},
					{Ring: floor[0]},
					{Ring: floor[0] + 4096},
					{Ring: floor[0] * 3 / 2},
					{Ring: floor[0] * 4},
					{Ring: plenty},
					{Ring: floor[0], KeepRouters: true},
					{Resident: plenty, KeepRouters: true},
				} {
					s := openSpine(t, ck, d, o)
					if i < 2 {
						whole.check(t, s)
					} else {
						few.check(t, s)
					}
					s.mu.Lock()
					if s.held > s.ring {
						t.Errorf("%+v: the ring holds %d bytes", o, s.held)
					}
					s.mu.Unlock()
					s.Close()
				}
			})
		}
	}
}

func TestEveryPrefixMayBeResident(t *testing.T) {
	for _, key := range []string{"tiny-a/len1", "tiny-b/len1"} {
		c := find(t, key)
		ck := openCheckpoint(t, c.Set)
		d := newDrives(t, drive.Options{})
		need, floor := sizes(t, ck, Options{})
		p := newPasses(t, ck, c, 3)
		resident := int64(0)
		for k := 0; ; k++ {
			s := openSpine(t, ck, d, Options{Resident: resident, Ring: floor[k]})
			if m := s.Memory(); m.Resident != resident || m.Ring != floor[k] {
				t.Fatalf("%d pieces are resident: memory is %+v, expected %d and %d", k, m, resident, floor[k])
			}
			p.check(t, s)
			s.Close()
			if k == len(need) {
				break
			}
			resident += need[k]
		}
	}
}

// On a slow drive, of whose reads four are in flight at a time.
func TestPiecesInManyReadsAreTheSame(t *testing.T) {
	c := find(t, "tiny-b/len5")
	ck := openCheckpoint(t, c.Set)
	d := newDrives(t, drive.Options{Pace: map[string]drive.Pace{ck.Dir(): {BytesPerSecond: 200e6, Latency: 100 * time.Microsecond}}})
	_, floor := sizes(t, ck, Options{gap: -1})
	p := newPasses(t, ck, c, 3)
	for _, ring := range []int64{floor[0], 2 * floor[0]} {
		s := openSpine(t, ck, d, Options{gap: -1, Ring: ring})
		if n := len(s.plan.attention(0).runs); n < 8 {
			t.Fatalf("attention is read in %d runs", n)
		}
		p.check(t, s)
	}
}

// In the released order of tensors a piece is one run of its shard.
func TestAPieceIsOneRead(t *testing.T) {
	for _, set := range golden.Sets {
		p, err := newPlan(openCheckpoint(t, set), Options{})
		if err != nil {
			t.Fatal(err)
		}
		for _, x := range p.pieces {
			if len(x.runs) != 1 {
				t.Errorf("%s: %s takes %d reads", set, x.name, len(x.runs))
			}
		}
	}
}

func TestReadsAreCountedAndAheadOfThePass(t *testing.T) {
	c := find(t, "tiny-a/len5")
	ck := openCheckpoint(t, c.Set)
	_, floor := sizes(t, ck, Options{})
	pass := newPasses(t, ck, c, 0)
	for _, on := range []bool{true, false} {
		setAhead(t, on)
		s := openSpine(t, ck, newDrives(t, drive.Options{}), Options{Ring: floor[0]})
		pass.check(t, s)
		s.Close()
		st, n := s.Stats(), int64(len(c.Greedy))
		var used int64
		for _, p := range st.Pieces {
			used += p.Bytes * n
			if p.Reads < n || p.Reads > n+1 {
				t.Errorf("ahead=%v: %s was read %d times in %d passes", on, p.Name, p.Reads, n)
			}
		}
		if got := st.Demand + st.Ahead - st.Wasted - s.plan.vectors.bytes; got != used {
			t.Errorf("ahead=%v: read %d on demand, %d ahead, of them %d wasted; the passes used %d", on, st.Demand, st.Ahead, st.Wasted, used)
		}
		if on && st.Ahead < used*9/10 || !on && st.Ahead != 0 {
			t.Errorf("ahead=%v: %d of %d bytes were read ahead", on, st.Ahead, used)
		}
		// Rows that lie together are one read, gaps included.
		if rows := int64(len(c.PromptIDs) + len(c.Greedy)); st.Embedding == 0 || st.Embedding > rows*max(embedRun, 2*int64(ck.Config().Hidden)) {
			t.Errorf("%d bytes of embeddings", st.Embedding)
		}
	}
}

// A pass without logits leaves out the head; the next begins at the beginning.
func TestPassesThatEndEarlyAreFollowed(t *testing.T) {
	c := find(t, "tiny-a/len17")
	ck := openCheckpoint(t, c.Set)
	need, floor := sizes(t, ck, Options{})
	p := newPasses(t, ck, c, 0)
	for _, o := range []Options{{Ring: floor[0]}, {Ring: plenty}, {Resident: need[0] + need[1], Ring: floor[2]}} {
		s := openSpine(t, ck, newDrives(t, drive.Options{}), o)
		p.m.Spine = s
		for range 2 {
			st := k3.NewState(ck.Config())
			var rows [][]float32
			for i, id := range c.PromptIDs {
				last := i == len(c.PromptIDs)-1
				pass := k3.Pass{}
				if last {
					pass.Logits = 1
				}
				logits, err := p.m.Forward(context.Background(), st, []int{id}, pass)
				if err != nil {
					t.Fatal(err)
				}
				if last {
					rows = append(rows, append([]float32(nil), logits.Row(0)...))
				}
			}
			for _, id := range c.Greedy[:len(c.Greedy)-1] {
				logits, err := p.m.Forward(context.Background(), st, []int{id}, k3.Pass{Logits: 1})
				if err != nil {
					t.Fatal(err)
				}
				rows = append(rows, append([]float32(nil), logits.Row(0)...))
			}
			if got := golden.HashRows(rows); got != c.LogitsSHA256 {
				t.Errorf("%+v: hash %s, frozen %s", o, got, c.LogitsSHA256)
			}
		}
	}
}

func TestSmallBudgetsAreRefusedWithTheNumber(t *testing.T) {
	ck := openCheckpoint(t, "tiny-a")
	_, floor := sizes(t, ck, Options{})
	_, err := Open(context.Background(), ck, newDrives(t, drive.Options{}), Options{Ring: floor[0] - 1})
	if !errors.Is(err, ErrMemory) || !strings.Contains(err.Error(), "needs "+gigabytes(floor[0])) {
		t.Errorf("the ring is too small: %v", err)
	}
	least, err := Floor(ck, "")
	if err != nil {
		t.Fatal(err)
	}
	if _, _, err := Fit(ck, Options{}, least-1); !errors.Is(err, ErrMemory) || !strings.Contains(err.Error(), gigabytes(least)+" at least") {
		t.Errorf("the budget is too small: %v", err)
	}
}

func TestFitUsesTheBudget(t *testing.T) {
	c := find(t, "tiny-b/len1")
	ck := openCheckpoint(t, c.Set)
	d := newDrives(t, drive.Options{})
	least, err := Floor(ck, "")
	if err != nil {
		t.Fatal(err)
	}
	last := int64(-1)
	p := newPasses(t, ck, c, 2)
	for budget := least; budget < least+2e6; budget += 170_000 {
		o, streamed, err := Fit(ck, Options{}, budget)
		if err != nil {
			t.Fatal(err)
		}
		if o.Resident < last {
			t.Errorf("%d bytes are resident with a budget of %d, more with less", o.Resident, budget)
		}
		last = o.Resident
		s := openSpine(t, ck, d, o)
		if m := s.Memory(); m.Total() > budget {
			t.Errorf("a budget of %d became %+v", budget, m)
		}
		for _, x := range s.Stats().Pieces {
			if !x.Resident {
				streamed -= x.Bytes
			}
		}
		if streamed != 0 {
			t.Errorf("a budget of %d streams %d bytes less than was said", budget, streamed)
		}
		p.check(t, s)
		s.Close()
	}
	if all, streamed, err := Fit(ck, Options{}, plenty); err != nil || all.Resident == last || streamed != 0 {
		t.Errorf("with memory for all of it %d bytes are resident, %d stream: %v", all.Resident, streamed, err)
	} else if s := openSpine(t, ck, d, all); s.Memory().Ring != 0 {
		t.Errorf("a ring with everything resident: %+v", s.Memory())
	}
}

func TestRoutersThatAreKeptAreThere(t *testing.T) {
	c := find(t, "tiny-a/len1")
	ck := openCheckpoint(t, c.Set)
	_, floor := sizes(t, ck, Options{})
	p := newPasses(t, ck, c, 1)
	for _, tt := range []struct {
		o             Options
		before, after bool
	}{
		{Options{Ring: plenty}, false, false},
		{Options{Ring: floor[0], KeepRouters: true}, true, true},
		{Options{Resident: plenty}, false, true},
	} {
		s := openSpine(t, ck, newDrives(t, drive.Options{}), tt.o)
		l := ck.Config().FirstDense
		if ok := s.Routing(l) != nil; ok != tt.before {
			t.Errorf("%+v: a router before the first pass: %v", tt.o, ok)
		}
		p.check(t, s)
		w := s.Routing(l)
		if ok := w != nil; ok != tt.after {
			t.Errorf("%+v: a router after the first pass: %v", tt.o, ok)
		} else if ok && (w.Router.Data == nil || w.Router.Rows != ck.Config().Experts || len(w.Bias) != w.Router.Rows || len(w.Res) != ck.Config().Hidden) {
			t.Errorf("%+v: the router is %d x %d, %d weights, %d biases", tt.o, w.Router.Rows, w.Router.Cols, len(w.Router.Data), len(w.Bias))
		}
		if s.Routing(0) != nil {
			t.Errorf("layer 0 has no router")
		}
	}
}

// A drive that fails a read in a hundred, and is slow and out of order otherwise. Passes end
// with the error, or with the right bits.
func TestDrivesThatFailNowAndThen(t *testing.T) {
	c := find(t, "tiny-b/len1")
	ck := openCheckpoint(t, c.Set)
	for _, on := range []bool{true, false} {
		t.Run(fmt.Sprint("ahead=", on), func(t *testing.T) {
			setAhead(t, on)
			var mu sync.Mutex
			rng := rand.New(rand.NewPCG(3, 4))
			armed := atomic.Bool{}
			d := newDrives(t, drive.Options{Fault: func(string, int64, int) error {
				mu.Lock()
				n := rng.IntN(500)
				mu.Unlock()
				time.Sleep(time.Duration(n%10) * 20 * time.Microsecond)
				if armed.Load() && n < 5 {
					return syscall.EIO
				}
				return nil
			}})
			_, floor := sizes(t, ck, Options{})
			s := openSpine(t, ck, d, Options{Ring: floor[0]})
			p := newPasses(t, ck, c, 3)
			armed.Store(true)
			good, bad := 0, 0
			for range 30 {
				got, err := p.hash(context.Background(), s)
				switch {
				case err == nil && got != p.want:
					t.Fatalf("a wrong hash, %s", got)
				case err == nil:
					good++
				case !errors.Is(err, syscall.EIO) || !strings.Contains(err.Error(), ".safetensors: reading"):
					t.Fatalf("error %v", err)
				default:
					bad++
				}
			}
			if good == 0 || bad == 0 {
				t.Errorf("%d runs good, %d bad", good, bad)
			}
			armed.Store(false)
			if _, err := p.hash(context.Background(), s); err != nil && !errors.Is(err, syscall.EIO) {
				t.Error(err) // read ahead while the drive was bad
			}
			p.check(t, s)
		})
	}
}

func TestOpenSaysWhatCannotBeRead(t *testing.T) {
	ck := openCheckpoint(t, "tiny-a")
	var calls atomic.Int64
	d := newDrives(t, drive.Options{Fault: func(string, int64, int) error {
		if calls.Add(1) > 1 { // the first is the probe
			return syscall.EIO
		}
		return nil
	}})
	_, err := Open(context.Background(), ck, d, Options{Resident: plenty})
	if !errors.Is(err, syscall.EIO) || !strings.HasPrefix(err.Error(), "reading the dense weights: vectors: ") {
		t.Errorf("error %v", err)
	}
}

func TestCancelledPassesEndAtOnceAndLeaveTheSpineWhole(t *testing.T) {
	c := find(t, "tiny-a/len5")
	ck := openCheckpoint(t, c.Set)
	gate := make(chan struct{}, 1<<20)
	var gated atomic.Bool
	d := newDrives(t, drive.Options{Fault: func(string, int64, int) error {
		if gated.Load() {
			<-gate
		}
		return nil
	}})
	_, floor := sizes(t, ck, Options{})
	s := openSpine(t, ck, d, Options{Ring: floor[0]})
	p := newPasses(t, ck, c, 3)
	p.check(t, s)
	rng := rand.New(rand.NewPCG(5, 6))
	for range 30 {
		gated.Store(true)
		ctx, cancel := context.WithCancel(context.Background())
		ended := make(chan error, 1)
		go func() {
			_, err := p.hash(ctx, s)
			ended <- err
		}()
		for range rng.IntN(40) {
			gate <- struct{}{}
		}
		time.Sleep(time.Duration(rng.IntN(1000)) * time.Microsecond)
		cancel()
		// The read in flight does not end: it is still behind the gate.
		select {
		case err := <-ended:
			if !errors.Is(err, context.Canceled) {
				t.Fatalf("error %v", err)
			}
		case <-time.After(10 * time.Second):
			t.Fatal("the pass does not end")
		}
		gated.Store(false)
		for range 64 {
			gate <- struct{}{}
		}
		p.check(t, s)
		for len(gate) > 0 {
			<-gate
		}
	}
}

func TestCloseDuringReads(t *testing.T) {
	ck := openCheckpoint(t, "tiny-b")
	for i := range 20 {
		d := newDrives(t, drive.Options{Fault: func(string, int64, int) error {
			time.Sleep(time.Duration(i) * 50 * time.Microsecond)
			return nil
		}})
		s := openSpine(t, ck, d, Options{Ring: plenty})
		s.Close()
		if _, _, err := s.Attention(context.Background(), 0); !errors.Is(err, errClosed) {
			t.Errorf("attention after Close: %v", err)
		}
		if n := drive.Allocated(); n != 0 {
			t.Fatalf("%d bytes of buffers after Close", n)
		}
	}
}

// A piece must not be used after its release: its matrices have no data then.
func TestReleasedPiecesAreOutOfReach(t *testing.T) {
	setAhead(t, false) // else the memory may be filled again by now
	ck := openCheckpoint(t, "tiny-a")
	s := openSpine(t, ck, newDrives(t, drive.Options{}), Options{Ring: plenty})
	a, release, err := s.Attention(context.Background(), 0)
	if err != nil {
		t.Fatal(err)
	}
	if len(a.KDA.Q.Data) == 0 {
		t.Fatal("no data while the piece is held")
	}
	old := a.KDA.Q.Data
	release()
	if a.KDA.Q.Data != nil {
		t.Error("data after the release")
	}
	for _, b := range old[:64] {
		if b != 0xff {
			t.Fatal("memory that was given up is not spoilt")
		}
	}
	release() // does nothing
}

func TestStalledDriveEndsThePass(t *testing.T) {
	c := find(t, "tiny-a/len1")
	ck := openCheckpoint(t, c.Set)
	var stuck atomic.Bool
	let := make(chan struct{})
	d := newDrives(t, drive.Options{Deadline: 400 * time.Millisecond, Fault: func(string, int64, int) error {
		if stuck.CompareAndSwap(true, false) {
			<-let
		}
		return nil
	}})
	_, floor := sizes(t, ck, Options{})
	s := openSpine(t, ck, d, Options{Ring: floor[0]})
	p := newPasses(t, ck, c, 3)
	p.check(t, s)
	stuck.Store(true)
	var err error
	for range 3 { // what was read ahead still serves
		if _, err = p.hash(context.Background(), s); err != nil {
			break
		}
	}
	if !errors.Is(err, drive.ErrStalled) {
		t.Errorf("error %v", err)
	}
	p.check(t, s)
	close(let)
	s.Close()
	p.closeExperts()
	for range 200 { // the buffer comes back when the drive answers
		if drive.Allocated() == 0 {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
	t.Errorf("%d bytes of buffers are not freed", drive.Allocated())
}

// With the switch on, a pass finds that the reading of every streamed piece began before it
// asked; with it off, of none. What that is worth in time, on a drive about as fast as the
// work between pieces, is logged: a busy machine decides it otherwise.
func TestReadingAheadBeginsBeforeThePassAsks(t *testing.T) {
	ck := openCheckpoint(t, "tiny-a")
	dir := golden.ModelDir("tiny-a")
	_, floor := sizes(t, ck, Options{})
	measure := func(on bool) (time.Duration, Stats) {
		setAhead(t, on)
		d := newDrives(t, drive.Options{Pace: map[string]drive.Pace{dir: {BytesPerSecond: 100e6, Latency: time.Millisecond}}})
		s := openSpine(t, ck, d, Options{Ring: floor[0]})
		const work = 3 * time.Millisecond // of each piece
		walk := func() {
			hold := func(release func(), err error) {
				if err != nil {
					t.Fatal(err)
				}
				time.Sleep(work)
				release()
			}
			for l := range ck.Config().Layers {
				_, release, err := s.Attention(context.Background(), l)
				hold(release, err)
				_, release, err = s.FeedForward(context.Background(), l)
				hold(release, err)
			}
			if err := s.Head(context.Background(), func(int, *kernel.Matrix) error { time.Sleep(work); return nil }); err != nil {
				t.Fatal(err)
			}
		}
		walk()
		before, began := s.Stats(), time.Now()
		walk()
		took, after := time.Since(began), s.Stats()
		after.Demand -= before.Demand
		after.Ahead -= before.Ahead
		return took, after
	}
	on, with := measure(true)
	off, without := measure(false)
	t.Logf("a pass over %d pieces with 3 ms of work each, drive of 100 MB/s and 1 ms: %v ahead, %v on demand", 2*ck.Config().Layers+1, on, off)
	if without.Ahead != 0 || without.Demand == 0 {
		t.Errorf("off: %d bytes ahead, %d on demand", without.Ahead, without.Demand)
	}
	if with.Ahead <= with.Demand {
		t.Errorf("on: %d bytes ahead, %d on demand", with.Ahead, with.Demand)
	}
}

// The released dimensions, from its config: what a plan says is what the model's
// description says (docs/K3.md B.4).
func TestK3Sizes(t *testing.T) {
	defer func(was int64) { headSlice = was }(headSlice)
	headSlice = 256e6
	b, err := os.ReadFile(filepath.Join(golden.Dir(), "real", "config.json"))
	if err != nil {
		t.Fatal(err)
	}
	c, err := checkpoint.ParseConfig(b)
	if err != nil {
		t.Fatal(err)
	}
	sections, err := outline(c)
	if err != nil {
		t.Fatal(err)
	}
	f32 := func(name string) bool {
		for _, s := range []string{"conv1d.weight", "A_log", "dt_bias", "self_attn.o_norm.weight", "correction_bias"} {
			if strings.HasSuffix(name, s) {
				return true
			}
		}
		return false
	}
	var trunk, head, largest int64
	for _, s := range sections {
		for _, m := range s.mats {
			n := 2 * int64(m.rows) * int64(m.cols)
			if m.name == k3.HeadName {
				head += n
				largest = max(largest, n)
			} else {
				trunk += n
			}
		}
		for _, v := range s.vecs {
			n := int64(v.n)
			if strings.HasSuffix(v.name, "A_log") {
				n = 128 // as stored
			}
			if n *= 2; f32(v.name) {
				n *= 2
			}
			if s.name != "output" {
				trunk += n
			}
		}
	}
	if trunk != 108811877376 || head != 2348810240 || largest > 256e6 {
		t.Errorf("the layers have %d bytes, the head %d in slices of up to %d", trunk, head, largest)
	}
	for _, narrow := range []bool{false, true} {
		l := layOut(sections, 0, narrow)
		p := &plan{config: c}
		for i, units := range l.pieces {
			x := p.add(l.names[i])
			x.units = units
			for _, u := range units {
				x.tensors = append(x.tensors, u.tensors...)
			}
			x.schedule(readGap)
			if len(x.runs) != 1 || x.runs[0].off%packBlock != 0 {
				t.Fatalf("%s is read in runs %v", x.name, x.runs)
			}
		}
		want := int64(2.34e9)
		if narrow {
			want = 1.18e9
		}
		if n := p.ringFloor(); n < want*99/100 || n > want*101/100 {
			t.Errorf("narrow=%v: the ring needs %d bytes", narrow, n)
		}
		t.Logf("narrow=%v: packed file %.2f GB, ring from %.2f GB, %d units", narrow, float64(l.end)/1e9, float64(p.ringFloor())/1e9, len(l.units))
	}
}

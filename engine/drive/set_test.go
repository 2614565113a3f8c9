package drive

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"sync"
	"syscall"
	"testing"
	"time"
)

// write makes a file of n random bytes.
func write(t testing.TB, path string, n int) []byte {
	t.Helper()
	b := make([]byte, n)
	rng := rand.New(rand.NewPCG(uint64(n), 1))
	for i := range b {
		b[i] = byte(rng.Uint32())
	}
	if err := os.WriteFile(path, b, 0o600); err != nil {
		t.Fatal(err)
	}
	return b
}

// quiet keeps the fallback lines that a test does not look at out of its output.
func quiet(string) {}

func newSet(t testing.TB, o Options) *Set {
	if o.Warn == nil {
		o.Warn = quiet
	}
	s := NewSet(o)
	t.Cleanup(s.Close)
	return s
}

func openFile(t testing.TB, s *Set, path string) *File {
	t.Helper()
	f, err := s.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	return f
}

func newBuffer(t testing.TB, n int64) *Buffer {
	t.Helper()
	b, err := NewBuffer(n)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(b.Free)
	return b
}

// disk returns a directory that takes direct I/O, or skips.
func disk(t testing.TB) string {
	t.Helper()
	dir := t.TempDir()
	p := filepath.Join(dir, "probe")
	write(t, p, block)
	s := NewSet(Options{Warn: quiet})
	defer s.Close()
	if !openFile(t, s, p).dev.isDirect() {
		t.Skip("NOT RUN: the temporary directory has no direct I/O")
	}
	return dir
}

func TestAnyRangeIsTheFile(t *testing.T) {
	dir := t.TempDir()
	const size = 5*block + 777
	path := filepath.Join(dir, "f")
	want := write(t, path, size)
	edges := []int64{0, 1, block - 1, block, block + 1, 2 * block, 5 * block, size - 1, size}
	for _, mode := range []struct {
		name     string
		buffered bool
		most     int
		short    bool
	}{
		{"direct", false, 0, false},
		{"direct in calls of a block", false, block, false},
		{"direct in calls of two, cut short", false, 2 * block, true},
		{"buffered", true, 0, false},
		{"buffered in calls of 1000 bytes", true, 1000, false},
		{"buffered in calls of 1000 bytes, cut short", true, 1000, true},
	} {
		t.Run(mode.name, func(t *testing.T) {
			if !mode.buffered {
				disk(t)
			}
			s := newSet(t, Options{Buffered: mode.buffered, most: mode.most})
			rng := rand.New(rand.NewPCG(7, 7))
			if mode.short {
				// Calls are interrupted, and end early at any byte but a first block.
				s.pread = func(h handle, p []byte, off int64) (int, error) {
					switch rng.IntN(3) {
					case 0:
						return 0, syscall.EINTR
					case 1:
						n, err := h.pread(p, off)
						return min(n, max(min(block, len(p)), rng.IntN(len(p)+1))), err
					}
					return h.pread(p, off)
				}
			}
			f := openFile(t, s, path)
			if got := f.dev.Stats().Direct; got == mode.buffered {
				t.Fatalf("direct is %v: %s", got, f.dev.Stats().Mode)
			}
			b := newBuffer(t, size)
			var total, reads int64
			try := func(off, n int64) {
				t.Helper()
				if err := s.Read(t.Context(), Read{File: f, Offset: off, Bytes: n, Into: b}); err != nil {
					t.Fatalf("[%d:+%d]: %v", off, n, err)
				}
				if !bytes.Equal(b.Bytes(), want[off:off+n]) {
					t.Fatalf("[%d:+%d]: other bytes than the file's", off, n)
				}
				clear(b.mem[:cap(b.mem)])
				total, reads = total+n, reads+1
			}
			for _, off := range edges {
				for _, end := range edges {
					if off <= end {
						try(off, end-off)
					}
				}
			}
			for range 300 {
				off := rng.Int64N(size + 1)
				try(off, rng.Int64N(size-off+1))
			}
			st := f.dev.Stats()
			if f.dev.excepted != 0 {
				t.Errorf("read the other way: %s", st.Mode)
			}
			if st.Demand.Bytes != total || st.Demand.Reads != reads || st.Ahead != (Account{}) {
				t.Errorf("account %+v, want %d reads of %d bytes", st.Demand, reads, total)
			}
			if !mode.short && (mode.buffered != (st.Demand.Extra == 0) || st.Demand.Extra > reads*2*block) {
				t.Errorf("%d bytes beside %d reads", st.Demand.Extra, reads)
			}
		})
	}
}

func TestBufferHoldsItsRoomAtEveryAlignment(t *testing.T) {
	for n := int64(0); n < 3*block; n += 123 {
		b := newBuffer(t, n)
		for off := int64(0); off < block; off += 61 {
			lo, hi := off&^(block-1), (off+n+block-1)&^(block-1)
			if hi-lo > int64(len(b.mem)) {
				t.Fatalf("%d bytes at %d need %d, the buffer has %d", n, off, hi-lo, len(b.mem))
			}
		}
	}
}

func TestBufferMemoryIsCountedAndGivenBack(t *testing.T) {
	before := Allocated()
	b, err := NewBuffer(1 << 20)
	if err != nil {
		t.Fatal(err)
	}
	if got := Allocated() - before; got != b.Allocated() || got < 1<<20 {
		t.Errorf("counted %d, the buffer holds %d", got, b.Allocated())
	}
	b.Free()
	b.Free()
	if Allocated() != before {
		t.Errorf("%d bytes are still counted", Allocated()-before)
	}
	if _, err := NewBuffer(-1); err == nil {
		t.Error("a negative buffer was made")
	}
	if _, err := NewBuffer(1 << 50); err == nil {
		t.Error("a buffer larger than any memory was made")
	}
}

func TestBadReadsAreRefused(t *testing.T) {
	path := filepath.Join(t.TempDir(), "f")
	write(t, path, 10000)
	s, other := newSet(t, Options{}), newSet(t, Options{})
	f, b := openFile(t, s, path), newBuffer(t, 5000)
	gone := newBuffer(t, 5000)
	gone.Free()
	for _, c := range []struct {
		name string
		s    *Set
		r    Read
		is   error
	}{
		{"no file", s, Read{Into: b}, nil},
		{"no buffer", s, Read{File: f}, nil},
		{"another set", other, Read{File: f, Into: b, Bytes: 1}, nil},
		{"unknown class", s, Read{File: f, Into: b, Bytes: 1, Class: 2}, nil},
		{"negative offset", s, Read{File: f, Into: b, Offset: -1, Bytes: 1}, nil},
		{"negative length", s, Read{File: f, Into: b, Bytes: -1}, nil},
		{"larger than the buffer", s, Read{File: f, Into: b, Bytes: 5001}, nil},
		{"beyond the end", s, Read{File: f, Into: b, Offset: 9000, Bytes: 1001}, ErrTruncated},
		{"an offset that overflows", s, Read{File: f, Into: b, Offset: 1<<63 - 1, Bytes: 5000}, ErrTruncated},
		{"freed buffer", s, Read{File: f, Into: gone, Bytes: 1}, nil},
	} {
		err := c.s.Read(t.Context(), c.r)
		if e := (*Error)(nil); !errors.As(err, &e) || (c.is != nil && !errors.Is(err, c.is)) {
			t.Errorf("%s: error is %v", c.name, err)
		}
	}
	if st := f.dev.Stats(); st.Demand.Reads != 0 {
		t.Errorf("%d reads were made", st.Demand.Reads)
	}
	if err := s.Read(t.Context(), Read{File: f, Into: b, Bytes: 5000}); err != nil {
		t.Errorf("a good read after them: %v", err)
	}
}

func TestOpenRefusesWhatIsNotAFile(t *testing.T) {
	s := newSet(t, Options{})
	dir := t.TempDir()
	if _, err := s.Open(dir); err == nil {
		t.Error("a directory was opened")
	}
	if _, err := s.Open(filepath.Join(dir, "none")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a missing file: %v", err)
	}
	if len(s.Devices()) != 0 {
		t.Error("they added a device")
	}
	write(t, filepath.Join(dir, "empty"), 0)
	if f := openFile(t, s, filepath.Join(dir, "empty")); f.Size() != 0 {
		t.Errorf("an empty file has %d bytes", f.Size())
	}
}

func TestTwoDirectoriesOnOneDriveAreOneDevice(t *testing.T) {
	root := t.TempDir()
	files := make([]*File, 4)
	slow := filepath.Join(root, "slow")
	s := newSet(t, Options{Pace: map[string]Pace{
		slow:                      {BytesPerSecond: 1e9},
		filepath.Join(slow, "er"): {BytesPerSecond: 1e8},
	}})
	for i, dir := range []string{"a", "b/c", "slow/x", "slow/er"} {
		dir = filepath.Join(root, dir)
		if err := os.MkdirAll(dir, 0o700); err != nil {
			t.Fatal(err)
		}
		write(t, filepath.Join(dir, "f"), 100)
		files[i] = openFile(t, s, filepath.Join(dir, "f"))
	}
	if files[0].Device() != files[1].Device() {
		t.Error("one file system became two devices")
	}
	if files[2].Device() == files[0].Device() || files[3].Device() == files[2].Device() {
		t.Error("a paced directory is no device of its own")
	}
	if got := len(s.Devices()); got != 3 {
		t.Errorf("%d devices, want 3", got)
	}
	if got := files[2].Device().Name(); got != slow {
		t.Errorf("paced device is called %s", got)
	}
}

// A worker that still touched its buffer or its account when it signals would race
// with what Done does here, and the race detector or the bytes would show it.
func TestBufferAndAccountAreFreeWhenDoneRuns(t *testing.T) {
	path := filepath.Join(t.TempDir(), "f")
	want := write(t, path, 64*block)
	s := newSet(t, Options{Depth: 8})
	f := openFile(t, s, path)
	const chains, links = 8, 100
	var wg sync.WaitGroup
	var mu sync.Mutex
	finished := int64(0)
	for c := range chains {
		b := newBuffer(t, 3*block)
		rng := rand.New(rand.NewPCG(uint64(c), 3))
		left := links
		wg.Add(1)
		var next func()
		next = func() {
			off, n := rng.Int64N(60*block), rng.Int64N(3*block)
			s.Submit(context.Background(), Read{File: f, Offset: off, Bytes: n, Into: b, Class: Class(c % 2), Done: func(err error) {
				if err != nil || !bytes.Equal(b.Bytes(), want[off:off+n]) {
					t.Errorf("[%d:+%d]: wrong bytes (%v)", off, n, err)
				}
				for i := range b.mem {
					b.mem[i] = 0xAA
				}
				mu.Lock()
				finished++
				st := f.dev.Stats()
				if got := st.Demand.Reads + st.Ahead.Reads; got < finished {
					t.Errorf("%d reads are done and %d accounted", finished, got)
				}
				mu.Unlock()
				if left--; left > 0 {
					next()
				} else {
					wg.Done()
				}
			}})
		}
		next()
	}
	wg.Wait()
	st := f.dev.Stats()
	if st.Demand.Reads != chains*links/2 || st.Ahead.Reads != chains*links/2 {
		t.Errorf("accounted %d and %d reads", st.Demand.Reads, st.Ahead.Reads)
	}
	if st.Busy <= 0 || st.Busy > st.Demand.Service+st.Ahead.Service {
		t.Errorf("busy %v, in service %v", st.Busy, st.Demand.Service+st.Ahead.Service)
	}
}

func TestCloseEndsQueuedReadsAndLeavesNothingBehind(t *testing.T) {
	path := filepath.Join(t.TempDir(), "f")
	write(t, path, 1<<20)
	before := runtime.NumGoroutine()
	s := NewSet(Options{Depth: 2, Buffered: true, Pace: map[string]Pace{filepath.Dir(path): {Latency: 50 * time.Millisecond}}})
	f := openFile(t, s, path)
	const n = 50
	var mu sync.Mutex
	count := map[string]int{}
	for range n {
		s.Submit(t.Context(), Read{File: f, Bytes: 1000, Into: newBuffer(t, 1000), Done: func(err error) {
			mu.Lock()
			defer mu.Unlock()
			switch {
			case err == nil:
				count["done"]++
			case errors.Is(err, ErrClosed):
				count["closed"]++
			default:
				count[err.Error()]++
			}
		}})
	}
	time.Sleep(10 * time.Millisecond) // let the first two get into flight
	s.Close()
	mu.Lock()
	if count["done"]+count["closed"] != n || count["closed"] < n-2 {
		t.Errorf("outcomes %v", count)
	}
	mu.Unlock()
	if err := s.Read(t.Context(), Read{File: f, Bytes: 10, Into: newBuffer(t, 10)}); !errors.Is(err, ErrClosed) {
		t.Errorf("a read after Close: %v", err)
	}
	if _, err := s.Open(path); !errors.Is(err, ErrClosed) {
		t.Errorf("Open after Close: %v", err)
	}
	if s.fds.open != 0 {
		t.Errorf("%d descriptors stay open", s.fds.open)
	}
	for end := time.Now().Add(2 * time.Second); runtime.NumGoroutine() > before; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%d goroutines before, %d after", before, runtime.NumGoroutine())
		}
	}
}

func TestContextEndsReads(t *testing.T) {
	path := filepath.Join(t.TempDir(), "f")
	write(t, path, 100000)
	entered, hold := make(chan struct{}, 10), make(chan struct{})
	s := newSet(t, Options{Depth: 1, Buffered: true, most: 10000, Fault: func(string, int64, int) error {
		entered <- struct{}{}
		<-hold
		return nil
	}})
	f := openFile(t, s, path)
	ctx, cancel := context.WithCancel(t.Context())
	errs := make(chan error, 3)
	submit := func() {
		s.Submit(ctx, Read{File: f, Bytes: 100000, Into: newBuffer(t, 100000), Done: func(err error) { errs <- err }})
	}
	submit() // in flight, in its first call of ten
	<-entered
	submit() // queued
	cancel()
	submit() // too late
	for i := range 2 {
		if err := <-errs; !errors.Is(err, context.Canceled) {
			t.Errorf("read %d: %v", i, err)
		}
	}
	for f.dev.isStopping() == 0 {
		time.Sleep(time.Millisecond)
	}
	close(hold)
	if err := <-errs; !errors.Is(err, context.Canceled) {
		t.Errorf("the read in flight: %v", err)
	}
	if st := f.dev.Stats(); st.Cancelled != 2 || st.Discarded != 10000 || st.Errors != 0 || st.Demand.Reads != 0 {
		t.Errorf("stats %+v", st)
	}
}

// isStopping counts the reads in flight that are to end at their next call.
func (d *Device) isStopping() (n int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, t := range d.flight {
		if t.stop.Load() != nil {
			n++
		}
	}
	return n
}

func TestDescriptorsOfTheDefaultLeaveRoom(t *testing.T) {
	for _, c := range []struct{ limit, want int }{{0, 1}, {1, 1}, {64, 32}, {256, 128}, {1024, 896}, {1 << 20, 4096}} {
		if got := defaultFiles(c.limit); got != c.want {
			t.Errorf("limit %d: %d files, want %d", c.limit, got, c.want)
		}
	}
}

func ExampleSet() {
	dir, err := os.MkdirTemp("", "")
	if err != nil {
		panic(err)
	}
	defer os.RemoveAll(dir)
	path := filepath.Join(dir, "weights")
	if err := os.WriteFile(path, []byte("some bytes of a drive"), 0o600); err != nil {
		panic(err)
	}
	s := NewSet(Options{Buffered: true})
	defer s.Close()
	f, err := s.Open(path)
	if err != nil {
		panic(err)
	}
	b, err := NewBuffer(100)
	if err != nil {
		panic(err)
	}
	defer b.Free()
	if err := s.Read(context.Background(), Read{File: f, Offset: 5, Bytes: 5, Into: b}); err != nil {
		panic(err)
	}
	fmt.Printf("%s\n", b.Bytes())
	// Output: bytes
}

package drive

import (
	"bytes"
	"context"
	"errors"
	"math"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// far is a remote whose reads a test decides on.
type far func(ctx context.Context, file string, p []byte, off int64) error

func (far) Name() string { return "http://far" }

func (f far) ReadAt(ctx context.Context, file string, p []byte, off int64) error {
	return f(ctx, file, p, off)
}

func openRemote(t testing.TB, s *Set, r Remote, size int64) *File {
	t.Helper()
	f, err := s.OpenRemote(r, "x", size)
	if err != nil {
		t.Fatal(err)
	}
	return f
}

func TestRemoteIsADevice(t *testing.T) {
	s := newSet(t, Options{})
	broken := errors.New("broken")
	f := openRemote(t, s, far(func(_ context.Context, file string, p []byte, off int64) error {
		if off == 7 {
			return broken
		}
		time.Sleep(time.Millisecond)
		for i := range p {
			p[i] = file[0] + byte(off) + byte(i)
		}
		return nil
	}), 1000)
	b := newBuffer(t, 100)
	if err := s.Read(t.Context(), Read{File: f, Offset: 3, Bytes: 3, Into: b}); err != nil || !bytes.Equal(b.Bytes(), []byte{'x' + 3, 'x' + 4, 'x' + 5}) {
		t.Fatalf("%v, %v", b.Bytes(), err)
	}
	err := s.Read(t.Context(), Read{File: f, Offset: 7, Bytes: 3, Into: b})
	var e *Error
	if !errors.Is(err, broken) || !errors.As(err, &e) || e.Path != "http://far/x" || b.Bytes() != nil {
		t.Errorf("%v", err)
	}
	if err := s.Read(t.Context(), Read{File: f, Offset: 999, Bytes: 2, Into: b}); !errors.Is(err, ErrTruncated) {
		t.Errorf("beyond its end: %v", err)
	}
	st := f.Device().Stats()
	if st.Demand.Bytes != 3 || st.Demand.Reads != 1 || st.Errors != 1 || !f.Device().Remote() {
		t.Errorf("%+v", st)
	}
	if again := openRemote(t, s, far(nil), 5); again.Device() != f.Device() {
		t.Error("one remote is two devices")
	}
	f.Device().Fail(broken)
	if f.Device().Expect(Demand, 1) != math.MaxInt64 {
		t.Error("what was given up is expected to answer")
	}
}

// A read from a remote that is silent ends when nobody wants it any more: by its
// ticket, its context, or the end of the set. No deadline of a drive ends it.
func TestRemoteReadsEndWhenCancelled(t *testing.T) {
	for name, end := range map[string]func(s *Set, ticket *Ticket, cancel context.CancelFunc){
		"ticket":  func(_ *Set, ticket *Ticket, _ context.CancelFunc) { ticket.Cancel() },
		"context": func(_ *Set, _ *Ticket, cancel context.CancelFunc) { cancel() },
		"set":     func(s *Set, _ *Ticket, _ context.CancelFunc) { s.Close() },
	} {
		s := newSet(t, Options{Deadline: time.Nanosecond})
		began := make(chan struct{})
		f := openRemote(t, s, far(func(ctx context.Context, _ string, _ []byte, _ int64) error {
			close(began)
			<-ctx.Done()
			return ctx.Err()
		}), 1000)
		b := newBuffer(t, 100)
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		ticket := s.Submit(ctx, Read{File: f, Bytes: 10, Into: b, Done: func(err error) { done <- err }})
		<-began
		end(s, ticket, cancel)
		if err := <-done; !errors.Is(err, context.Canceled) && !errors.Is(err, ErrClosed) || b.Poisoned() {
			t.Errorf("%s: %v", name, err)
		}
		cancel()
	}
}

// A file of a directory that fills may be written to while it is open, but not
// replaced or cut.
func TestFillingFilesMayChangeInside(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "x")
	write(t, path, 3*block)
	for _, filling := range []string{"", dir} {
		s := newSet(t, Options{Filling: filling})
		f := openFile(t, s, path)
		if err := os.Chtimes(path, time.Now(), time.Now().Add(time.Hour)); err != nil {
			t.Fatal(err)
		}
		if err := s.Read(t.Context(), Read{File: f, Bytes: 10, Into: newBuffer(t, 10)}); errors.Is(err, ErrChanged) != (filling == "") {
			t.Errorf("filling %q: %v", filling, err)
		}
		s.Close()
		s = newSet(t, Options{Filling: filling})
		f = openFile(t, s, path)
		if err := os.Truncate(path, 2*block); err != nil {
			t.Fatal(err)
		}
		if err := s.Read(t.Context(), Read{File: f, Bytes: 10, Into: newBuffer(t, 10)}); !errors.Is(err, ErrChanged) {
			t.Errorf("filling %q, cut: %v", filling, err)
		}
		write(t, path, 3*block)
	}
}

// A server that answers late is known to do so although its answers overlap.
func TestRemoteLatencyIsLearnedFromReadsThatOverlap(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSet(t, Options{})
		f := openRemote(t, s, far(func(context.Context, string, []byte, int64) error {
			time.Sleep(200 * time.Millisecond)
			return nil
		}), 1<<30)
		for range 10 {
			var wg sync.WaitGroup
			for range remoteDepth {
				wg.Add(1)
				b := newBuffer(t, 1<<17)
				s.Submit(t.Context(), Read{File: f, Bytes: 1 << 17, Into: b, Done: func(error) { wg.Done() }})
			}
			wg.Wait()
		}
		if got := f.Device().Expect(Demand, 1<<17); got < 60*time.Millisecond || got > 300*time.Millisecond {
			t.Errorf("a read is expected to take %v, it takes 200ms", got)
		}
	})
}

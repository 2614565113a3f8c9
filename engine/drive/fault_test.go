package drive

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"
)

func TestAnErrorNamesTheReadAndTheNextReadIsServed(t *testing.T) {
	path := filepath.Join(t.TempDir(), "f")
	write(t, path, 50000)
	var calls atomic.Int64
	s := newSet(t, Options{Buffered: true, Fault: func(p string, off int64, n int) error {
		if calls.Add(1) == 3 {
			return syscall.EIO
		}
		return nil
	}})
	f, b := openFile(t, s, path), newBuffer(t, 10000)
	for i := range 5 {
		err := s.Read(t.Context(), Read{File: f, Offset: 20000, Bytes: 10000, Into: b})
		if i != 2 {
			if err != nil || len(b.Bytes()) != 10000 {
				t.Errorf("read %d: %d bytes, %v", i, len(b.Bytes()), err)
			}
			continue
		}
		if !errors.Is(err, syscall.EIO) {
			t.Errorf("error %v", err)
		}
		for _, part := range []string{path, "10000 bytes", "byte 20000", "check the drive"} {
			if !strings.Contains(err.Error(), part) {
				t.Errorf("%q does not say %q", err, part)
			}
		}
		if b.Bytes() != nil {
			t.Error("a failed read left bytes to be used")
		}
	}
	if st := f.dev.Stats(); st.Errors != 1 || st.Demand.Reads != 4 || st.Demand.Bytes != 40000 {
		t.Errorf("stats %+v", st)
	}
}

func TestAFileThatChangedIsAnError(t *testing.T) {
	for _, c := range []struct {
		name   string
		change func(path string) error
		open   bool // a descriptor is open meanwhile
		is     error
		says   string
	}{
		{"truncated", func(p string) error { return os.Truncate(p, 30001) }, false, ErrChanged, "it had 50000 bytes and has 30001"},
		{"truncated while open", func(p string) error { return os.Truncate(p, 30001) }, true, ErrTruncated, "9999 bytes of this read are missing"},
		{"emptied while open", func(p string) error { return os.Truncate(p, 0) }, true, ErrTruncated, "20000 bytes of this read are missing"},
		{"replaced by one of the same size", func(p string) error {
			b, err := os.ReadFile(p)
			return errors.Join(err, os.WriteFile(p+".new", b, 0o600), os.Rename(p+".new", p))
		}, false, ErrChanged, "another file has its name"},
		{"written to", func(p string) error {
			return errors.Join(os.WriteFile(p, make([]byte, 50000), 0o600), os.Chtimes(p, time.Time{}, time.Unix(1, 0)))
		}, false, ErrChanged, "its contents were written to"},
		{"removed", os.Remove, false, ErrChanged, "it is gone"},
	} {
		for _, buffered := range []bool{true, false} {
			t.Run(fmt.Sprintf("%s/buffered=%v", c.name, buffered), func(t *testing.T) {
				dir := t.TempDir()
				if !buffered {
					dir = disk(t)
				}
				path := filepath.Join(dir, "f")
				write(t, path, 50000)
				s := newSet(t, Options{Buffered: buffered})
				f, b := openFile(t, s, path), newBuffer(t, 20000)
				r := Read{File: f, Offset: 20000, Bytes: 20000, Into: b}
				if c.open {
					if err := s.Read(t.Context(), r); err != nil {
						t.Fatal(err)
					}
				}
				if err := c.change(path); err != nil {
					t.Fatal(err)
				}
				err := s.Read(t.Context(), r)
				if !errors.Is(err, c.is) || !strings.Contains(err.Error(), c.says) || !strings.Contains(err.Error(), path) {
					t.Errorf("error %v", err)
				}
				if b.Bytes() != nil {
					t.Error("bytes were delivered")
				}
			})
		}
	}
}

// silence is a drive that answers none of its calls while it is held.
type silence struct {
	mu   sync.Mutex
	held chan struct{}
}

func (s *silence) fault(string, int64, int) error {
	s.mu.Lock()
	held := s.held
	s.mu.Unlock()
	if held != nil {
		<-held
	}
	return nil
}

func TestAStalledReadFailsInTimeAndKeepsItsBuffer(t *testing.T) {
	path := filepath.Join(t.TempDir(), "f")
	want := write(t, path, 50000)
	before := Allocated()
	synctest.Test(t, func(t *testing.T) {
		drive := silence{held: make(chan struct{})}
		s := NewSet(Options{Depth: 2, Buffered: true, Deadline: 5 * time.Second, Fault: drive.fault})
		f := openFile(t, s, path)
		lost, good := newBuffer(t, 50000), newBuffer(t, 50000)

		begin := time.Now()
		err := s.Read(t.Context(), Read{File: f, Bytes: 50000, Into: lost})
		if took := time.Since(begin); took < 5*time.Second || took > 6*time.Second {
			t.Errorf("it took %v", took)
		}
		if !errors.Is(err, ErrStalled) || !strings.Contains(err.Error(), f.dev.Name()) {
			t.Errorf("error %v", err)
		}
		if !lost.Poisoned() || lost.Bytes() != nil {
			t.Error("the buffer can be used though the kernel may still write to it")
		}
		lost.Free()
		if got := Allocated() - before; got != lost.Allocated()+good.Allocated() {
			t.Errorf("%d bytes are counted, the stuck read has %d of them", got, lost.Allocated())
		}
		if err := s.Read(t.Context(), Read{File: f, Bytes: 1, Into: lost}); err == nil {
			t.Error("a poisoned buffer was read into")
		}
		if st := f.dev.Stats(); st.Stuck != 1 || st.Stalls != 1 || s.fds.open != 0 {
			t.Errorf("stats %+v, %d descriptors count", st, s.fds.open)
		}

		// The other slot still serves, and the stuck read's end frees what it held.
		stuck := drive.held
		drive.mu.Lock()
		drive.held = nil
		drive.mu.Unlock()
		if err := s.Read(t.Context(), Read{File: f, Bytes: 50000, Into: good}); err != nil || !bytes.Equal(good.Bytes(), want) {
			t.Errorf("the next read: %v", err)
		}
		close(stuck)
		synctest.Wait()
		if got := Allocated() - before; got != good.Allocated() {
			t.Errorf("%d bytes are counted, one buffer has %d", got, good.Allocated())
		}
		if st := f.dev.Stats(); st.Stuck != 0 || st.Demand.Reads != 1 || !f.dev.Alive() {
			t.Errorf("stats %+v", st)
		}
		s.Close()
		good.Free()
	})
}

func TestStalledReadsOfOneFileShareADescriptorAndTheirSlotsComeBack(t *testing.T) {
	path := filepath.Join(t.TempDir(), "f")
	write(t, path, 50000)
	synctest.Test(t, func(t *testing.T) {
		first, later := make(chan struct{}), make(chan struct{})
		var calls atomic.Int64
		s := NewSet(Options{Depth: 3, Buffered: true, Deadline: time.Second, Fault: func(string, int64, int) error {
			switch n := calls.Add(1); {
			case n == 1: // opens the file
			case n <= 3:
				<-first
			case n == 4:
				<-later
			}
			return nil
		}})
		f := openFile(t, s, path)
		errs := map[string]error{}
		var mu sync.Mutex
		submit := func(name string) {
			b, err := NewBuffer(100)
			if err != nil {
				t.Fatal(err)
			}
			s.Submit(t.Context(), Read{File: f, Bytes: 100, Into: b, Done: func(err error) {
				b.Free()
				mu.Lock()
				defer mu.Unlock()
				errs[name] = err
			}})
			synctest.Wait()
		}
		submit("opener")
		submit("stuck")
		submit("stuck too")
		time.Sleep(1100 * time.Millisecond)
		synctest.Wait()
		if s.fds.open != 0 || f.dev.Stats().Stuck != 2 || !errors.Is(errs["stuck too"], ErrStalled) {
			t.Errorf("%d descriptors count, %d reads are stuck, %v", s.fds.open, f.dev.Stats().Stuck, errs)
		}
		submit("slow")   // has the last slot
		submit("queued") // has none
		if _, done := errs["queued"]; done || s.fds.open != 1 {
			t.Errorf("three slots took four reads; %d descriptors count", s.fds.open)
		}
		close(first)
		synctest.Wait()
		if err, done := errs["queued"]; !done || err != nil {
			t.Errorf("the slots that came back serve nobody: %v", errs)
		}
		close(later)
		s.Close()
		if errs["opener"] != nil || errs["slow"] != nil || len(errs) != 5 || s.fds.open != 0 {
			t.Errorf("%v, %d descriptors count", errs, s.fds.open)
		}
	})
}

func TestADriveWithEverySlotStuckIsGivenUp(t *testing.T) {
	path := filepath.Join(t.TempDir(), "f")
	write(t, path, 50000)
	synctest.Test(t, func(t *testing.T) {
		drive := silence{held: make(chan struct{})}
		s := NewSet(Options{Depth: 2, Buffered: true, Deadline: time.Second, Fault: drive.fault})
		f := openFile(t, s, path)
		errs := make(chan error, 5)
		for range 5 {
			b, err := NewBuffer(100)
			if err != nil {
				t.Fatal(err)
			}
			s.Submit(t.Context(), Read{File: f, Bytes: 100, Into: b, Done: func(err error) { b.Free(); errs <- err }})
		}
		count := map[bool]int{}
		for range 5 {
			err := <-errs
			count[errors.Is(err, ErrFailed)]++
			if !errors.Is(err, ErrStalled) {
				t.Errorf("error %v", err)
			}
		}
		if count[false] != 2 || count[true] != 3 || f.dev.Alive() {
			t.Errorf("%d reads stalled, %d were dropped, alive: %v", count[false], count[true], f.dev.Alive())
		}
		s.Close() // does not wait for the stuck reads
		close(drive.held)
	})
}

func TestADriveThatWasGivenUpServesNobody(t *testing.T) {
	path := filepath.Join(t.TempDir(), "f")
	write(t, path, 5000)
	s := newSet(t, Options{Buffered: true})
	f, b := openFile(t, s, path), newBuffer(t, 5000)
	f.dev.Fail(syscall.EIO)
	f.dev.Fail(syscall.ENXIO)
	err := s.Read(t.Context(), Read{File: f, Bytes: 5000, Into: b})
	if !errors.Is(err, ErrFailed) || !errors.Is(err, syscall.EIO) || errors.Is(err, syscall.ENXIO) {
		t.Errorf("error %v", err)
	}
	if got := f.dev.Expect(Demand, 1); f.dev.Alive() || got < 1000*time.Hour {
		t.Errorf("alive: %v, expected in %v", f.dev.Alive(), got)
	}
	if !errors.Is(f.dev.Stats().Failed, syscall.EIO) {
		t.Errorf("stats say %v", f.dev.Stats().Failed)
	}
}

func TestAFileSystemWithoutDirectIOIsSaidOnce(t *testing.T) {
	dir := disk(t)
	want := write(t, filepath.Join(dir, "a"), 3*block+5)
	write(t, filepath.Join(dir, "b"), 3*block+5)
	var lines []string
	s := newSet(t, Options{
		Warn: func(line string) { lines = append(lines, line) },
		// Accepted at open, refused at the first read.
		Fault: func(_ string, _ int64, n int) error {
			if n == block {
				return syscall.EINVAL
			}
			return nil
		},
	})
	f, _ := openFile(t, s, filepath.Join(dir, "a")), openFile(t, s, filepath.Join(dir, "b"))
	b := newBuffer(t, 3*block+5)
	if err := s.Read(t.Context(), Read{File: f, Bytes: f.Size(), Into: b}); err != nil || !bytes.Equal(b.Bytes(), want) {
		t.Errorf("read: %v", err)
	}
	if len(lines) != 1 || !strings.HasPrefix(lines[0], dir+": no direct I/O") || strings.Contains(lines[0], "\n") {
		t.Errorf("said %q", lines)
	}
	if st := f.dev.Stats(); st.Direct || !strings.Contains(st.Mode, "invalid argument") {
		t.Errorf("stats: direct %v, %s", st.Direct, st.Mode)
	}
}

func TestAFailingDriveIsNoReasonToBuffer(t *testing.T) {
	dir := disk(t)
	write(t, filepath.Join(dir, "a"), block)
	s := newSet(t, Options{Fault: func(string, int64, int) error { return syscall.EIO }})
	if _, err := s.Open(filepath.Join(dir, "a")); !errors.Is(err, syscall.EIO) {
		t.Errorf("error %v", err)
	}
}

func TestAFileRefusedDirectIOIsReadThroughTheCache(t *testing.T) {
	dir := disk(t)
	want := write(t, filepath.Join(dir, "odd"), 40000)
	write(t, filepath.Join(dir, "plain"), 40000)
	var lines []string
	s := newSet(t, Options{Depth: 4, Warn: func(line string) { lines = append(lines, line) }})
	plain, odd := openFile(t, s, filepath.Join(dir, "plain")), openFile(t, s, filepath.Join(dir, "odd"))
	// A file system that is asked for whole blocks of this file refuses them.
	s.pread = func(h handle, p []byte, off int64) (int, error) {
		if id, err := h.stat(); err == nil && id.ino == odd.id.ino && off%block == 0 {
			return 0, syscall.EINVAL
		}
		return h.pread(p, off)
	}
	var wg sync.WaitGroup
	for range 8 {
		b := newBuffer(t, 39999)
		wg.Add(1)
		s.Submit(context.Background(), Read{File: odd, Offset: 1, Bytes: 39999, Into: b, Done: func(err error) {
			defer wg.Done()
			if err != nil || !bytes.Equal(b.Bytes(), want[1:]) {
				t.Errorf("read: %v", err)
			}
		}})
	}
	wg.Wait()
	b := newBuffer(t, 40000)
	if err := s.Read(t.Context(), Read{File: plain, Bytes: 40000, Into: b}); err != nil {
		t.Error(err)
	}
	st := plain.dev.Stats()
	if len(lines) != 1 || !strings.HasPrefix(lines[0], odd.Path()) || !st.Direct || !strings.Contains(st.Mode, odd.Path()) {
		t.Errorf("said %q; stats: direct %v, %s", lines, st.Direct, st.Mode)
	}
	if plain.buffered || s.fds.open > 2 {
		t.Errorf("its neighbour is buffered: %v; %d descriptors", plain.buffered, s.fds.open)
	}
}

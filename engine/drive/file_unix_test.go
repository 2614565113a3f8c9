//go:build linux || darwin

package drive

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"

	"golang.org/x/sys/unix"
)

func TestManyFilesNeedFewDescriptors(t *testing.T) {
	dir := t.TempDir()
	const files, limit = 100, 8
	s := newSet(t, Options{MaxFiles: limit, Depth: 16, Buffered: true})
	var highest int
	var mu sync.Mutex
	s.pread = func(h handle, p []byte, off int64) (int, error) {
		s.fds.mu.Lock()
		n := s.fds.open
		s.fds.mu.Unlock()
		mu.Lock()
		highest = max(highest, n)
		mu.Unlock()
		return h.pread(p, off)
	}
	want := make([][]byte, files)
	open := make([]*File, files)
	for i := range open {
		path := filepath.Join(dir, fmt.Sprint(i))
		want[i] = write(t, path, 1000+i)
		open[i] = openFile(t, s, path)
	}
	rng := rand.New(rand.NewPCG(1, 2))
	var wg sync.WaitGroup
	for range 2000 {
		i := rng.IntN(files)
		if rng.IntN(3) == 0 {
			i = rng.IntN(4) // some files are read by several at once
		}
		b := newBuffer(t, 2000)
		wg.Add(1)
		s.Submit(context.Background(), Read{File: open[i], Bytes: open[i].Size(), Into: b, Done: func(err error) {
			defer wg.Done()
			if err != nil || !bytes.Equal(b.Bytes(), want[i]) {
				t.Errorf("file %d: %v", i, err)
			}
		}})
	}
	wg.Wait()
	if highest > limit || highest < limit/2 {
		t.Errorf("%d descriptors at most, the limit is %d", highest, limit)
	}
	if s.fds.open != s.fds.idle.Len() {
		t.Errorf("%d descriptors count, %d are idle", s.fds.open, s.fds.idle.Len())
	}
}

// A file of its own for each expert makes 82,432 of them.
func TestAStoreOfManyFilesUnderASmallUlimit(t *testing.T) {
	const files = 600
	if dir := os.Getenv("DRIVE_STORE"); dir != "" {
		if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 64, Max: 64}); err != nil {
			t.Fatal(err)
		}
		s := newSet(t, Options{})
		if s.fds.max > 40 {
			t.Fatalf("%d descriptors of 64", s.fds.max)
		}
		open := make([]*File, files)
		for i := range open {
			open[i] = openFile(t, s, filepath.Join(dir, fmt.Sprint(i)))
		}
		errs := make(chan error, files)
		for i, f := range open {
			b := newBuffer(t, 16)
			s.Submit(context.Background(), Read{File: f, Bytes: f.Size(), Into: b, Done: func(err error) {
				if err == nil && string(b.Bytes()) != fmt.Sprintf("expert %d", i) {
					err = fmt.Errorf("file %d: %q", i, b.Bytes())
				}
				errs <- err
			}})
		}
		for range files {
			if err := <-errs; err != nil {
				t.Fatal(err)
			}
		}
		return
	}
	dir := t.TempDir()
	for i := range files {
		if err := os.WriteFile(filepath.Join(dir, fmt.Sprint(i)), fmt.Appendf(nil, "expert %d", i), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	cmd := exec.Command(os.Args[0], "-test.run=^"+t.Name()+"$", "-test.count=1")
	cmd.Env = append(os.Environ(), "DRIVE_STORE="+dir)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
}

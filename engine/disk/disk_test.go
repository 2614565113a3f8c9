package disk

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
)

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func names(t *testing.T, dir string) string {
	t.Helper()
	entries, err := os.ReadDir(dir)
	must(t, err)
	var all []string
	for _, e := range entries {
		all = append(all, e.Name())
	}
	return strings.Join(all, " ")
}

func TestAFileIsPublishedWholeOrNotAtAll(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "a")
	seen := ""
	n, err := Publish(path, 0o640, func(f *os.File) error {
		_, err := f.WriteString("first")
		seen = names(t, dir)
		return err
	})
	if err != nil || n != 5 || strings.Contains(" "+seen+" ", " a ") {
		t.Errorf("%d bytes, %v; while it was written there was %q", n, err, seen)
	}
	if info, err := os.Stat(path); err != nil || runtime.GOOS != "windows" && info.Mode().Perm() != 0o640 {
		t.Errorf("%v, %v", info, err)
	}
	broken := errors.New("broken")
	_, err = Publish(path, 0o644, func(f *os.File) error {
		_, _ = f.WriteString("sec")
		return broken
	})
	if !errors.Is(err, broken) {
		t.Errorf("the writer's error is %v", err)
	}
	if b, err := os.ReadFile(path); err != nil || string(b) != "first" {
		t.Errorf("after a failure the file is %q, %v", b, err)
	}
	must(t, WriteFile(path, []byte("third"), 0o644))
	if b, err := os.ReadFile(path); err != nil || string(b) != "third" {
		t.Errorf("the file is %q, %v", b, err)
	}
	if got := names(t, dir); got != "a" {
		t.Errorf("beside the file there is %q", got)
	}
	if err := WriteFile(filepath.Join(dir, "none", "a"), nil, 0o644); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("in no directory: %v", err)
	}
}

func TestManyMayPublishAtOnePath(t *testing.T) {
	path := filepath.Join(t.TempDir(), "a")
	var g sync.WaitGroup
	for i := range 20 {
		g.Go(func() {
			if err := WriteFile(path, []byte(strings.Repeat(fmt.Sprint(i%10), 1000)), 0o644); err != nil && runtime.GOOS != "windows" {
				t.Error(err)
			}
		})
	}
	g.Wait()
	b, err := os.ReadFile(path)
	if err != nil || len(b) != 1000 || strings.Trim(string(b), string(b[:1])) != "" {
		t.Errorf("%d bytes, %v", len(b), err)
	}
}

func TestALockKeepsOthersOut(t *testing.T) {
	path := filepath.Join(t.TempDir(), "a")
	f, err := LockFile(path)
	must(t, err)
	if _, err := LockFile(path); !errors.Is(err, ErrBusy) || !strings.HasPrefix(err.Error(), path) {
		t.Errorf("a second lock: %v", err)
	}
	must(t, f.Close())
	if f, err = LockFile(path); err != nil {
		t.Fatalf("after the first ended: %v", err)
	}
	Unlock(f)
	must(t, f.Close())
	if _, err := LockFile(filepath.Join(path, "below")); err == nil {
		t.Error("a file below a file was locked")
	}
	if runtime.GOOS == "windows" {
		return
	}
	dir := t.TempDir()
	d, err := LockDir(dir)
	must(t, err)
	if _, err := LockDir(dir); !errors.Is(err, ErrBusy) {
		t.Errorf("a second lock of a directory: %v", err)
	}
	must(t, d.Close())
	if d, err = LockDir(dir); err != nil {
		t.Fatalf("after the first ended: %v", err)
	}
	must(t, d.Close())
}

// TestALockIsOfTheFileThatHasTheName: a file that was renamed or removed while somebody waited
// to lock it is not what its name means any more.
func TestALockIsOfTheFileThatHasTheName(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "a.part")
	for range 50 {
		f, err := LockFile(path)
		must(t, err)
		var g sync.WaitGroup
		g.Go(func() {
			for {
				f, err := LockFile(path)
				if errors.Is(err, ErrBusy) {
					continue
				}
				if err != nil {
					t.Error(err)
					return
				}
				mine, err1 := f.Stat()
				now, err2 := os.Stat(path)
				if err1 != nil || err2 != nil || !os.SameFile(mine, now) {
					t.Errorf("the lock is of another file: %v, %v", err1, err2)
				}
				f.Close()
				return
			}
		})
		if RenameNeedsClose {
			f.Close()
		}
		must(t, Rename(path, filepath.Join(dir, "a")))
		f.Close()
		g.Wait()
	}
}

func TestFullKnowsItsCauses(t *testing.T) {
	for _, c := range []struct {
		err  error
		want bool
	}{
		{fmt.Errorf("a file: %w: 3 GB are needed", ErrFull), true},
		{&fs.PathError{Op: "write", Path: "a", Err: syscall.ENOSPC}, runtime.GOOS != "windows"},
		{&os.LinkError{Op: "rename", Err: syscall.EDQUOT}, runtime.GOOS != "windows"},
		{&fs.PathError{Op: "write", Path: "a", Err: syscall.EIO}, false},
		{nil, false},
	} {
		if got := Full(c.err); got != c.want {
			t.Errorf("%v: %v", c.err, got)
		}
	}
}

func TestFreeIsThatOfTheFileSystem(t *testing.T) {
	n, err := Free(t.TempDir())
	if err != nil || n <= 0 || n > 1<<60 {
		t.Errorf("free space %d, %v", n, err)
	}
	if _, err := Free(filepath.Join(t.TempDir(), "none")); err == nil {
		t.Error("a directory that is not there has free space")
	}
	if err := SyncDir(filepath.Join(t.TempDir(), "none")); err == nil && runtime.GOOS != "windows" {
		t.Error("a directory that is not there was synced")
	}
}

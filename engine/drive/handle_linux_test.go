package drive

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// Recent kernels accept O_DIRECT on tmpfs, older ones refuse it: neither reads a drive.
func TestFilesInMemoryAreBufferedAndSaidSo(t *testing.T) {
	var fs unix.Statfs_t
	if err := unix.Statfs("/dev/shm", &fs); err != nil || fs.Type != unix.TMPFS_MAGIC {
		t.Skip("NOT RUN: /dev/shm is not a tmpfs")
	}
	dir, err := os.MkdirTemp("/dev/shm", "drive")
	if err != nil {
		t.Skip("NOT RUN: ", err)
	}
	defer os.RemoveAll(dir)
	path := filepath.Join(dir, "f")
	want := write(t, path, 10000)
	var lines []string
	s := newSet(t, Options{Warn: func(line string) { lines = append(lines, line) }})
	f, b := openFile(t, s, path), newBuffer(t, 10000)
	if err := s.Read(t.Context(), Read{File: f, Bytes: 10000, Into: b}); err != nil || string(b.Bytes()) != string(want) {
		t.Errorf("read: %v", err)
	}
	if st := f.dev.Stats(); len(lines) != 1 || !strings.HasPrefix(lines[0], dir) || st.Direct {
		t.Errorf("said %q; direct %v", lines, st.Direct)
	}
}

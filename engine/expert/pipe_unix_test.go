//go:build unix

package expert

import (
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"deltafin/engine/drive"
)

// TestAPipeIsNoCopy: what would wait for ever is refused before it is opened.
func TestAPipeIsNoCopy(t *testing.T) {
	w := openWorld(t, "tiny-a")
	for _, name := range []string{filepath.Base(w.ck.Path(4)), packedName(5)} {
		dir := t.TempDir()
		if err := unix.Mkfifo(filepath.Join(dir, name), 0o644); err != nil {
			t.Skipf("NOT RUN: the file system has no pipes: %v", err)
		}
		drives := drive.NewSet(drive.Options{Buffered: true})
		_, err := Open(w.ck, drives, Options{Dirs: []string{dir}})
		drives.Close()
		if err == nil || !strings.Contains(err.Error(), name) || !strings.Contains(err.Error(), "not a regular file") {
			t.Errorf("%s is a pipe: %v", name, err)
		}
		if _, faults, err := PlaceVerify(t.Context(), w.ck, dir, nil); err == nil && len(faults) == 0 && name == packedName(5) {
			t.Errorf("%s is a pipe, and verified", name)
		}
	}
}

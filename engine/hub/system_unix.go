//go:build unix

package hub

import (
	"errors"
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

const canSpread = true

// driveOf tells file systems apart.
func driveOf(dir string) string {
	var s unix.Stat_t
	if err := unix.Stat(dir, &s); err != nil {
		return dir
	}
	return fmt.Sprint(s.Dev)
}

// lockFile takes a lock that ends with the process. On a file system without locks
// there is none, and no error.
func lockFile(f *os.File) error {
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); errors.Is(err, unix.EWOULDBLOCK) {
		b := make([]byte, 32)
		n, _ := f.ReadAt(b, 0)
		return fmt.Errorf("is being written by another deltafin (process %s): wait until it ends, or stop it", strings.TrimSpace(string(b[:n])))
	}
	return nil
}

// unlockFile ends the lock also where a process that is just being started still
// holds the file open.
func unlockFile(f *os.File) { unix.Flock(int(f.Fd()), unix.LOCK_UN) }

func isReadOnly(err error) bool { return errors.Is(err, unix.EROFS) }

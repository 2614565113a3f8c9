//go:build unix

package disk

import (
	"errors"
	"io"
	"os"

	"golang.org/x/sys/unix"
)

// RenameNeedsClose: an open file can be renamed, so that its lock lasts until it has its name.
const RenameNeedsClose = false

// Free is how many bytes an ordinary user can still write below dir.
func Free(dir string) (int64, error) {
	var s unix.Statfs_t
	if err := unix.Statfs(dir, &s); err != nil {
		return 0, err
	}
	return int64(s.Bavail) * int64(s.Bsize), nil
}

// SyncDir makes the names in dir last.
func SyncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer d.Close()
	if err := d.Sync(); err != nil && !errors.Is(err, unix.EINVAL) { // some network file systems have none
		return err
	}
	return nil
}

// Lock keeps others from a file until it is closed or the process ends: they get
// [ErrBusy]. On a file system without locks there is none, and no error.
func Lock(f *os.File) error {
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); errors.Is(err, unix.EWOULDBLOCK) {
		return ErrBusy
	}
	return nil
}

// Unlock ends a lock before the file is closed, also where a process that is just being
// started still has it open.
func Unlock(f *os.File) { _ = unix.Flock(int(f.Fd()), unix.LOCK_UN) }

// LockDir is [Lock] of a directory, until what it returns is closed.
func LockDir(dir string) (io.Closer, error) {
	d, err := os.Open(dir)
	if err != nil {
		return nil, err
	}
	if err := Lock(d); err != nil {
		d.Close()
		return nil, err
	}
	return d, nil
}

func full(err error) bool { return errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) }

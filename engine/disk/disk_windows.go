package disk

import (
	"errors"
	"io"
	"os"

	"golang.org/x/sys/windows"
)

// RenameNeedsClose: only a closed file, whose lock is gone, can be renamed.
const RenameNeedsClose = true

// Free is how many bytes this user can still write below dir.
func Free(dir string) (int64, error) {
	name, err := windows.UTF16PtrFromString(dir)
	if err != nil {
		return 0, err
	}
	var free uint64
	if err := windows.GetDiskFreeSpaceEx(name, &free, nil, nil); err != nil {
		return 0, err
	}
	return int64(min(free, 1<<62)), nil
}

// SyncDir does nothing: NTFS journals names, and directories cannot be flushed.
func SyncDir(string) error { return nil }

// Lock keeps others from writing a file until it is closed or the process ends: they get
// [ErrBusy]. What is locked is a byte far beyond the end, so that others may read the file.
func Lock(f *os.File) error {
	o := windows.Overlapped{OffsetHigh: 1 << 30}
	err := windows.LockFileEx(windows.Handle(f.Fd()), windows.LOCKFILE_EXCLUSIVE_LOCK|windows.LOCKFILE_FAIL_IMMEDIATELY, 0, 1, 0, &o)
	if errors.Is(err, windows.ERROR_LOCK_VIOLATION) {
		return ErrBusy
	}
	return nil
}

// Unlock has nothing to do: closing ends the lock.
func Unlock(*os.File) {}

// LockDir has nothing to do: a second writer fails on the first one's unfinished file, which
// cannot be removed while it is open.
func LockDir(string) (io.Closer, error) { return io.NopCloser(nil), nil }

func full(err error) bool {
	return errors.Is(err, windows.ERROR_DISK_FULL) || errors.Is(err, windows.ERROR_HANDLE_DISK_FULL)
}

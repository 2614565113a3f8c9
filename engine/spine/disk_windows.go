package spine

import (
	"errors"
	"os"

	"golang.org/x/sys/windows"
)

const renameNeedsClose = true

// freeSpace is how many bytes an ordinary user can still write below dir.
func freeSpace(dir string) (int64, error) {
	name, err := windows.UTF16PtrFromString(dir)
	if err != nil {
		return 0, err
	}
	var free uint64
	err = windows.GetDiskFreeSpaceEx(name, &free, nil, nil)
	return int64(free), err
}

// tryLock locks a byte beyond the end, so that others may read the file.
func tryLock(f *os.File) (bool, error) {
	o := windows.Overlapped{OffsetHigh: 1 << 30}
	err := windows.LockFileEx(windows.Handle(f.Fd()), windows.LOCKFILE_EXCLUSIVE_LOCK|windows.LOCKFILE_FAIL_IMMEDIATELY, 0, 1, 0, &o)
	if errors.Is(err, windows.ERROR_LOCK_VIOLATION) {
		return false, nil
	}
	return err == nil, err
}

// syncDir does nothing: a rename lasts when the system says so.
func syncDir(string) error { return nil }

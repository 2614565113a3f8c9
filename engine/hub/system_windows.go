package hub

import (
	"errors"
	"os"
	"path/filepath"

	"golang.org/x/sys/windows"
)

// Symbolic links need a privilege that ordinary users do not have.
const canSpread = false

func freeSpace(dir string) (int64, error) {
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

func driveOf(dir string) string { return filepath.VolumeName(dir) }

// syncDir does nothing: NTFS journals names, and directories cannot be flushed.
func syncDir(string) error { return nil }

func lockFile(f *os.File) error {
	err := windows.LockFileEx(windows.Handle(f.Fd()), windows.LOCKFILE_EXCLUSIVE_LOCK|windows.LOCKFILE_FAIL_IMMEDIATELY, 0, 1, 0, &windows.Overlapped{OffsetHigh: 1})
	if errors.Is(err, windows.ERROR_LOCK_VIOLATION) {
		return errors.New("is being written by another deltafin: wait until it ends, or stop it")
	}
	return nil
}

// unlockFile has nothing to do: closing ends the lock.
func unlockFile(*os.File) {}

func isFull(err error) bool {
	return errors.Is(err, windows.ERROR_DISK_FULL) || errors.Is(err, windows.ERROR_HANDLE_DISK_FULL)
}

func isReadOnly(err error) bool { return errors.Is(err, windows.ERROR_WRITE_PROTECT) }

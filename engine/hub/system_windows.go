package hub

import (
	"errors"
	"os"
	"path/filepath"

	"golang.org/x/sys/windows"
)

// Symbolic links need a privilege that ordinary users do not have.
const canSpread = false

func driveOf(dir string) string { return filepath.VolumeName(dir) }

func lockFile(f *os.File) error {
	err := windows.LockFileEx(windows.Handle(f.Fd()), windows.LOCKFILE_EXCLUSIVE_LOCK|windows.LOCKFILE_FAIL_IMMEDIATELY, 0, 1, 0, &windows.Overlapped{OffsetHigh: 1})
	if errors.Is(err, windows.ERROR_LOCK_VIOLATION) {
		return errors.New("is being written by another deltafin: wait until it ends, or stop it")
	}
	return nil
}

// unlockFile has nothing to do: closing ends the lock.
func unlockFile(*os.File) {}

func isReadOnly(err error) bool { return errors.Is(err, windows.ERROR_WRITE_PROTECT) }

package expert

import (
	"io"
	"os"

	"golang.org/x/sys/windows"
)

// holes finds none: NTFS does not tell them from zeros without being asked per range.
func holes(*os.File, int64, func(from, to int64) error) error { return nil }

// freeSpace is how many bytes this user can still write below dir.
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

// lockDir has nothing to do: a second stage fails on the first one's unfinished
// file, which cannot be removed while it is open.
func lockDir(string) (io.Closer, error) { return io.NopCloser(nil), nil }

// syncDir does nothing: NTFS journals names, and directories cannot be flushed.
func syncDir(string) error { return nil }

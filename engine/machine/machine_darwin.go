package machine

import (
	"slices"

	"golang.org/x/sys/unix"
)

// ReadMemory asks for the machine's memory, which counts as available whole: macOS
// compresses and reclaims on its own, and reports no figure that means what Linux's
// MemAvailable does.
func ReadMemory() Memory {
	n, err := unix.SysctlUint64("hw.memsize")
	if err != nil {
		return Memory{Available: unlimited}
	}
	return Memory{Total: int64(n), Available: int64(n)}
}

// Quota is how many processors' worth of time the process may use; 0 means all.
func Quota() float64 { return 0 }

// ReadFileSystem asks about the file system that dir is on.
func ReadFileSystem(dir string) (FileSystem, error) {
	var s unix.Statfs_t
	if err := unix.Statfs(dir, &s); err != nil {
		return FileSystem{}, err
	}
	f := FileSystem{Name: unix.ByteSliceToString(s.Fstypename[:]), Kind: Local, ReadOnly: s.Flags&unix.MNT_RDONLY != 0}
	if slices.Contains([]string{"nfs", "smbfs", "afpfs", "webdav", "macfuse", "osxfuse"}, f.Name) {
		f.Kind = Network
	}
	return f, nil
}

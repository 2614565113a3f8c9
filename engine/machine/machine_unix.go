//go:build unix

package machine

import (
	"runtime"

	"golang.org/x/sys/unix"
)

// PeakRSS is the peak resident set of this process in bytes.
func PeakRSS() int64 {
	var u unix.Rusage
	if unix.Getrusage(unix.RUSAGE_SELF, &u) != nil {
		return 0
	}
	if runtime.GOOS == "darwin" {
		return int64(u.Maxrss)
	}
	return int64(u.Maxrss) << 10 // kilobytes elsewhere
}

// Writable tells why nothing can be written to a directory, as far as that can be told
// without trying: who runs the process, and how the file system is mounted.
func Writable(dir string) error { return unix.Access(dir, unix.W_OK) }

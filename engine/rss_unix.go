//go:build unix

package engine

import (
	"runtime"

	"golang.org/x/sys/unix"
)

// peakRSS is the peak resident set in bytes.
func peakRSS() int64 {
	var u unix.Rusage
	if unix.Getrusage(unix.RUSAGE_SELF, &u) != nil {
		return 0
	}
	if runtime.GOOS == "darwin" {
		return int64(u.Maxrss)
	}
	return int64(u.Maxrss) << 10 // kilobytes elsewhere
}

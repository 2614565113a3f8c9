//go:build unix

package hub

import (
	"os"
	"runtime"
	"syscall"
)

// peakMemory is the most memory, in bytes, that a process that has ended held.
func peakMemory(p *os.ProcessState) int64 {
	n := p.SysUsage().(*syscall.Rusage).Maxrss
	if runtime.GOOS == "darwin" {
		return n
	}
	return n << 10
}

package engine

import "golang.org/x/sys/unix"

// AvailableMemory is the machine's memory: macOS compresses and reclaims on its
// own, and reports no figure that means what Linux's MemAvailable does.
func AvailableMemory() int64 {
	n, err := unix.SysctlUint64("hw.memsize")
	if err != nil {
		return 1 << 62
	}
	return int64(n)
}

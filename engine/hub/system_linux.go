package hub

import (
	"os"

	"golang.org/x/sys/unix"
)

// dropCache makes the next read come from the drive, not from memory.
func dropCache(f *os.File, x span) {
	unix.Fadvise(int(f.Fd()), x.off, x.bytes(), unix.FADV_DONTNEED)
}

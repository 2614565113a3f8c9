package hub

import (
	"os"

	"golang.org/x/sys/unix"
)

// dropCache makes the next read come from the drive, not from memory.
func dropCache(f *os.File, x span) {
	unix.Fadvise(int(f.Fd()), x.off, x.bytes(), unix.FADV_DONTNEED)
}

// punchHole gives the room of a run of bytes back to the drive; they read as zeros then.
func punchHole(f *os.File, x span) error {
	return unix.Fallocate(int(f.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, x.off, x.bytes())
}

package synth

import (
	"os"

	"golang.org/x/sys/unix"
)

// writeBehind keeps a large file out of the page cache while one worker writes it.
// A range is sent to the drive at once, and when as many as lag have followed it,
// its pages are given back: they would push out what others have cached, and a
// bench that follows would read memory instead of the drive. Failures do no harm: the
// file is synced at its end in any case.
type writeBehind struct {
	file *os.File
	out  [][2]int64
}

const lag = 4

func (b *writeBehind) wrote(at, n int64) {
	fd := int(b.file.Fd())
	unix.SyncFileRange(fd, at, n, unix.SYNC_FILE_RANGE_WRITE)
	if b.out = append(b.out, [2]int64{at, n}); len(b.out) <= lag {
		return
	}
	old := b.out[0]
	b.out = append(b.out[:0], b.out[1:]...)
	const wait = unix.SYNC_FILE_RANGE_WAIT_BEFORE | unix.SYNC_FILE_RANGE_WRITE | unix.SYNC_FILE_RANGE_WAIT_AFTER
	unix.SyncFileRange(fd, old[0], old[1], wait)
	unix.Fadvise(fd, old[0], old[1], unix.FADV_DONTNEED)
}

// forget gives back all pages of a file that has been synced.
func forget(f *os.File) { unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED) }

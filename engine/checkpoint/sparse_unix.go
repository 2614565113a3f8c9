//go:build linux || darwin

package checkpoint

import (
	"errors"
	"os"

	"golang.org/x/sys/unix"
)

// missingBytes returns how much of a file was never written. Downloaders that set
// the size first leave such holes, and they read as zeros: the size alone proves
// nothing. File systems that cannot tell report no holes.
func missingBytes(f *os.File, size int64) (int64, error) {
	fd := int(f.Fd())
	var total int64
	for at, steps := int64(0), 0; at < size && steps < holeSteps; steps++ {
		hole, err := unix.Seek(fd, at, unix.SEEK_HOLE)
		if err != nil || hole >= size {
			// EINVAL and its kin: the file system cannot say.
			return total, nil
		}
		data, err := unix.Seek(fd, hole, unix.SEEK_DATA)
		switch {
		case errors.Is(err, unix.ENXIO):
			data = size // nothing but a hole from here on
		case err != nil:
			return total, err
		case data <= hole:
			return total, nil
		}
		total += min(data, size) - hole
		at = data
	}
	return total, nil
}

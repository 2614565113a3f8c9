//go:build linux || darwin

package expert

import (
	"errors"
	"os"

	"golang.org/x/sys/unix"
)

// holes calls f for the runs of a file that were never written, up to a few thousand
// of them. File systems that cannot tell report none.
func holes(file *os.File, size int64, f func(from, to int64) error) error {
	fd := int(file.Fd())
	for at, steps := int64(0), 0; at < size && steps < 4096; steps++ {
		hole, err := unix.Seek(fd, at, unix.SEEK_HOLE)
		if err != nil || hole >= size {
			return nil
		}
		data, err := unix.Seek(fd, hole, unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) {
			data, err = size, nil // nothing but a hole from here on
		}
		if err != nil || data <= hole {
			return err
		}
		if err := f(hole, min(data, size)); err != nil {
			return err
		}
		at = data
	}
	return nil
}

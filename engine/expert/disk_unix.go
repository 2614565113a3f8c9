//go:build linux || darwin

package expert

import (
	"errors"
	"io"
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

// freeSpace is how many bytes an ordinary user can still write below dir.
func freeSpace(dir string) (int64, error) {
	var s unix.Statfs_t
	if err := unix.Statfs(dir, &s); err != nil {
		return 0, err
	}
	return int64(s.Bavail) * int64(s.Bsize), nil
}

// lockDir keeps other stages out of dir until it is closed or the process ends. On
// a file system without locks there is none, and no error.
func lockDir(dir string) (io.Closer, error) {
	d, err := os.Open(dir)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(d.Fd()), unix.LOCK_EX|unix.LOCK_NB); errors.Is(err, unix.EWOULDBLOCK) {
		d.Close()
		return nil, errBusy
	}
	return d, nil
}

// syncDir makes the names in dir durable.
func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer d.Close()
	return d.Sync()
}

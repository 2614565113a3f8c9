//go:build linux || darwin

package drive

import (
	"errors"

	"golang.org/x/sys/unix"
)

// handle is an open file of the system.
type handle int

func (h handle) pread(p []byte, off int64) (int, error) {
	n, err := unix.Pread(int(h), p, off)
	return max(n, 0), err
}

func (h handle) stat() (identity, error) {
	var st unix.Stat_t
	for {
		if err := unix.Fstat(int(h), &st); !errors.Is(err, unix.EINTR) {
			return identify(&st), err
		}
	}
}

func (h handle) close() { _ = unix.Close(int(h)) }

func statPath(path string) (identity, error) {
	var st unix.Stat_t
	for {
		if err := unix.Stat(path, &st); !errors.Is(err, unix.EINTR) {
			return identify(&st), err
		}
	}
}

func identify(st *unix.Stat_t) identity {
	return identity{
		dev: uint64(st.Dev), ino: st.Ino, size: st.Size,
		mtime: st.Mtim.Nano(), regular: st.Mode&unix.S_IFMT == unix.S_IFREG,
	}
}

func open(path string, flags int) (handle, error) {
	for {
		fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC|flags, 0)
		if !errors.Is(err, unix.EINTR) {
			return handle(fd), err
		}
	}
}

func interrupted(err error) bool { return errors.Is(err, unix.EINTR) }

// refusesDirect reports whether an error can mean that direct I/O is what it is
// about.
func refusesDirect(err error) bool {
	return errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOTSUP) || errors.Is(err, unix.EOPNOTSUPP)
}

// softLimit is how many descriptors the process may open.
func softLimit() int {
	var l unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &l); err != nil {
		return 256
	}
	return int(min(l.Cur, 1<<20))
}

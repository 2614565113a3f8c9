//go:build (linux || darwin) && !race

package drive

import "golang.org/x/sys/unix"

func allocate(n int64) ([]byte, error) {
	return unix.Mmap(-1, 0, int(n), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
}

func deallocate(mem []byte) { _ = unix.Munmap(mem) }

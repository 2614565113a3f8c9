package kernel

import (
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"
)

// fenced returns n zero bytes that end at an unreadable page.
func fenced(t testing.TB, n int) []byte {
	page := unix.Getpagesize()
	size := (n + page - 1) / page * page
	m, err := unix.Mmap(-1, 0, size+page, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.Mprotect(m[size:], unix.PROT_NONE); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Munmap(m) })
	if size == 0 {
		return unsafe.Slice(&m[0], 0)
	}
	return unsafe.Slice(&m[size-n], n)
}

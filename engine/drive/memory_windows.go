//go:build !race

package drive

import (
	"unsafe"

	"golang.org/x/sys/windows"
)

func allocate(n int64) ([]byte, error) {
	p, err := windows.VirtualAlloc(0, uintptr(n), windows.MEM_RESERVE|windows.MEM_COMMIT, windows.PAGE_READWRITE)
	if err != nil {
		return nil, err
	}
	// The address is not the collector's: it can neither move nor vanish.
	return unsafe.Slice(*(**byte)(unsafe.Pointer(&p)), n), nil
}

func deallocate(mem []byte) {
	_ = windows.VirtualFree(uintptr(unsafe.Pointer(unsafe.SliceData(mem))), 0, windows.MEM_RELEASE)
}

package engine

import (
	"unsafe"

	"golang.org/x/sys/windows"
)

var (
	kernel32             = windows.NewLazySystemDLL("kernel32.dll")
	globalMemoryStatusEx = kernel32.NewProc("GlobalMemoryStatusEx")
	getProcessMemoryInfo = kernel32.NewProc("K32GetProcessMemoryInfo")
)

// AvailableMemory is ullAvailPhys of GlobalMemoryStatusEx.
func AvailableMemory() int64 {
	var s struct {
		length, load                                                               uint32
		totalPhys, availPhys, totalPage, availPage, totalVirt, availVirt, availExt uint64
	}
	s.length = uint32(unsafe.Sizeof(s))
	if ok, _, _ := globalMemoryStatusEx.Call(uintptr(unsafe.Pointer(&s))); ok == 0 {
		return 1 << 62
	}
	return int64(s.availPhys)
}

// peakRSS is the peak working set in bytes.
func peakRSS() int64 {
	var c struct {
		cb, pageFaults             uint32
		peakWorkingSet, workingSet uintptr
		_                          [6]uintptr
	}
	c.cb = uint32(unsafe.Sizeof(c))
	if ok, _, _ := getProcessMemoryInfo.Call(uintptr(windows.CurrentProcess()), uintptr(unsafe.Pointer(&c)), uintptr(c.cb)); ok == 0 {
		return 0
	}
	return int64(c.peakWorkingSet)
}

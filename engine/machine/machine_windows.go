package machine

import (
	"path/filepath"
	"unsafe"

	"golang.org/x/sys/windows"
)

var (
	kernel32             = windows.NewLazySystemDLL("kernel32.dll")
	globalMemoryStatusEx = kernel32.NewProc("GlobalMemoryStatusEx")
	getProcessMemoryInfo = kernel32.NewProc("K32GetProcessMemoryInfo")
)

// ReadMemory asks GlobalMemoryStatusEx: ullAvailPhys is what is available.
func ReadMemory() Memory {
	var s struct {
		length, load                                                               uint32
		totalPhys, availPhys, totalPage, availPage, totalVirt, availVirt, availExt uint64
	}
	s.length = uint32(unsafe.Sizeof(s))
	if ok, _, _ := globalMemoryStatusEx.Call(uintptr(unsafe.Pointer(&s))); ok == 0 {
		return Memory{Available: unlimited}
	}
	return Memory{Total: int64(s.totalPhys), Available: int64(s.availPhys)}
}

// Quota is how many processors' worth of time the process may use; 0 means all.
func Quota() float64 { return 0 }

// PeakRSS is the peak working set of this process in bytes.
func PeakRSS() int64 {
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

// ReadFileSystem asks about the file system that dir is on.
func ReadFileSystem(dir string) (FileSystem, error) {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return FileSystem{}, err
	}
	path, err := windows.UTF16PtrFromString(dir)
	if err != nil {
		return FileSystem{}, err
	}
	f := FileSystem{Name: "unknown", Kind: Local}
	if _, err := windows.GetFileAttributes(path); err != nil {
		return FileSystem{}, err
	}
	root, err := windows.UTF16PtrFromString(filepath.VolumeName(dir) + `\`)
	if err != nil {
		return f, nil
	}
	if windows.GetDriveType(root) == windows.DRIVE_REMOTE {
		f.Kind = Network
	}
	var flags uint32
	name := make([]uint16, windows.MAX_PATH+1)
	if windows.GetVolumeInformation(root, nil, 0, nil, nil, &flags, &name[0], uint32(len(name))) == nil {
		f.Name = windows.UTF16ToString(name)
		f.ReadOnly = flags&windows.FILE_READ_ONLY_VOLUME != 0
	}
	return f, nil
}

// Writable tells why nothing can be written to a directory. Windows does not say without
// a try.
func Writable(string) error { return nil }

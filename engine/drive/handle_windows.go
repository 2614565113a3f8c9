package drive

import (
	"errors"
	"strings"

	"golang.org/x/sys/windows"
)

// handle is an open file of the system, opened for overlapped calls: the system
// would make those of an ordinary handle wait for each other.
type handle windows.Handle

func openHandle(path string, direct bool) (handle, error) {
	attrs := uint32(windows.FILE_FLAG_OVERLAPPED)
	if direct {
		attrs |= windows.FILE_FLAG_NO_BUFFERING
	}
	return create(path, windows.GENERIC_READ, attrs)
}

func create(path string, access, attrs uint32) (handle, error) {
	switch { // paths are absolute and clean here; longer ones need the prefix
	case strings.HasPrefix(path, `\\?\`):
	case strings.HasPrefix(path, `\\`):
		path = `\\?\UNC` + path[1:]
	default:
		path = `\\?\` + path
	}
	name, err := windows.UTF16PtrFromString(path)
	if err != nil {
		return 0, err
	}
	h, err := windows.CreateFile(name, access, windows.FILE_SHARE_READ|windows.FILE_SHARE_WRITE|windows.FILE_SHARE_DELETE,
		nil, windows.OPEN_EXISTING, attrs, 0)
	return handle(h), err
}

func (h handle) pread(p []byte, off int64) (int, error) {
	event, err := windows.CreateEvent(nil, 1, 0, nil)
	if err != nil {
		return 0, err
	}
	defer windows.CloseHandle(event)
	o := &windows.Overlapped{Offset: uint32(off), OffsetHigh: uint32(off >> 32), HEvent: event}
	var n uint32
	err = windows.ReadFile(windows.Handle(h), p, nil, o)
	if err == nil || errors.Is(err, windows.ERROR_IO_PENDING) {
		err = windows.GetOverlappedResult(windows.Handle(h), o, &n, true)
	}
	if errors.Is(err, windows.ERROR_HANDLE_EOF) {
		err = nil
	}
	return int(n), err
}

func (h handle) stat() (identity, error) {
	var st windows.ByHandleFileInformation
	if err := windows.GetFileInformationByHandle(windows.Handle(h), &st); err != nil {
		return identity{}, err
	}
	return identity{
		dev:     uint64(st.VolumeSerialNumber),
		ino:     uint64(st.FileIndexHigh)<<32 | uint64(st.FileIndexLow),
		size:    int64(st.FileSizeHigh)<<32 | int64(st.FileSizeLow),
		mtime:   st.LastWriteTime.Nanoseconds(),
		regular: st.FileAttributes&windows.FILE_ATTRIBUTE_DIRECTORY == 0,
	}, nil
}

func (h handle) close() { _ = windows.CloseHandle(windows.Handle(h)) }

func statPath(path string) (identity, error) {
	// BACKUP_SEMANTICS lets a directory be opened, so that it can be told apart.
	h, err := create(path, 0, windows.FILE_FLAG_BACKUP_SEMANTICS)
	if err != nil {
		return identity{}, err
	}
	defer h.close()
	return h.stat()
}

func (h handle) unfit() string { return "" }

func (h handle) forget(off, n int64) {}

func interrupted(error) bool { return false }

// refusesDirect reports whether an error can mean that direct I/O is what it is
// about.
func refusesDirect(err error) bool {
	return errors.Is(err, windows.ERROR_INVALID_PARAMETER) || errors.Is(err, windows.ERROR_NOT_SUPPORTED)
}

// softLimit is how many descriptors the process may open.
func softLimit() int { return 4096 }

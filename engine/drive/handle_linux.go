package drive

import (
	"fmt"

	"golang.org/x/sys/unix"
)

func openHandle(path string, direct bool) (handle, error) {
	if direct {
		return open(path, unix.O_DIRECT)
	}
	return open(path, 0)
}

// unfit says why an open file cannot be read directly, as far as the kernel tells.
func (h handle) unfit() string {
	var fs unix.Statfs_t
	if err := unix.Fstatfs(int(h), &fs); err == nil {
		// Recent kernels accept direct reads of files in memory and copy as ever.
		switch int64(fs.Type) {
		case unix.TMPFS_MAGIC, unix.RAMFS_MAGIC:
			return "the files lie in memory"
		}
	}
	var st unix.Statx_t
	err := unix.Statx(int(h), "", unix.AT_EMPTY_PATH, unix.STATX_DIOALIGN, &st)
	if err != nil || st.Mask&unix.STATX_DIOALIGN == 0 {
		return "" // unknown: the probe decides
	}
	if st.Dio_offset_align == 0 {
		return "the file system says that it has none"
	}
	if at := max(st.Dio_offset_align, st.Dio_mem_align); block%at != 0 {
		return fmt.Sprintf("its blocks are of %d bytes, %d is the largest that is supported", at, block)
	}
	return ""
}

// forget drops pages that a buffered read left in the page cache.
func (h handle) forget(off, n int64) {
	_ = unix.Fadvise(int(h), off, n, unix.FADV_DONTNEED)
}

package drive

import (
	"container/list"
	"errors"
	"fmt"
	"io/fs"
	"sync"
)

// File is a file of a [Set]. It costs memory only: descriptors are opened when a
// read needs one and closed when others need it more.
type File struct {
	path string
	id   identity
	dev  *Device

	name    string // at the remote
	remote  Remote // nil for a file of this system
	filling bool   // see Options.Filling

	// Guarded by descriptors.mu.
	desc     *descriptor
	buffered bool // refused direct I/O although its device does not
}

// Path is the absolute path, or the address at a remote.
func (f *File) Path() string { return f.path }

// Size is the length in bytes when the file was opened.
func (f *File) Size() int64 { return f.id.size }

// Device is where the file lies.
func (f *File) Device() *Device { return f.dev }

// identity tells a file from one that took its place.
type identity struct {
	dev, ino uint64
	size     int64
	mtime    int64 // nanoseconds
	regular  bool
}

// tryDirect reads the first block directly. Either a refusal says why that cannot
// be done here, or err what is wrong with the file or its drive.
func (f *File) tryDirect(fault func(string, int64, int) error) (refusal string, err error) {
	h, err := openHandle(f.path, true)
	if err != nil {
		if refusesDirect(err) {
			return "the file system refuses to open files for it: " + err.Error(), nil
		}
		return "", err
	}
	defer h.close()
	if why := h.unfit(); why != "" {
		return why, nil
	}
	b, err := NewBuffer(block)
	if err != nil {
		return "", err
	}
	defer b.Free()
	for {
		if fault != nil {
			err = fault(f.path, 0, block)
		}
		if err == nil {
			_, err = h.pread(b.mem[:block], 0)
		}
		switch {
		case err == nil:
			return "", nil
		case interrupted(err):
			err = nil
		case refusesDirect(err):
			return "the file system takes it at open and refuses reads: " + err.Error(), nil
		default:
			return "", err
		}
	}
}

// descriptors bounds the open files. Those no read uses are kept, and the one that
// was used longest ago goes first.
type descriptors struct {
	max int

	mu   sync.Mutex
	room sync.Cond
	open int
	idle list.List // of *descriptor, the latest used in front
	shut bool
}

// descriptor is an open file, or the right to open one. Several reads may share it.
type descriptor struct {
	file *File
	opened,
	direct bool
	h        handle
	refs     int
	elem     *list.Element // in idle
	detached bool          // does not count: a stalled read has it
}

func newDescriptors(n int) *descriptors {
	c := &descriptors{max: n}
	c.room.L = &c.mu
	return c
}

// reserve waits until f has a descriptor or may have one; fill opens it. They are
// two, because waiting for other reads is not the drive's fault and opening is.
func (c *descriptors) reserve(f *File) *descriptor {
	var victim *descriptor
	c.mu.Lock()
	for {
		if d := f.desc; d != nil {
			if d.refs++; d.elem != nil {
				c.idle.Remove(d.elem)
				d.elem = nil
			}
			c.mu.Unlock()
			return d
		}
		if c.open < c.max {
			c.open++
			break
		}
		if e := c.idle.Back(); e != nil {
			victim = c.idle.Remove(e).(*descriptor)
			victim.elem, victim.file.desc = nil, nil
			break
		}
		c.room.Wait()
	}
	c.mu.Unlock()
	if victim != nil {
		victim.h.close()
	}
	return &descriptor{file: f, refs: 1}
}

// fill opens a reserved descriptor and checks that the path still leads to the
// file that was opened first.
func (c *descriptors) fill(d *descriptor) error {
	c.mu.Lock()
	opened, buffered := d.opened, d.file.buffered
	c.mu.Unlock()
	if opened {
		return nil
	}
	f := d.file
	direct := f.dev.isDirect() && !buffered
	h, err := openHandle(f.path, direct)
	if err != nil && direct && refusesDirect(err) {
		f.dev.except(f, err)
		direct = false
		h, err = openHandle(f.path, direct)
	}
	if err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("%w: it is gone: put it back, and start again", ErrChanged)
		}
		return fmt.Errorf("opening it: %w", err)
	}
	now, err := h.stat()
	if err != nil {
		h.close()
		return fmt.Errorf("looking at it: %w", err)
	}
	if f.filling {
		now.mtime = f.id.mtime
	}
	if now != f.id {
		h.close()
		return f.changed(now)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	d.h, d.direct, d.opened = h, direct, true
	if f.desc == nil && !d.detached {
		f.desc = d
	}
	return nil
}

func (f *File) changed(now identity) error {
	what := "its contents were written to"
	switch {
	case now.ino != f.id.ino || now.dev != f.id.dev:
		what = "another file has its name"
	case now.size != f.id.size:
		what = fmt.Sprintf("it had %d bytes and has %d", f.id.size, now.size)
	}
	return fmt.Errorf("%w: %s: let nothing write to it during a run, and start again", ErrChanged, what)
}

// demote exchanges the descriptor of a file that is refused direct I/O for one that
// reads through the page cache. Reads that share the old one find out themselves.
func (c *descriptors) demote(d *descriptor) *descriptor {
	f := d.file
	c.mu.Lock()
	f.buffered = true
	if f.desc == d {
		f.desc = nil
	}
	c.mu.Unlock()
	c.release(d)
	return c.reserve(f)
}

// release gives a descriptor back.
func (c *descriptors) release(d *descriptor) {
	c.mu.Lock()
	d.refs--
	shut := d.refs == 0 && (d.detached || d.file.desc != d || c.shut)
	switch {
	case shut && !d.detached:
		c.open--
		if d.file.desc == d {
			d.file.desc = nil
		}
	case d.refs == 0 && !shut:
		d.elem = c.idle.PushFront(d)
	}
	c.room.Broadcast()
	opened := d.opened
	c.mu.Unlock()
	if shut && opened {
		d.h.close()
	}
}

// detach stops counting a descriptor that is stuck in the kernel, so that healthy
// drives do not run out of them.
func (c *descriptors) detach(d *descriptor) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if d.detached || d.refs == 0 { // released in the meantime
		return
	}
	d.detached = true
	if d.file.desc == d {
		d.file.desc = nil
	}
	c.open--
	c.room.Broadcast()
}

// close closes what no read uses; what one does use is closed on its release.
func (c *descriptors) close() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.shut = true
	for e := c.idle.Front(); e != nil; e = c.idle.Front() {
		d := c.idle.Remove(e).(*descriptor)
		d.file.desc = nil
		d.h.close()
		c.open--
	}
}

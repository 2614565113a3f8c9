package drive

import (
	"container/list"
	"context"
	"fmt"
	"sync/atomic"
	"time"
)

// Class says why a read is made. Demand goes before read-ahead in each queue.
type Class uint8

const (
	Demand Class = iota // somebody waits for the bytes
	Ahead               // somebody may want them later
	classes
)

func (c Class) String() string {
	if c == Ahead {
		return "ahead"
	}
	return "demand"
}

// Read asks for a range of a file.
type Read struct {
	File   *File
	Offset int64 // bytes; any alignment
	Bytes  int64 // any number that fits File and Into
	Into   *Buffer
	Class  Class

	// Done gets nil when Into holds exactly the bytes asked for, else an [*Error].
	// It may submit other reads. [Set.Read] sets it.
	Done func(error)
}

// Ticket is a submitted read.
type Ticket struct {
	r         Read // its class is guarded by the device's mutex
	submitted time.Time
	unhook    func() bool // from the context

	stop atomic.Pointer[error] // why to end between two calls

	// Below: guarded by the device's mutex.
	state   state
	cause   error // cancelled before it was queued
	elem    *list.Element
	started time.Time
	left    float64 // bytes of a read in flight that are expected to be still to come
	alone   bool    // no other read was in flight beside it so far
	timer   *time.Timer
	hold    *descriptor
	before  float64         // bytes in flight when a read from a remote began, its own included
	ctx     context.Context // of a read from a remote, which abort ends
	abort   context.CancelFunc
}

type state uint8

const (
	fresh state = iota
	queued
	active
	stalled // reported as failed, its goroutine is still in the kernel
	ended
)

// Promote makes a queued read-ahead a demand read, behind the demand reads already
// queued. A read in flight is not changed by it.
func (t *Ticket) Promote() {
	if t.r.File == nil {
		return
	}
	d := t.r.File.dev
	d.mu.Lock()
	defer d.mu.Unlock()
	if t.state != queued || t.r.Class != Ahead {
		return
	}
	d.unqueue(t)
	t.r.Class = Demand
	d.stats.Promoted++
	d.queue(t)
	d.dispatch()
}

// Cancel ends a queued read with context.Canceled. A read in flight ends at its
// next call, which for all but the largest reads means that it completes; one from a
// remote ends at once.
func (t *Ticket) Cancel() { t.cancel(context.Canceled) }

func (t *Ticket) cancel(why error) {
	if t.r.File == nil {
		return
	}
	d := t.r.File.dev
	d.mu.Lock()
	defer d.mu.Unlock()
	switch t.state {
	case fresh:
		t.cause = why
	case queued:
		d.unqueue(t)
		d.stats.Cancelled++
		t.state = ended
		go t.drop(why)
	case active:
		t.halt(why)
	}
}

// halt ends a read in flight as soon as that can be done.
func (t *Ticket) halt(why error) {
	t.stop.CompareAndSwap(nil, &why)
	if t.abort != nil {
		t.abort()
	}
}

// check refuses a read that cannot be made, before anything is claimed for it.
func (t *Ticket) check(s *Set) error {
	switch {
	case t.r.File == nil || t.r.Into == nil:
		return fmt.Errorf("a read without a file or a buffer: set both")
	case t.r.File.dev.set != s:
		return fmt.Errorf("%s was opened in another set: submit the read there", t.r.File.path)
	case t.r.Class >= classes:
		return fmt.Errorf("class %d does not exist: use Demand or Ahead", t.r.Class)
	case t.r.Offset < 0 || t.r.Bytes < 0:
		return fmt.Errorf("negative offset or length: fix the caller")
	case t.r.Bytes > t.r.Into.room:
		return fmt.Errorf("the buffer has room for %d bytes: use a larger one", t.r.Into.room)
	case t.r.Offset > t.r.File.id.size || t.r.Bytes > t.r.File.id.size-t.r.Offset:
		return fmt.Errorf("%w: it had %d bytes when it was opened: compare it with its index, or fetch it again", ErrTruncated, t.r.File.id.size)
	}
	return nil
}

// reject ends a read that was never admitted.
func (t *Ticket) reject(why error) {
	t.state = ended
	if t.r.Done != nil {
		go t.r.Done(t.fail(why))
	}
}

// drop ends a read that never started.
func (t *Ticket) drop(why error) {
	t.r.Into.release(nil)
	t.settle(t.fail(why))
}

// settle tells the submitter. Everything that the read held was released before.
func (t *Ticket) settle(err error) {
	if t.unhook != nil {
		t.unhook()
	}
	if t.r.Done != nil {
		t.r.Done(err)
	}
	t.r.File.dev.set.pending.Done()
}

func (t *Ticket) fail(why error) error {
	e := &Error{Offset: t.r.Offset, Bytes: t.r.Bytes, Err: why}
	if t.r.File != nil {
		e.Device, e.Path = t.r.File.dev.name, t.r.File.path
	}
	return e
}

// run reads. It returns the bytes that came off the drive and the part of the
// buffer's memory that holds the bytes asked for.
func (t *Ticket) run() (physical int64, view []byte, err error) {
	f, s := t.r.File, t.r.File.dev.set
	for {
		if err := s.fds.fill(t.hold); err != nil {
			return physical, nil, err
		}
		direct := t.hold.direct
		lo, hi := t.r.Offset, t.r.Offset+t.r.Bytes
		if direct {
			lo, hi = lo&^(block-1), (hi+block-1)&^(block-1)
		}
		skip := t.r.Offset - lo
		mem := t.r.Into.mem[:hi-lo]
		n, err := t.transfer(mem, lo, skip+t.r.Bytes)
		physical += n
		switch {
		case err == nil:
			if !direct && !s.o.Buffered {
				t.hold.h.forget(lo, hi-lo)
			}
			return physical, mem[skip : skip+t.r.Bytes : skip+t.r.Bytes], nil
		case !direct || !refusesDirect(err):
			return physical, nil, err
		}
		// The probe went well and this file is refused: it may be compressed or
		// encrypted, and its neighbours not.
		f.dev.except(f, err)
		hold := s.fds.demote(t.hold)
		f.dev.mu.Lock()
		t.hold = hold
		gone := t.state == stalled
		f.dev.mu.Unlock()
		if gone {
			s.fds.detach(hold)
		}
	}
}

// transfer calls until the first need bytes from offset lo on are in mem. A call
// may be short or interrupted, and one that ends beyond the file's end is short.
func (t *Ticket) transfer(mem []byte, lo, need int64) (physical int64, err error) {
	s := t.r.File.dev.set
	unit := int64(1)
	if t.hold.direct {
		unit = block
	}
	for have, idle := int64(0), 0; have < need; {
		if why := t.stop.Load(); why != nil {
			return physical, *why
		}
		at := have &^ (unit - 1) // a call starts on a block, after a short one too
		part := mem[at:]
		part = part[:min(len(part), s.o.most)]
		n, err := t.call(part, lo+at)
		physical += int64(n)
		if at+int64(n) > have {
			have, idle = at+int64(n), 0
			t.timer.Reset(s.allowance(int64(len(mem)) - have))
		} else {
			idle++
		}
		switch {
		case have >= need:
		case err != nil && !interrupted(err):
			if t.hold.direct && refusesDirect(err) {
				return physical, err
			}
			return physical, t.diagnose(err, lo+have)
		case err == nil && idle > 0, idle == 100:
			return physical, t.diagnose(err, lo+have)
		}
	}
	return physical, nil
}

// call makes one call, at the pace of a paced device.
func (t *Ticket) call(p []byte, off int64) (int, error) {
	d := t.r.File.dev
	if d.pace != nil {
		defer d.pace.reserve(len(p)).wait()
	}
	if fault := d.set.o.Fault; fault != nil {
		if err := fault(t.r.File.path, off, len(p)); err != nil {
			return 0, err
		}
	}
	return d.set.pread(t.hold.h, p, off)
}

// diagnose explains why bytes from end on did not come.
func (t *Ticket) diagnose(err error, end int64) error {
	if id, serr := t.hold.h.stat(); serr == nil && id.size < t.r.Offset+t.r.Bytes {
		return fmt.Errorf("%w: it had %d bytes when it was opened and has %d now, %d bytes of this read are missing: fetch it again",
			ErrTruncated, t.r.File.id.size, id.size, t.r.Offset+t.r.Bytes-max(id.size, t.r.Offset))
	}
	if err == nil {
		return fmt.Errorf("no bytes come at byte %d: check the drive that holds %s", end, t.r.File.dev.name)
	}
	return fmt.Errorf("%w at byte %d: check the drive that holds %s, or run without it", err, end, t.r.File.dev.name)
}

// allowance is how long a call may take that has n bytes to read.
func (s *Set) allowance(n int64) time.Duration {
	return s.o.Deadline + seconds(float64(min(n, int64(s.o.most)))/slowest)
}

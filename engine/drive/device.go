package drive

import (
	"container/list"
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"sync"
	"time"
)

// Device is one drive as far as it can be told apart: one file system, one paced
// directory, or one [Remote]. Two partitions of a drive are two devices.
type Device struct {
	set   *Set
	key   deviceKey
	name  string
	pace  *pacer
	depth int // reads in flight

	probing sync.Mutex

	mu       sync.Mutex
	waiting  [classes]list.List // of *Ticket
	backlog  [classes]int64     // bytes waiting
	flight   []*Ticket          // active
	ahead    int                // of them ahead
	stuck    int                // stalled: they hold their slot until the kernel lets go
	err      error              // why it was given up
	meter    meter
	stats    Stats
	probed   bool
	direct   bool
	mode     string // how it is read
	excepted int    // times that a file was refused direct reads
}

type deviceKey struct {
	dev    uint64
	pace   string
	remote string
}

// Stats is the account of a device since its set was made.
type Stats struct {
	Demand, Ahead Account

	Busy    time.Duration // at least one read in flight
	Rate    float64       // bytes per second while busy, recent; a guess before the first reads
	Latency time.Duration // of a read that is alone, beyond what its bytes explain

	Errors    int64 // reads that failed, other than those below
	Stalls    int64
	Cancelled int64 // ended before they began or between two calls
	Promoted  int64
	Discarded int64 // bytes that came off the drive for reads that did not complete
	Stuck     int   // stalled reads that the kernel still holds, with their buffers

	Direct bool
	Mode   string // how it is read, and why so
	Failed error  // why it was given up, or nil
}

// Account counts completed reads of one class. A promoted read counts as demand.
type Account struct {
	Reads   int64
	Bytes   int64         // asked for and delivered
	Extra   int64         // read beside them to fill blocks
	Wait    time.Duration // sum over reads: in the queue
	Service time.Duration // sum over reads: in flight
}

func newDevice(s *Set, key deviceKey, name string) *Device {
	d := &Device{set: s, key: key, name: name, pace: s.paces[key.pace], depth: s.o.Depth, mode: "not read yet"}
	d.meter.seed(time.Now(), guess)
	if d.Remote() {
		d.depth, d.mode = remoteDepth, "over the network"
		d.meter.seed(time.Now(), remoteGuess)
	}
	return d
}

// Name is a directory on the device: the paced one, or that of the first file.
func (d *Device) Name() string { return d.name }

// Alive reports whether reads may be sent to the device.
func (d *Device) Alive() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.err == nil
}

// Fail gives the device up: queued and later reads end with [ErrFailed], those in
// flight complete. The first reason is kept.
func (d *Device) Fail(why error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.fail(fmt.Errorf("%w: %s: %w", ErrFailed, d.name, why))
}

func (d *Device) fail(err error) {
	if d.err != nil {
		return
	}
	d.err = err
	var dropped []*Ticket
	for c := range d.waiting {
		for e := d.waiting[c].Front(); e != nil; e = d.waiting[c].Front() {
			t := e.Value.(*Ticket)
			d.unqueue(t)
			t.state = ended
			dropped = append(dropped, t)
		}
	}
	d.stats.Cancelled += int64(len(dropped))
	if len(dropped) > 0 {
		go func() {
			for _, t := range dropped {
				t.drop(err)
			}
		}()
	}
}

// close drops the queue and lets reads in flight end at their next call.
func (d *Device) close() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.fail(ErrClosed)
	for _, t := range d.flight {
		t.halt(ErrClosed)
	}
}

// Expect estimates when a new read of n bytes would be complete: what is in flight
// and queued before it, at the measured rate, and a read's latency. A device that
// was given up is expected to take for ever.
func (d *Device) Expect(c Class, n int64) time.Duration {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.err != nil {
		return math.MaxInt64
	}
	d.advance(time.Now())
	bytes := float64(n + d.backlog[Demand])
	if c == Ahead {
		bytes += float64(d.backlog[Ahead])
	}
	for _, t := range d.flight {
		bytes += t.left
	}
	return d.meter.latency() + d.meter.duration(bytes)
}

// Stats returns the account so far.
func (d *Device) Stats() Stats {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.advance(time.Now())
	s := d.stats
	s.Rate, s.Latency = d.meter.rate(), d.meter.latency()
	s.Stuck = d.stuck
	s.Direct, s.Mode, s.Failed = d.direct, d.mode, d.err
	return s
}

func (d *Device) enqueue(t *Ticket) {
	d.mu.Lock()
	defer d.mu.Unlock()
	why := t.cause
	if why == nil {
		why = d.err
	}
	if why != nil {
		t.state = ended
		d.stats.Cancelled++
		go t.drop(why)
		return
	}
	d.queue(t)
	d.dispatch()
}

func (d *Device) queue(t *Ticket) {
	t.state = queued
	t.elem = d.waiting[t.r.Class].PushBack(t)
	d.backlog[t.r.Class] += t.r.Bytes
}

func (d *Device) unqueue(t *Ticket) {
	d.waiting[t.r.Class].Remove(t.elem)
	t.elem = nil
	d.backlog[t.r.Class] -= t.r.Bytes
}

// dispatch starts what may start.
func (d *Device) dispatch() {
	for len(d.flight)+d.stuck < d.depth {
		e := d.waiting[Demand].Front()
		if e == nil && d.ahead < max(d.depth-1, 1) {
			e = d.waiting[Ahead].Front()
		}
		if e == nil {
			return
		}
		t := e.Value.(*Ticket)
		d.unqueue(t)
		now := time.Now()
		d.advance(now)
		t.state, t.started, t.left = active, now, float64(t.r.Bytes)
		if d.Remote() {
			t.before = t.left
			for _, o := range d.flight {
				t.before += o.left
			}
			t.ctx, t.abort = context.WithCancel(context.Background())
		}
		t.alone = len(d.flight) == 0
		for _, o := range d.flight {
			o.alone = false
		}
		d.flight = append(d.flight, t)
		if t.r.Class == Ahead {
			d.ahead++
		}
		go d.serve(t)
	}
}

// serve makes one read. The order at its end matters: descriptor, account, buffer
// and slot are released before the submitter is told, who may use them at once.
func (d *Device) serve(t *Ticket) {
	var physical int64
	var view []byte
	var err error
	if d.Remote() {
		physical, view, err = t.fetch()
		t.abort()
	} else {
		fds := d.set.fds
		hold := fds.reserve(t.r.File)
		d.mu.Lock()
		t.hold = hold
		t.timer = time.AfterFunc(d.set.allowance(t.r.Bytes), func() { d.stall(t) })
		d.mu.Unlock()
		physical, view, err = t.run()
		t.timer.Stop()
		fds.release(t.hold)
	}

	d.mu.Lock()
	if t.state == stalled {
		d.stuck--
		d.stats.Discarded += physical
		d.dispatch()
		d.mu.Unlock()
		t.r.Into.abandon()
		return
	}
	now := time.Now()
	d.land(t, now)
	d.meter.account(physical, len(d.flight) == 0)
	if err == nil {
		switch {
		case t.alone:
			d.meter.solo(float64(physical), now.Sub(t.started))
		case d.Remote():
			// Requests overlap so much that hardly one is alone: what the bytes before it do
			// not explain is latency too.
			d.meter.solo(t.before, now.Sub(t.started))
		}
		a := &d.stats.Demand
		if t.r.Class == Ahead {
			a = &d.stats.Ahead
		}
		a.Reads++
		a.Bytes += t.r.Bytes
		a.Extra += physical - t.r.Bytes
		a.Wait += t.started.Sub(t.submitted)
		a.Service += now.Sub(t.started)
	} else {
		d.stats.Discarded += physical
		if why := t.stop.Load(); why != nil && errors.Is(err, *why) {
			d.stats.Cancelled++
		} else {
			d.stats.Errors++
		}
		err = t.fail(err)
	}
	t.state = ended
	t.r.Into.release(view)
	d.dispatch()
	d.mu.Unlock()
	t.settle(err)
}

// stall gives up waiting for a read. Its goroutine stays in the kernel and keeps
// the buffer, the descriptor and the slot. A drive whose every slot is stuck
// serves nobody any more.
func (d *Device) stall(t *Ticket) {
	d.mu.Lock()
	if t.state != active {
		d.mu.Unlock()
		return
	}
	t.stop.CompareAndSwap(nil, &ErrStalled)
	d.land(t, time.Now())
	d.meter.account(0, len(d.flight) == 0)
	t.state = stalled
	d.stuck++
	d.stats.Stalls++
	why := fmt.Errorf("%w: %s was silent for more than %s: check that drive, or run without it", ErrStalled, d.name, d.set.o.Deadline)
	t.r.Into.poison()
	d.set.fds.detach(t.hold)
	if d.stuck >= d.depth {
		d.fail(fmt.Errorf("%w: %w", ErrFailed, why))
	}
	d.mu.Unlock()
	t.settle(t.fail(why))
}

// advance accounts for the time since the last event and credits the reads in
// flight with the progress that they should have made together.
func (d *Device) advance(now time.Time) {
	dt := d.meter.tick(now, len(d.flight) > 0)
	if len(d.flight) == 0 {
		return
	}
	d.stats.Busy += dt
	share := dt.Seconds() * d.meter.rate() / float64(len(d.flight))
	for _, t := range d.flight {
		t.left = max(t.left-share, 0)
	}
}

// land takes a read out of flight. A drive may serve its reads one by one or all
// at once: what the credit had wrong for this one is put right on the others.
func (d *Device) land(t *Ticket, now time.Time) {
	d.advance(now)
	d.flight = slices.DeleteFunc(d.flight, func(o *Ticket) bool { return o == t })
	if t.r.Class == Ahead {
		d.ahead--
	}
	for _, o := range d.flight {
		o.left = min(o.left+t.left/float64(len(d.flight)), float64(o.r.Bytes))
	}
}

// probe finds out once how the device can be read, with f as the example.
func (d *Device) probe(f *File) error {
	d.probing.Lock()
	defer d.probing.Unlock()
	d.mu.Lock()
	probed := d.probed
	d.mu.Unlock()
	if probed {
		return nil
	}
	direct, mode := false, "buffered: as asked"
	if !d.set.o.Buffered {
		refusal, err := f.tryDirect(d.set.o.Fault)
		switch {
		case err != nil:
			return fmt.Errorf("reading its first block: %w: check the drive that holds %s", err, d.name)
		case refusal == "":
			direct, mode = true, fmt.Sprintf("direct, in blocks of %d bytes", block)
		default:
			mode = "buffered: " + refusal
			d.set.o.Warn(fmt.Sprintf(fallback, d.name, refusal))
		}
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.probed, d.direct, d.mode = true, direct, mode
	return nil
}

const fallback = "%s: no direct I/O (%s): reads go through the page cache, slower and at the cost of memory: move the files to a local file system such as ext4, XFS, APFS or NTFS"

// except notes a file that is refused direct I/O on a device that has it.
func (d *Device) except(f *File, why error) {
	d.mu.Lock()
	d.excepted++
	first := d.excepted == 1
	d.mode = fmt.Sprintf("direct, in blocks of %d bytes; %d times a file was refused it, last %s: %v", block, d.excepted, f.path, why)
	d.mu.Unlock()
	if first {
		d.set.o.Warn(fmt.Sprintf(fallback, f.path, why))
	}
}

func (d *Device) isDirect() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.direct
}

package spine

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"math"
	"slices"
	"time"

	"deltafin/engine/drive"
	"deltafin/engine/kernel"
)

// together is how many pieces are read ahead at once; a drive reads no more of them.
const together = 3

var errClosed = errors.New("the dense weights are closed")

// fill is a piece in memory, or on its way there. Its fields are guarded by
// Spine.mu, but for data and scale, which belong to the reader until it is ready.
type fill struct {
	p       *piece
	bufs    []*drive.Buffer // one per run
	tickets []*drive.Ticket
	left    int  // reads not done
	ahead   bool // its reading began before the pass asked for it, and it was not used yet
	asked   bool // the pass waits for it
	ready   bool
	bound   bool // the model's matrices point to it
	held    bool // by the pass
	dropped bool // nobody wants it; its memory is freed when its reads are done
	err     error

	data  [][]byte // per tensor
	scale [][]float32
}

// acquire waits until p is in memory and gives it to the pass. If p streams, it stays until
// release. The context ends the wait and not the reads: the next pass will want them.
func (s *Spine) acquire(ctx context.Context, p *piece) error {
	stop := context.AfterFunc(ctx, func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.cond.Broadcast()
	})
	defer stop()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.follow(p)
	s.want = p
	defer func() { s.want = nil }()
	var began time.Time
	for {
		switch f := p.fill; {
		case s.closed:
			return errClosed
		case ctx.Err() != nil:
			return ctx.Err()
		case f == nil:
			if p.resident {
				s.start(p, drive.Demand)
			} else {
				s.next = p.index
				s.pump()
			}
		case f.err != nil:
			s.drop(f)
			return fmt.Errorf("%s: %w", p.name, f.err)
		case f.ready:
			if !began.IsZero() {
				took := time.Since(began)
				p.stats.Waits, p.stats.Wait = p.stats.Waits+1, p.stats.Wait+took
				s.total.Waits, s.total.Wait = s.total.Waits+1, s.total.Wait+took
			}
			f.held, f.ahead = true, false
			f.bind()
			s.pump()
			return nil
		case !f.asked:
			f.asked = true
			for _, t := range f.tickets {
				t.Promote()
			}
		}
		if began.IsZero() {
			began = time.Now()
		}
		if f := p.fill; f == nil || f.err == nil { // else it was refused at once
			s.cond.Wait()
		}
	}
}

// release takes p back from the pass. Its memory may be overwritten from here on.
func (s *Spine) release(p *piece) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f := p.fill
	if f == nil || !f.held {
		return
	}
	f.held = false
	if !p.resident {
		s.drop(f)
	}
	s.pump()
	s.cond.Broadcast()
}

// follow gives up what was read ahead and the pass has passed by: one that fails or
// needs no logits ends early, and the next one begins at the beginning.
func (s *Spine) follow(p *piece) {
	if p.index < 0 {
		return
	}
	n, at := len(s.plan.pieces), -1
	for i := range n {
		if x := s.plan.pieces[(p.index+i)%n]; !x.resident {
			at = slices.Index(s.queue, x.fill)
			break
		}
	}
	if at < 0 {
		at = len(s.queue)
		s.next = p.index
	}
	for _, f := range slices.Clone(s.queue[:at]) {
		if !f.held {
			s.drop(f)
		}
	}
}

// pump starts to read what comes next, as far as memory and the switch allow.
func (s *Spine) pump() {
	for range s.plan.pieces {
		p := s.plan.pieces[s.next]
		wanted := p == s.want
		if s.closed || !wanted && (!ahead.On() || s.busy >= together) {
			return
		}
		switch {
		case p.fill != nil:
			if !p.resident {
				return // around once
			}
		case !p.resident && slices.ContainsFunc(s.queue, func(f *fill) bool { return f.err != nil }):
			return
		default:
			class := drive.Ahead
			if wanted {
				class = drive.Demand
			}
			if !s.start(p, class) {
				return
			}
		}
		s.next = (s.next + 1) % len(s.plan.pieces)
	}
}

// start begins to read p. It reports whether there was memory for it.
func (s *Spine) start(p *piece, class drive.Class) bool {
	bufs, err := s.buffers(p)
	if bufs == nil && err == nil {
		return false
	}
	f := &fill{p: p, bufs: bufs, left: len(bufs), ahead: class == drive.Ahead, asked: class == drive.Demand, err: err}
	p.fill = f
	if !p.resident {
		s.queue = append(s.queue, f)
	}
	if err != nil {
		return true
	}
	s.busy++
	s.reading.Add(1)
	for i, r := range p.runs {
		f.tickets = append(f.tickets, s.drives.Submit(s.ctx, drive.Read{
			File: s.files[r.file], Offset: r.off, Bytes: r.n, Into: bufs[i], Class: class,
			Done: func(err error) { s.arrived(f, err) },
		}))
	}
	return true
}

// arrived notes that a read of f is done, and makes f ready after the last.
func (s *Spine) arrived(f *fill, err error) {
	s.mu.Lock()
	if err != nil && f.err == nil {
		f.err = err
		for _, t := range f.tickets {
			t.Cancel()
		}
	}
	f.left--
	if f.left > 0 {
		s.mu.Unlock()
		return
	}
	spoilt := f.err != nil
	if !spoilt && !f.dropped {
		s.mu.Unlock()
		err := f.decode(s.plan)
		s.mu.Lock()
		f.err = err
	}
	s.busy--
	f.ready = f.err == nil
	if !spoilt {
		f.p.stats.Reads++
		if f.ahead {
			s.total.Ahead += f.p.bytes
		} else {
			s.total.Demand += f.p.bytes
		}
	}
	if f.dropped || f.err != nil {
		s.recycle(f, !spoilt)
	}
	s.pump()
	s.cond.Broadcast()
	s.mu.Unlock()
	s.reading.Done()
}

// drop gives f up.
func (s *Spine) drop(f *fill) {
	f.dropped = true
	f.p.fill = nil
	if f.bound {
		f.unbind()
	}
	s.queue = slices.DeleteFunc(s.queue, func(q *fill) bool { return q == f })
	if f.left > 0 {
		for _, t := range f.tickets {
			t.Cancel()
		}
	} else if f.ready {
		s.recycle(f, true)
	}
}

// recycle frees the memory of f. complete says that all of it was read.
func (s *Spine) recycle(f *fill, complete bool) {
	if f.ahead && complete && f.dropped {
		s.total.Wasted += f.p.bytes
	}
	for i, d := range f.data {
		if s.poison && !f.p.tensors[i].inPlace() {
			spoil(d)
		}
	}
	for _, b := range f.bufs {
		if s.poison {
			spoil(b.Bytes())
		}
		s.giveBack(b, f.p.resident)
	}
	f.bufs, f.data, f.scale = nil, nil, nil
}

const nans = "\xff\xff\xff\xff"

// spoil overwrites memory with what is a NaN in every float format.
func spoil(b []byte) {
	for n := copy(b, nans); n < len(b); n *= 2 {
		copy(b[n:], b[:n])
	}
}

// buffers returns one buffer per run of p, or nil if the ring has no room now.
func (s *Spine) buffers(p *piece) ([]*drive.Buffer, error) {
	bufs, err := s.tryBuffers(p)
	if bufs == nil && err == nil && s.held > 0 && s.held == s.idle {
		// All is free, and of the wrong sizes.
		for len(s.free) > 0 {
			s.shrink()
		}
		bufs, err = s.tryBuffers(p)
	}
	return bufs, err
}

func (s *Spine) tryBuffers(p *piece) (bufs []*drive.Buffer, err error) {
	room := s.ring - p.need
	for _, r := range p.runs {
		room += footprint(r.n) // leaves what is no buffer: padded copies
	}
	for _, r := range p.runs {
		var b *drive.Buffer
		if p.resident {
			b, err = drive.NewBuffer(r.n)
		} else {
			b, err = s.take(r.n, room)
		}
		if b == nil || err != nil {
			for _, b := range bufs {
				s.giveBack(b, p.resident)
			}
			return nil, err
		}
		bufs = append(bufs, b)
	}
	return bufs, nil
}

// take returns a buffer of the ring for n bytes, or nil. A free one of about the right size is
// best, as new memory has to be cleared by the system.
func (s *Spine) take(n, room int64) (*drive.Buffer, error) {
	best := -1
	for i, b := range s.free {
		if b.Room() >= n && (best < 0 || b.Room() < s.free[best].Room()) {
			best = i
		}
	}
	fits := func() bool { return s.held+footprint(n) <= room }
	if best >= 0 && (s.free[best].Room() <= 2*n || !fits()) {
		b := s.free[best]
		s.free = slices.Delete(s.free, best, best+1)
		s.idle -= b.Allocated()
		return b, nil
	}
	if s.held-s.idle+footprint(n) > room {
		return nil, nil
	}
	for !fits() {
		s.shrink()
	}
	b, err := drive.NewBuffer(n)
	if err != nil {
		return nil, err
	}
	s.held += b.Allocated()
	return b, nil
}

// giveBack returns a buffer to the ring, or frees that of a resident piece.
func (s *Spine) giveBack(b *drive.Buffer, resident bool) {
	switch {
	case resident:
		b.Free()
	case b.Poisoned(): // the drive has it until a stalled read ends
		s.held -= b.Allocated()
	default:
		s.free = append(s.free, b)
		s.idle += b.Allocated()
	}
}

// shrink frees one free buffer.
func (s *Spine) shrink() {
	b := s.free[len(s.free)-1]
	s.free = s.free[:len(s.free)-1]
	s.held -= b.Allocated()
	s.idle -= b.Allocated()
	b.Free()
}

// bytes returns a part of what was read.
func (f *fill) bytes(x extent) []byte {
	for i, r := range f.p.runs {
		if r.file == x.file && r.off <= x.off && x.end() <= r.end() {
			return f.bufs[i].Bytes()[x.off-r.off:][:x.n:x.n]
		}
	}
	panic("spine: " + f.p.name + " was read without a part of it")
}

// decode checks what was read and finds each tensor in it.
func (f *fill) decode(p *plan) error {
	for _, u := range f.p.units {
		if u.checked.Load() {
			continue
		}
		if got := crc32.Checksum(f.bytes(u.at), castagnoli); got != u.crc {
			return fmt.Errorf("%s: %s has the digest %08x, its table says %08x: the file is damaged: %s", p.files[u.at.file], u.name, got, u.crc, repack)
		}
		u.checked.Store(true)
	}
	f.data, f.scale = make([][]byte, len(f.p.tensors)), make([][]float32, len(f.p.tensors))
	for i, t := range f.p.tensors {
		f.data[i] = f.bytes(t.data)
		if !t.inPlace() {
			m, err := kernel.NewMatrix(t.format, t.m.Rows, t.m.Cols, f.data[i], nil)
			if err != nil {
				return fmt.Errorf("tensor %s: %w", t.name, err)
			}
			f.data[i] = m.Data
		}
		if t.scale.n > 0 {
			b := f.bytes(t.scale)
			f.scale[i] = kernel.Floats(t.m.Rows)
			for r := range f.scale[i] {
				f.scale[i][r] = math.Float32frombits(binary.LittleEndian.Uint32(b[4*r:]))
			}
		}
	}
	return nil
}

// inPlace reports whether the stored bytes are what kernels take.
func (t *tensor) inPlace() bool { return t.padded || t.m.Cols == t.m.Stride }

// bind points the model's matrices to f. Without data they fail at once, should
// anyone use them beyond their time.
func (f *fill) bind() {
	if f.bound {
		return
	}
	f.bound = true
	for i, t := range f.p.tensors {
		t.m.Data, t.m.RowScale = f.data[i], f.scale[i]
	}
}

func (f *fill) unbind() {
	f.bound = false
	for _, t := range f.p.tensors {
		t.m.Data, t.m.RowScale = nil, nil
	}
}

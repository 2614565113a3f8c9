package expert

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"math/bits"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"deltafin/engine/checkpoint"
	"deltafin/engine/drive"
)

// load is one expert on its way into a slot, or there.
type load struct {
	layer, id int
	key       int32
	late      bool   // among the last of its layer: worth a split
	tried     uint64 // homes that failed
	err       error  // why it has no slot

	// The reads under way. parts is what each is to bring; fails is written by each
	// before it counts itself off open.
	parts []part
	fails [2]error
	open  atomic.Int32

	// Guarded by Source.mu.
	class    drive.Class
	life     int // counts its issues
	slot     *slot
	tickets  []*drive.Ticket
	ahead    bool // a hint asked for it
	resident bool
	dropped  bool // nobody wants it any more
	there    bool
	used     bool
	ordinal  int64 // in which order it came from a drive; 0 for what was there before it was wanted
	done     func(error)
}

// part is a range of an expert and where it is read.
type part struct {
	place
	from, n int64
	release func() // nil, or to be called when the read has ended
}

// homeState remembers what has failed. Such homes are asked only when no other is
// left: a home with one bad file may be the only one of other experts.
type homeState struct {
	mu      sync.Mutex
	avoid   uint64
	devices map[*drive.Device]bool
	resting map[*drive.Device]*resting // remotes that failed at least once

	reads  int64
	served map[*drive.Device]int64 // the number of the last read that it got
}

// A drive that once looked slow gets no reads, and would look slow for ever. One
// read in so many goes to a drive that had none of them, to look again.
const lookAgain = 1024

// A remote that failed is asked again after a while, each time it fails a longer one.
const (
	restFirst = time.Minute
	restSteps = 6 // doublings
)

type resting struct {
	home  int
	until time.Time
	times int
}

// rest keeps reads from a remote for a while.
func (h *homeState) rest(home int, d *drive.Device, now time.Time) {
	if h.devices[d] {
		return // several reads met one failure
	}
	if h.devices == nil {
		h.devices = map[*drive.Device]bool{}
	}
	if h.resting == nil {
		h.resting = map[*drive.Device]*resting{}
	}
	r := h.resting[d]
	if r == nil {
		r = &resting{home: home}
		h.resting[d] = r
	}
	h.devices[d] = true
	r.until = now.Add(restFirst << min(r.times, restSteps))
	r.times++
}

func (h *homeState) forgive(now time.Time) {
	for d, r := range h.resting {
		if h.devices[d] && now.After(r.until) {
			delete(h.devices, d)
			h.avoid &^= 1 << r.home
		}
	}
}

// overdue returns the place whose drive had no read for a long time, or -1.
func (h *homeState) overdue(ps []place) int {
	for i, p := range ps {
		if h.reads-h.served[p.file.Device()] >= lookAgain {
			return i
		}
	}
	return -1
}

func (h *homeState) serve(p place) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.served == nil {
		h.served = map[*drive.Device]int64{}
	}
	h.reads++
	h.served[p.file.Device()] = h.reads
}

func (s *Source) issueAll(ls []*load) {
	for _, l := range ls {
		s.issue(l)
	}
}

// issue starts the reads of a load that has a slot. The lock must not be held.
func (s *Source) issue(l *load) {
	if l.err != nil {
		s.finish(l, l.err)
		return
	}
	s.mu.Lock()
	class := l.class
	l.life++
	life := l.life
	s.mu.Unlock()
	parts, err := s.choose(l, class)
	if err != nil {
		s.finish(l, err)
		return
	}
	for i, p := range parts {
		if hold := s.cat.homes[p.home].hold; hold != nil {
			parts[i].file, parts[i].release = hold(l.layer, l.id)
		}
	}
	l.parts, l.fails = parts, [2]error{}
	l.open.Store(int32(len(parts)))
	tickets := make([]*drive.Ticket, len(parts))
	for i, p := range parts {
		into := l.slot.main
		if i == 1 {
			into = l.slot.tail
		}
		tickets[i] = s.drives.Submit(context.Background(), drive.Read{
			File: p.file, Offset: p.offset + p.from, Bytes: p.n, Into: into, Class: class,
			Done: func(err error) {
				l.fails[i] = err
				if l.open.Add(-1) == 0 {
					s.landing(l)
				}
			},
		})
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if l.life != life {
		return // it failed already and is tried again
	}
	l.tickets = tickets
	for _, t := range tickets {
		if l.dropped {
			t.Cancel()
		} else if l.class != class {
			t.Promote() // it was adopted meanwhile
		}
	}
}

// choose decides where to read a load.
func (s *Source) choose(l *load, class drive.Class) ([]part, error) {
	all := s.cat.places(l.layer, l.id, l.tried)
	for _, p := range all {
		if p.err != nil {
			s.giveUp(p, p.err, len(all) > 1)
		}
	}
	var ps []place
	s.homes.mu.Lock()
	s.homes.forgive(time.Now())
	for _, avoided := range []bool{false, true} {
		for _, p := range all {
			if p.err == nil && (s.homes.avoid&(1<<p.home) != 0 || s.homes.devices[p.file.Device()]) == avoided {
				ps = append(ps, p)
			}
		}
		if len(ps) > 0 {
			break
		}
	}
	overdue := s.homes.overdue(ps)
	s.homes.mu.Unlock()
	if len(ps) == 0 {
		for _, p := range all {
			if p.err != nil {
				return nil, p.err
			}
		}
		return nil, errors.New("no home has it: name a directory that does")
	}
	whole := func(i int) []part {
		s.homes.serve(ps[i])
		return []part{{place: ps[i], n: s.n}}
	}
	switch {
	case len(ps) == 1 || !balanceHomes.On():
		return whole(0), nil
	case overdue >= 0 && !l.late:
		return whole(overdue), nil
	}
	cs := make([]candidate, len(ps))
	s.mu.Lock()
	for i, p := range ps {
		cs[i].drive = p.file.Device()
		if s.stream != nil {
			cs[i].must = s.stream.must[p.file.Device()]
		}
	}
	s.mu.Unlock()
	if l.late && splitReads.On() && class == drive.Demand && !slices.ContainsFunc(ps, func(p place) bool { return p.file.Device().Remote() }) {
		if a, b, ok := split(class, s.n, cs); ok && s.takeTail(l) {
			cut := s.cat.layout.Parts[checkpoint.W3Packed].Offset
			return []part{{place: ps[a], n: cut}, {place: ps[b], from: cut, n: s.n - cut}}, nil
		}
	}
	return whole(choose(class, s.n, cs)), nil
}

// takeTail gives a load's slot a second buffer, if one is free and the expert is
// not one to keep.
func (s *Source) takeTail(l *load) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.keeps(l) {
		return false
	}
	if n := len(s.tails); n > 0 {
		l.slot.tail = s.tails[n-1]
		s.tails = s.tails[:n-1]
		return true
	}
	if s.tailsMade >= s.tailsMost {
		return false
	}
	b, err := drive.NewBuffer(s.n - s.cat.layout.Parts[checkpoint.W3Packed].Offset)
	if err != nil {
		return false
	}
	s.tailsMade++
	l.slot.tail = b
	return true
}

// landing runs when all reads of a load have ended.
func (s *Source) landing(l *load) {
	for _, p := range l.parts {
		if p.release != nil {
			p.release()
		}
	}
	for i, err := range l.fails[:len(l.parts)] {
		if err == nil {
			continue
		}
		s.mu.Lock()
		for j, other := range l.parts {
			if l.fails[j] == nil { // the other part of a split came for nothing
				s.waste(other)
			}
		}
		s.mu.Unlock()
		s.retry(l, l.parts[i], err)
		return
	}
	l.slot.bind(&s.cat.layout)
	if p, err := s.check(l); err != nil {
		s.mu.Lock()
		s.waste(l.parts...)
		s.mu.Unlock()
		s.retry(l, p, err)
		return
	}
	s.finish(l, nil)
}

// check compares what arrived with its digest, where that is known, and looks for
// scales that no weight may have.
func (s *Source) check(l *load) (part, error) {
	if p := l.parts[0]; s.cat.homes[p.home].sum != nil {
		if want := s.cat.homes[p.home].sum(l.layer, l.id); want != nil && sha256.Sum256(l.slot.main.Bytes()) != *want {
			return p, fmt.Errorf("%s: layer %d expert %d: arrives with a wrong digest: the copy is damaged, or the server is not to be trusted: stage it again", p.file.Path(), l.layer, l.id)
		}
	}
	for i, scale := range [][]byte{l.slot.e.Gate.Scale, l.slot.e.Down.Scale, l.slot.e.Up.Scale} {
		bad := checkpoint.CheckScales(scale)
		if bad < 0 {
			continue
		}
		p := l.parts[0]
		if w3 := 2; i == w3 {
			p = l.parts[len(l.parts)-1]
		}
		err := s.ck.ScaleError(l.layer, l.id, []int{checkpoint.W1Scale, checkpoint.W2Scale, checkpoint.W3Scale}[i], bad)
		if p.home > 0 {
			err = fmt.Errorf("%s: %w", p.file.Path(), err)
		}
		return p, err
	}
	return part{}, nil
}

// retry reads a load at another home after one has failed, if anybody waits for it.
func (s *Source) retry(l *load, p part, err error) {
	s.mu.Lock()
	l.tickets = nil
	if l.done == nil { // nobody waits yet, and from now on nobody shall
		s.ahead.abandon(l)
	}
	wanted := !l.dropped
	s.mu.Unlock()
	if errors.Is(err, context.Canceled) || errors.Is(err, drive.ErrClosed) {
		s.finish(l, err)
		return
	}
	l.tried |= 1 << p.home
	rest := s.cat.places(l.layer, l.id, l.tried)
	s.giveUp(p.place, err, len(rest) > 0)
	if len(rest) == 0 || !wanted {
		if n := bits.OnesCount64(l.tried); n > 1 {
			err = fmt.Errorf("none of %d homes: %w", n, err)
		}
		s.finish(l, err)
		return
	}
	s.mu.Lock()
	s.untail(l.slot)
	var spoilt error
	if l.slot.main.Poisoned() {
		var sl *slot
		if sl, spoilt = s.newSlot(); spoilt == nil {
			l.slot = sl
		}
	}
	s.mu.Unlock()
	if spoilt != nil {
		s.finish(l, spoilt)
		return
	}
	s.issue(l)
}

// giveUp remembers a failed home, and its drive unless the file alone is to blame,
// and says so once.
func (s *Source) giveUp(p place, err error, others bool) {
	s.homes.mu.Lock()
	h := s.cat.homes[p.home]
	var d *drive.Device
	if p.file != nil {
		d = p.file.Device()
	}
	news := s.homes.avoid&(1<<p.home) == 0 && !s.homes.devices[d]
	s.homes.avoid |= 1 << p.home
	var e *drive.Error
	if d != nil && d.Remote() && errors.As(err, &e) {
		s.homes.rest(p.home, d, time.Now())
	} else if d != nil && errors.As(err, &e) && !errors.Is(err, drive.ErrTruncated) && !errors.Is(err, drive.ErrChanged) {
		if s.homes.devices == nil {
			s.homes.devices = map[*drive.Device]bool{}
		}
		s.homes.devices[d] = true
	}
	s.homes.mu.Unlock()
	if news && others {
		s.o.Warn(fmt.Sprintf("%s: experts are read from their other homes from now on: %v", h, err))
	}
}

// finish ends a load: it is there, or err says why not. Its slot is given back
// before anybody is told.
func (s *Source) finish(l *load, err error) {
	s.mu.Lock()
	l.tickets = nil
	s.flying--
	s.landed.Broadcast()
	var more []*load
	done := l.done
	if err == nil && !l.dropped {
		l.there = true
		if done != nil {
			s.stats.arrivals++
			l.ordinal = s.stats.arrivals
		}
	} else {
		if err == nil {
			s.waste(l.parts...)
			err = context.Canceled
		}
		s.ahead.forget(l)
		if l.slot != nil {
			sl := l.slot
			l.slot = nil
			more = s.giveBack(sl)
		}
	}
	s.mu.Unlock()
	if done != nil {
		if err != nil && !errors.Is(err, context.Canceled) {
			err = fmt.Errorf("layer %d expert %d cannot be read: %w", l.layer, l.id, err)
		}
		done(err)
	}
	s.issueAll(more)
}

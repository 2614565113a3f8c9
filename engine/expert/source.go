// Package expert decides where routed experts come from: which of their homes on
// which drive, memory if they were read before, or a read that was begun before
// anybody knew that they would be needed.
//
//	catalogue.go  what lies where: the checkpoint, and copies in other directories
//	remote.go     homes on the network: what a checkpoint fills with, and web servers
//	packed.go     the format of copies that this package makes
//	balance.go    which home a read goes to
//	source.go     slots of memory, streams of experts, residency
//	read.go       one expert's way from a drive into a slot
//	ahead.go      reads before the route is known
//	stats.go      the account
//	heat.go       how often experts were routed, across runs
//	trace.go      routes of a run, recorded
//	simulate.go   what another cache or placement would have done with a trace
//	place.go      making copies on other drives
//
// None of it changes a result: routes and weights never depend on storage.
package expert

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"strings"
	"sync"
	"time"

	"deltafin/engine/checkpoint"
	"deltafin/engine/drive"
	"deltafin/engine/k3"
	"deltafin/engine/kernel"
	"deltafin/engine/opt"
	"deltafin/prefill"
)

var keep = opt.New("resident-experts", "keep experts that were read in memory while the budget has room", nil)

// Options of a [Source]. Zero values are sensible.
type Options struct {
	Dirs  []string // further homes of experts: directories, or addresses of web servers that serve such
	Slots int      // experts in memory at once besides the resident ones; 0: top-k and a few more; at least 2

	// Resident bytes are for experts that stay in memory once read: those that the heat
	// file ranks first, and as long as there is room any others.
	Resident int64

	Reorder    int // experts that may be used before one with a lower id; 0: 4, 1: none
	AheadSlots int // of Slots, how many read-ahead may hold; 0: half; negative: none; two are always left to demand

	Heat  string       // file of the heat of past runs, updated by Close; empty: none
	Trace io.Writer    // gets the routes that Observe is shown, see [TraceWriter]; nil: none
	Warn  func(string) // gets one line for each home that is given up, and the like; nil logs it
}

// slotsBeyondTopK keep the drives busy while the experts of a token are computed.
const slotsBeyondTopK = 4

// leastSlots: one expert is computed while the next is read.
const leastSlots = 2

func (o *Options) resolve(c *checkpoint.Config) {
	if o.Slots <= 0 {
		o.Slots = c.TopK + slotsBeyondTopK
	}
	o.Slots = max(o.Slots, leastSlots)
	if o.Reorder <= 0 {
		o.Reorder = 4
	}
	if o.AheadSlots == 0 {
		o.AheadSlots = o.Slots / 2
	}
	o.AheadSlots = max(0, min(o.AheadSlots, o.Slots-leastSlots))
	if o.Warn == nil {
		o.Warn = func(line string) { slog.Warn(line) }
	}
}

// SlotBytes is the memory that one expert of ck takes in a slot.
func SlotBytes(ck *checkpoint.Checkpoint) int64 { return bufferBytes(ck.ExpertLayout().ExpertBytes) }

// bufferBytes is the memory of a drive.Buffer with room for n bytes.
func bufferBytes(n int64) int64 { return roundUp(n) + packedBlock }

// Floor is the least memory that a [Source] of ck works with, in bytes.
func Floor(ck *checkpoint.Checkpoint) int64 { return leastSlots * SlotBytes(ck) }

// Memory is the most that the buffers of a [Source] with these options take, in
// bytes, if it reads from so many drives.
func Memory(ck *checkpoint.Checkpoint, o Options, drives int) int64 {
	o.resolve(ck.Config())
	return int64(o.Slots)*SlotBytes(ck) + int64(spares(drives))*bufferBytes(ck.ExpertLayout().ExpertBytes/3) + max(o.Resident, 0)
}

// spares is how many experts may be split over two drives at once.
func spares(drives int) int { return min(max(drives-1, 0), 3) }

// Source streams experts. It implements [k3.Experts]. Streams are for one caller at
// a time; Hint, Observe, Counters and Stats may be called at any time.
type Source struct {
	o      Options
	ck     *checkpoint.Checkpoint
	cat    *catalogue
	drives *drive.Set
	n      int64 // bytes of an expert

	mu       sync.Mutex
	landed   sync.Cond // flying became less
	flying   int       // loads with a read under way
	closed   bool
	counters prefill.Counters

	free        []*slot
	made        int // slots that exist, those of resident experts aside
	tails       []*drive.Buffer
	tailsMade   int
	tailsMost   int
	pending     []*load // demand that waits for a slot
	resident    map[int32]*slot
	residentMem int64
	pinned      map[int32]bool // by heat: for these the room is kept
	unpinned    int64          // bytes that may go to others
	stream      *stream        // the one under way

	ahead ahead
	homes homeState
	stats account
	heat  *Heat
	trace *TraceWriter

	release func(*slot) // tests look at, and spoil, what is given back
}

// Open finds the homes of ck's experts. Those of a directory that fills on demand are
// read from the network as long as they are not here, and then from their file. It reads
// headers and directories only; slots
// are allocated when they are first needed. The drives stay the caller's and must
// outlive the source, as must ck.
func Open(ck *checkpoint.Checkpoint, drives *drive.Set, o Options) (*Source, error) {
	cat, err := openCatalogue(ck, drives, o.Dirs)
	if err != nil {
		return nil, err
	}
	o.resolve(ck.Config())
	for _, h := range cat.homes {
		if h.kind == shardsOverHTTP && strings.HasPrefix(h.dir, "http://") {
			o.Warn(h.dir + ": serves shards without digests over plain HTTP: what comes from there is looked at for impossible scales only; serve packed copies ('deltafin place'), which have digests, or use it in a network that you trust")
		}
	}
	s := &Source{
		o: o, ck: ck, cat: cat, drives: drives, n: cat.layout.ExpertBytes,
		resident: map[int32]*slot{}, unpinned: o.Resident,
		tailsMost: spares(here(drives)),
	}
	s.landed.L = &s.mu
	s.ahead.init(s)
	s.stats.init(cat.layers())
	if o.Heat != "" || o.Trace != nil {
		print, err := Fingerprint(ck)
		if err != nil {
			return nil, err
		}
		if o.Heat != "" {
			s.heat = LoadHeat(o.Heat, ck.Config(), print, o.Warn)
			s.pin()
		}
		if o.Trace != nil {
			if s.trace, err = NewTraceWriter(o.Trace, ck.Config(), print); err != nil {
				return nil, err
			}
		}
	}
	return s, nil
}

// pin chooses the experts for which resident memory is kept.
func (s *Source) pin() {
	s.pinned = map[int32]bool{}
	for _, x := range s.heat.Hottest(int(s.o.Resident / SlotBytes(s.ck))) {
		s.pinned[x] = true
		s.unpinned -= SlotBytes(s.ck)
	}
}

// here is how many drives are of this machine.
func here(drives *drive.Set) int {
	n := 0
	for _, d := range drives.Devices() {
		if !d.Remote() {
			n++
		}
	}
	return n
}

// Close ends what is read ahead, frees all memory, and saves the heat. No stream may
// be under way. Its error is that of the heat file or of the trace.
func (s *Source) Close() error {
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return nil
	}
	s.closed = true
	s.ahead.dropAll(-1)
	for s.flying > 0 {
		s.landed.Wait()
	}
	for _, sl := range s.resident {
		s.free = append(s.free, sl)
	}
	for _, sl := range s.free {
		sl.main.Free()
	}
	for _, b := range s.tails {
		b.Free()
	}
	s.free, s.tails, s.resident, s.residentMem = nil, nil, nil, 0
	s.mu.Unlock()
	var errs []error
	if s.heat != nil && s.heat.changed {
		errs = append(errs, s.heat.Save(s.o.Heat))
	}
	if s.trace != nil {
		errs = append(errs, s.trace.Close())
	}
	return errors.Join(errs...)
}

// Counters accounts for all streams so far, exactly at any time.
func (s *Source) Counters() prefill.Counters {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.counters
}

// Observe is told the routes of a layer of a pass, top-k ids per row in ascending
// order, as [k3.Model.ObserveRoutes] gives them. Heat and trace are made of it.
func (s *Source) Observe(layer int, ids []int32, _ []float32) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.heat != nil {
		s.heat.Observe(layer, ids)
	}
	if s.trace != nil {
		if err := s.trace.Write(layer, ids); err != nil {
			_ = s.trace.Close()
			s.trace = nil
			s.o.Warn(fmt.Sprintf("the trace ends here: %v: look at where it is written to", err))
		}
	}
}

// slot is memory for one expert and the expert that is in it.
type slot struct {
	main *drive.Buffer
	tail *drive.Buffer // the last third, if two drives gave the expert
	e    k3.Expert
}

func (s *Source) newSlot() (*slot, error) {
	b, err := drive.NewBuffer(s.n)
	if err != nil {
		return nil, err
	}
	sl := &slot{main: b}
	for _, m := range []struct {
		m *kernel.Matrix
		p int
	}{{&sl.e.Gate, checkpoint.W1Packed}, {&sl.e.Down, checkpoint.W2Packed}, {&sl.e.Up, checkpoint.W3Packed}} {
		p := s.cat.layout.Parts[m.p]
		*m.m = kernel.Matrix{Format: kernel.MXFP4, Rows: p.Rows, Cols: 2 * p.Cols, Stride: 2 * p.Cols}
	}
	return sl, nil
}

// bind points the expert of a slot at the bytes that arrived. They may lie at
// another place of the buffer each time.
func (sl *slot) bind(l *checkpoint.ExpertLayout) {
	main, tail := sl.main.Bytes(), []byte(nil)
	cut := l.ExpertBytes
	if sl.tail != nil {
		tail, cut = sl.tail.Bytes(), l.Parts[checkpoint.W3Packed].Offset
	}
	part := func(i int) []byte {
		p := l.Parts[i]
		if p.Offset >= cut {
			return tail[p.Offset-cut:][:p.Bytes:p.Bytes]
		}
		return main[p.Offset:][:p.Bytes:p.Bytes]
	}
	sl.e.Gate.Data, sl.e.Gate.Scale = part(checkpoint.W1Packed), part(checkpoint.W1Scale)
	sl.e.Down.Data, sl.e.Down.Scale = part(checkpoint.W2Packed), part(checkpoint.W2Scale)
	sl.e.Up.Data, sl.e.Up.Scale = part(checkpoint.W3Packed), part(checkpoint.W3Scale)
}

// takeSlot returns a slot that nobody uses, or nil if there is none now.
func (s *Source) takeSlot() (*slot, error) {
	if n := len(s.free); n > 0 {
		sl := s.free[n-1]
		s.free = s.free[:n-1]
		return sl, nil
	}
	if s.made >= s.o.Slots {
		return nil, nil
	}
	sl, err := s.newSlot()
	if err == nil {
		s.made++
	}
	return sl, err
}

// room is how many slots takeSlot could still give.
func (s *Source) room() int { return len(s.free) + s.o.Slots - s.made }

// giveBack takes a slot out of use and hands it to whoever waits for one. The loads
// that it returns can start; the caller issues them when it has unlocked.
func (s *Source) giveBack(sl *slot) []*load {
	s.shelve(sl)
	return s.next()
}

func (s *Source) shelve(sl *slot) {
	if s.release != nil {
		s.release(sl)
	}
	s.untail(sl)
	if sl.main.Poisoned() {
		s.made-- // a stalled read took it along
	} else {
		s.free = append(s.free, sl)
	}
}

// untail takes a slot's second buffer away.
func (s *Source) untail(sl *slot) {
	switch {
	case sl.tail == nil:
	case sl.tail.Poisoned():
		s.tailsMade--
	default:
		s.tails = append(s.tails, sl.tail)
	}
	sl.tail = nil
}

// next gives free slots to what waits for them, demand first.
func (s *Source) next() []*load {
	var ready []*load
	for len(s.pending) > 0 {
		l := s.pending[0]
		sl, err := s.takeSlot()
		if sl == nil && err == nil {
			return ready
		}
		s.pending = s.pending[1:]
		l.slot, l.err = sl, err
		s.flying++
		ready = append(ready, l)
	}
	return append(ready, s.ahead.fill()...)
}

// stream is one call of Stream.
type stream struct {
	s       *Source
	layer   int
	ids     []int32
	uses    []*load // what use i has in hand
	unborn  int     // experts that were not started
	stopped bool
	only    []*drive.Device         // the drive that alone can give an expert, or nil
	must    map[*drive.Device]int64 // bytes of such experts that were not started
	last    *load                   // the last one that arrived from a drive
	inUse   time.Duration           // that the caller worked
}

// Stream calls use once for each of ids, which are ascending, one call at a time, and
// idle while there is nothing to use. It returns when no read writes into its slots any more. An expert that no home can
// give is an error that names it, the file and the drive.
func (s *Source) Stream(ctx context.Context, layer int, ids []int32, use func(i int, e *k3.Expert) error, idle func() bool) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	begin := time.Now()
	st := &stream{s: s, layer: layer, ids: ids, uses: make([]*load, len(ids)), unborn: len(ids)}
	st.only, st.must = s.musts(layer, ids)
	s.mu.Lock()
	if s.closed || s.stream != nil {
		defer s.mu.Unlock()
		if s.closed {
			return errors.New("the experts are closed: open the model again")
		}
		panic("expert: two streams at once")
	}
	s.stream = st
	window := s.o.Slots
	for _, id := range ids {
		if s.resident[s.cat.index(layer, int(id))] != nil {
			window++ // it needs no slot
		}
	}
	more := s.ahead.meet(layer, ids)
	s.mu.Unlock()
	s.issueAll(more)

	p := prefill.Pipeline{Window: window, Reorder: s.o.Reorder}
	if idle != nil {
		p.Idle = func() bool {
			begin := time.Now()
			defer func() { st.inUse += time.Since(begin) }()
			return idle()
		}
	}
	err := p.Run(ctx, len(ids), st.start, func(i int) error { return st.use(i, use) }, st.stop)

	s.mu.Lock()
	s.stream, more = nil, nil
	for _, l := range st.uses {
		if l != nil && l.there && !l.used && !l.resident { // it landed, and then something went wrong
			s.waste(l.parts...)
			more = append(more, s.giveBack(l.slot)...)
		}
	}
	if err != nil {
		s.ahead.dropAll(-1)
	} else {
		s.ahead.dropAll(layer)
	}
	more = append(more, s.next()...)
	s.stats.layer(layer-s.cat.first, time.Since(begin)-st.inUse, st.last)
	s.mu.Unlock()
	s.issueAll(more)
	return err
}

// start has expert i delivered: from memory, from a read that is already under way,
// or from a new one.
func (st *stream) start(i int, done func(error)) {
	s, id := st.s, st.ids[i]
	key := s.cat.index(st.layer, int(id))
	s.mu.Lock()
	st.unborn--
	if d := st.only[i]; d != nil {
		st.must[d] -= s.n
	}
	if sl := s.resident[key]; sl != nil && keep.On() {
		st.uses[i] = &load{key: key, slot: sl, there: true, resident: true}
		more := s.next()
		s.mu.Unlock()
		s.issueAll(more)
		done(nil)
		return
	}
	l := s.ahead.adopt(key)
	if l != nil {
		st.uses[i] = l
		if l.there {
			more := s.next()
			s.mu.Unlock()
			s.issueAll(more)
			done(nil)
			return
		}
		l.done = done
		for _, t := range l.tickets {
			t.Promote()
		}
		l.class = drive.Demand
		s.mu.Unlock()
		return
	}
	l = &load{layer: st.layer, id: int(id), key: key, done: done, late: st.unborn < s.tailsMost}
	st.uses[i] = l
	if st.stopped {
		s.mu.Unlock()
		done(context.Canceled)
		return
	}
	s.pending = append(s.pending, l)
	more := s.next()
	s.mu.Unlock()
	s.issueAll(more)
}

// use lends expert i to the caller's use and gives its slot back.
func (st *stream) use(i int, use func(int, *k3.Expert) error) error {
	s, l := st.s, st.uses[i]
	s.mu.Lock()
	l.used = true
	s.counters.Union += s.n
	if l.resident {
		s.counters.Resident += s.n
	} else {
		s.counters.Read += s.n
		if l.ahead {
			s.counters.Ahead += s.n
		}
		s.stats.used(l)
		if l.ordinal > 0 && (st.last == nil || l.ordinal > st.last.ordinal) {
			st.last = l
		}
	}
	s.mu.Unlock()
	begin := time.Now()
	err := use(i, &l.slot.e)
	st.inUse += time.Since(begin)
	if l.resident {
		return err
	}
	s.mu.Lock()
	var more []*load
	if s.keeps(l) {
		s.resident[l.key] = l.slot
		s.made--
		s.residentMem += l.slot.main.Allocated()
		if !s.pinned[l.key] {
			s.unpinned -= l.slot.main.Allocated()
		}
		more = s.next()
	} else {
		more = s.giveBack(l.slot)
	}
	s.mu.Unlock()
	s.issueAll(more)
	return err
}

// keeps decides whether an expert stays in memory.
func (s *Source) keeps(l *load) bool {
	if !keep.On() || s.o.Resident <= 0 || s.resident[l.key] != nil || l.slot.tail != nil {
		return false
	}
	n := l.slot.main.Allocated()
	return s.residentMem+n <= s.o.Resident && (s.pinned[l.key] || s.unpinned >= n)
}

// stop cancels what the stream has under way. Reads in flight land by themselves.
func (st *stream) stop() {
	s := st.s
	s.mu.Lock()
	st.stopped = true
	waiting := s.pending
	s.pending = nil
	for _, l := range st.uses {
		if l != nil && !l.there {
			l.dropped = true
			for _, t := range l.tickets {
				t.Cancel()
			}
		}
	}
	s.mu.Unlock()
	for _, l := range waiting {
		l.done(context.Canceled)
	}
}

// waste accounts for bytes that were read and are of no use.
func (s *Source) waste(parts ...part) {
	for _, p := range parts {
		s.counters.Read += p.n
		s.counters.Wasted += p.n
		s.stats.wasted(p)
	}
}

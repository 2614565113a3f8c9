package engine

import (
	"errors"
	"fmt"
	"math"
	"sort"
	"strings"

	"deltafin/engine/checkpoint"
	"deltafin/engine/expert"
	"deltafin/engine/k3"
	"deltafin/engine/machine"
	"deltafin/engine/spine"
)

// ErrMemory is wrapped by Open's error when the model needs more memory than it may
// use. The error says how much is needed.
var ErrMemory = errors.New("not enough memory")

// Ledger is where the memory of an engine goes, in bytes. The sum of its parts never
// exceeds Limit.
type Ledger struct {
	Limit    int64 `json:"limit"`
	Runtime  int64 `json:"runtime"`  // the program, its runtime, tables
	State    int64 `json:"state"`    // of one session at Context positions
	Pass     int64 `json:"pass"`     // intermediate values of a pass of PassRows rows
	Slots    int64 `json:"slots"`    // experts on their way
	Spine    int64 `json:"spine"`    // dense weights: resident ones, and the ring that streams the others
	Resident int64 `json:"resident"` // experts that stay
	Reserved int64 `json:"reserved"` // for the caller: a server's kept conversations
	Draft    int64 `json:"draft"`    // proposers, and passes that check their guesses

	PassRows int `json:"pass_rows"`
	Context  int `json:"context"`

	Floor    int64 `json:"floor"`    // the least Limit with which the model runs at this Context
	Streamed int64 `json:"streamed"` // bytes of dense weights that do not stay: every pass reads them
	Experts  int64 `json:"experts"`  // all routed experts as they would lie in memory
}

// String is the ledger in one line.
func (l Ledger) String() string {
	var b strings.Builder
	for _, e := range []struct {
		name  string
		bytes int64
	}{
		{"program", l.Runtime},
		{fmt.Sprintf("state at %d tokens", l.Context), l.State},
		{fmt.Sprintf("pass of %d rows", l.PassRows), l.Pass},
		{"expert slots", l.Slots},
		{"dense weights", l.Spine},
		{"resident experts", l.Resident},
		{"kept conversations", l.Reserved},
		{"drafts", l.Draft},
	} {
		if e.bytes == 0 {
			continue
		}
		fmt.Fprintf(&b, "%s %.2f, ", e.name, float64(e.bytes)/1e9)
	}
	fmt.Fprintf(&b, "of %.2f GB", float64(l.Limit)/1e9)
	return b.String()
}

const (
	// runtimeBytes covers the binary, the Go runtime with its garbage, kernels' scratch and the
	// tables of a checkpoint.
	runtimeBytes = 128 << 20
	// leastRows is what a pass falls back to when memory is short.
	leastRows = 64
	// defaultContext is how many tokens of a session the ledger reserves memory for.
	defaultContext = 4096
	// One part in passShare of what is free beyond the floor may go to a pass: more rows save
	// reads of experts in long prompts, more resident weights save reads in every pass.
	passShare = 8
)

// Account shares the memory out as [Open] does, without reading weights: ck may be a sketch.
// It opens proposers to learn their sizes, and closes them. Its error wraps [ErrMemory] when
// there is too little.
func Account(ck *checkpoint.Checkpoint, o Options) (Ledger, error) {
	e := &Engine{ck: ck}
	e.openProposers(o)
	l, _, _, err := layout(ck, o, e.proposerBytes)
	for _, p := range e.proposers {
		err = errors.Join(err, p.Close())
	}
	return l, err
}

// layout shares the memory out. Nothing below the floor works: the state, a small
// pass, a few slots, and a ring for the dense weights. What is left goes, in this order, to
// slots enough for a token's experts, to proposers, to rows of a pass, to dense weights, to
// experts. Each gets no less when there is more, but where a proposer begins to fit.
func layout(ck *checkpoint.Checkpoint, o Options, draft func(context int, most int64) int64) (Ledger, spine.Options, expert.Options, error) {
	c := ck.Config()
	l := Ledger{Limit: o.Memory, Runtime: runtimeBytes, Context: min(o.Context, c.MaxPositions), Reserved: o.Reserve, Experts: expertBytes(ck)}
	if l.Limit <= 0 {
		l.Limit = machine.AvailableMemory() / 4 * 3
	}
	if l.Context <= 0 {
		l.Context = min(defaultContext, c.MaxPositions)
	}
	x := expert.Options{Dirs: o.ExpertDirs, Slots: 2, Heat: o.Heat, Trace: o.Trace, Warn: o.Warn, Reorder: expertReorder}
	s := spine.Options{Pack: o.SpinePack}
	fail := func(err error) (Ledger, spine.Options, expert.Options, error) { return l, s, x, err }

	drives := 1 + len(o.ExpertDirs)
	most := o.PassRows
	if most <= 0 {
		most = DefaultPassRows
	}
	most = min(most, l.Context)
	pass := func(rows int) int64 { return k3.PassBytes(c, rows, expertReorder) }
	l.State = k3.StateBytes(c, l.Context)
	l.PassRows = min(leastRows, most)
	l.Pass = pass(l.PassRows)
	l.Slots = expert.Memory(ck, x, drives)
	var err error
	if l.Spine, err = spine.Floor(ck, s.Pack); err != nil {
		return fail(err)
	}
	full, err := spine.Full(ck, s)
	if err != nil {
		return fail(err)
	}
	l.Floor = l.Reserved + l.Runtime + l.State + l.Pass + l.Slots + l.Spine
	left := l.Limit - l.Floor
	if left < 0 {
		return fail(fmt.Errorf("%s: %w: it needs %.2f GB with a context of %d tokens, and %.2f GB may be used: free some, or lower the context", ck.Dir(), ErrMemory,
			math.Ceil(float64(l.Floor)/1e7)/100, l.Context, math.Floor(float64(l.Limit)/1e7)/100))
	}
	wanted := o.Slots
	if wanted <= 0 {
		wanted = c.TopK + 8
	}
	for x.Slots < wanted && expert.SlotBytes(ck) <= left {
		x.Slots++
		left -= expert.SlotBytes(ck)
	}
	l.Slots = expert.Memory(ck, x, drives)
	if x.Slots < wanted {
		left = 0 // less than a slot
	}
	l.Draft = draft(l.Context, left)
	left -= l.Draft
	// What rows do not use up of their share is less than a row.
	share := min(left/passShare, pass(most)-l.Pass)
	l.PassRows += sort.Search(most-l.PassRows, func(i int) bool { return pass(l.PassRows+i+1)-l.Pass > share })
	l.Pass = pass(l.PassRows)
	left -= share

	beyond := min(left, full-l.Spine)
	l.Spine += beyond
	left -= beyond
	if l.Spine < full {
		// Routers say what the next layer will likely need; keep them when they are cheap.
		s.KeepRouters = routerBytes(c) < beyond/passShare
	}
	if s, l.Streamed, err = spine.Fit(ck, s, l.Spine); err != nil {
		return fail(err)
	}
	switch {
	case o.ExpertMemory < 0:
	case o.ExpertMemory > 0:
		x.Resident = min(o.ExpertMemory, left)
	default:
		x.Resident = left
	}
	x.Resident = min(x.Resident, l.Experts)
	l.Resident = x.Resident
	return l, s, x, nil
}

// expertReorder is how far the use of experts may run ahead of the lowest missing one.
const expertReorder = 4

func routerBytes(c *checkpoint.Config) int64 {
	return 2 * int64(c.Layers-c.FirstDense) * int64(c.Experts) * int64(c.Hidden)
}

// expertBytes is the size of all routed experts, as they lie in memory.
func expertBytes(ck *checkpoint.Checkpoint) int64 {
	c := ck.Config()
	return int64(c.Layers-c.FirstDense) * int64(c.Experts) * expert.SlotBytes(ck)
}

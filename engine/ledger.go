package engine

import (
	"errors"
	"fmt"
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

// Ledger is where the memory of an engine goes, in bytes. The sum never exceeds
// Limit.
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
	// passShare of what is free beyond the floor may go to a pass: more rows save reads of
	// experts in long prompts, more resident weights save reads in every pass.
	passShare = 8
)

// layout shares the memory out. Nothing below the floor works: the state, a small
// pass, a few slots, and a ring for the dense weights. What is left goes, in this order, to
// slots enough for a token's experts, to rows of a pass, to dense weights, to experts.
func layout(ck *checkpoint.Checkpoint, o Options, draft func(context int, most int64) int64) (Ledger, spine.Options, expert.Options, error) {
	c := ck.Config()
	l := Ledger{Limit: o.Memory, Runtime: runtimeBytes, Context: min(o.Context, c.MaxPositions), Reserved: o.Reserve}
	if l.Limit <= 0 {
		l.Limit = machine.AvailableMemory() / 4 * 3
	}
	if l.Context <= 0 {
		l.Context = min(defaultContext, c.MaxPositions)
	}
	x := expert.Options{Dirs: o.ExpertDirs, Slots: 2, Heat: o.Heat, Trace: o.Trace, Warn: o.Warn}
	s := spine.Options{Pack: o.SpinePack}
	fail := func(err error) (Ledger, spine.Options, expert.Options, error) { return l, s, x, err }

	drives := 1 + len(o.ExpertDirs)
	most := o.PassRows
	if most <= 0 {
		most = DefaultPassRows
	}
	l.State = k3.StateBytes(c, l.Context)
	l.PassRows = min(leastRows, most)
	l.Pass = k3.PassBytes(c, l.PassRows, expertReorder)
	l.Slots = expert.Memory(ck, x, drives)
	floor, err := spine.Floor(ck, s.Pack)
	if err != nil {
		return fail(err)
	}
	full, err := spine.Full(ck, s)
	if err != nil {
		return fail(err)
	}
	floor = min(floor, full)
	left := l.Limit - l.Reserved - l.Runtime - l.State - l.Pass - l.Slots - floor
	if left < 0 {
		return fail(fmt.Errorf("%s: %w: it needs %.2f GB with a context of %d tokens, and %.2f GB may be used: free some, or lower the context", ck.Dir(), ErrMemory,
			float64(l.Limit-left)/1e9, l.Context, float64(l.Limit)/1e9))
	}
	spend := func(part *int64, to int64) {
		left -= to - *part
		*part = to
	}
	wanted := o.Slots
	if wanted <= 0 {
		wanted = c.TopK + 8
	}
	for x.Slots < wanted && expert.SlotBytes(ck) <= left {
		x.Slots++
		spend(&l.Slots, expert.Memory(ck, x, drives))
	}
	spend(&l.Draft, draft(l.Context, left))
	for share := left / passShare; l.PassRows < most; {
		rows := min(2*l.PassRows, most)
		if bytes := k3.PassBytes(c, rows, expertReorder); bytes-l.Pass > share {
			break
		} else {
			share -= bytes - l.Pass
			spend(&l.Pass, bytes)
			l.PassRows = rows
		}
	}
	l.Spine = floor
	spend(&l.Spine, min(floor+left, full))
	if l.Spine < full {
		// Routers say what the next layer will likely need; keep them when they are cheap.
		s.KeepRouters = routerBytes(c) < (l.Spine-floor)/passShare
	}
	if s, err = spine.Fit(ck, s, l.Spine); err != nil {
		return fail(err)
	}
	switch {
	case o.ExpertMemory < 0:
	case o.ExpertMemory > 0:
		x.Resident = min(o.ExpertMemory, left)
	default:
		x.Resident = left
	}
	x.Resident = min(x.Resident, expertBytes(ck))
	l.Resident = x.Resident
	x.Reorder = expertReorder
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

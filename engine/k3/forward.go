package k3

import (
	"context"
	"fmt"
	"slices"
	"time"

	"deltafin/engine/kernel"
)

// Pass says how a forward pass ends.
type Pass struct {
	// Logits is how many of the last rows need logits.
	Logits int
	// Hold keeps the pass uncommitted: [Model.Commit] then takes any prefix of it.
	Hold bool
	// Progress, if set, is called after every layer.
	Progress func(layer int)
	// Watch, if set, is shown the stream [rows][hidden] after every layer. The view is valid
	// during the call.
	Watch func(layer int, stream kernel.Mat)
}

// Forward runs len(ids) rows, the tokens that follow st, through all layers and
// returns the logits [Logits][vocab] of the last rows. They are valid until the
// next pass. On an error, st is unusable, but for two cases: a pass that was to be held
// has changed nothing, and when ctx was cancelled, Forward with the same ids goes on where it
// stopped, if no other pass has run on m in between ([Model.Suspended]).
//
// Rows see each other only through attention and recurrence, in order, so any
// cutting of a sequence into passes gives the same bits.
func (m *Model) Forward(ctx context.Context, st *State, ids []int, pass Pass) (logits kernel.Mat, err error) {
	if err := m.admit(st, ids, pass); err != nil {
		return kernel.Mat{}, err
	}
	if st.cut == nil {
		if st.cut, err = m.begin(ctx, ids, pass); err != nil {
			st.cut = nil // nothing has changed yet
			return kernel.Mat{}, err
		}
	}
	m.cut = nil
	logits, err = m.run(ctx, st, pass)
	switch {
	case err == nil && pass.Hold:
		st.held, st.cut = len(ids), nil
	case err == nil:
		st.pos, st.cut = st.pos+len(ids), nil
	case pass.Hold:
		st.cut = nil
		m.release(st)
	case Cancelled(ctx, err):
		m.cut = st.cut
	}
	return logits, err
}

// begin takes the arena for a pass and fills its stream.
func (m *Model) begin(ctx context.Context, ids []int, pass Pass) (*cut, error) {
	m.cut, m.shown = nil, -1
	logitRows := max(pass.Logits, 1)
	m.arena.reset(int(PassBytes(m.Config, len(ids), 1)/4) + (logitRows-1)*kernel.Pad(m.Config.Vocab))
	last := time.Now()
	p := &cut{ids: slices.Clone(ids), d: m.depth(len(ids))}
	p.mark = m.arena.mark()
	err := m.Spine.Embed(ctx, p.d.stream(), ids)
	clock(&m.times.Embed, &last)
	return p, err
}

// run does what is left of the pass that st is inside.
func (m *Model) run(ctx context.Context, st *State, pass Pass) (kernel.Mat, error) {
	p := st.cut
	d := &p.d
	m.arena.release(p.mark)
	for ; p.done < 2*m.Config.Layers; p.done++ {
		if err := ctx.Err(); err != nil {
			return kernel.Mat{}, err
		}
		l := p.done / 2
		if p.done%2 == 0 {
			if err := m.attention(ctx, l, st, d, pass.Hold); err != nil {
				return kernel.Mat{}, err
			}
			continue
		}
		if err := m.feedForward(ctx, l, d); err != nil {
			return kernel.Mat{}, err
		}
		m.observe(l, "stream", d.stream())
		if pass.Watch != nil {
			pass.Watch(l, d.stream())
		}
		m.layerPasses++
		if pass.Progress != nil {
			pass.Progress(l)
		}
	}
	last := time.Now()
	logits, err := m.head(ctx, d.view(d.rows-pass.Logits, d.rows), st.pos+d.rows)
	clock(&m.times.Head, &last)
	return logits, err
}

// DefaultTileRows is how many rows the dense parts of a layer take at a time. They
// read their weights from memory once per tile, which costs little from about a
// hundred rows on, and their intermediate values are what a pass would otherwise need most memory
// for. Routed experts, whose weights come from drives, always take all rows at once.
const DefaultTileRows = 256

// tiles cuts rows into tiles and calls f with each; memory that f takes from the
// arena is free again after it.
func (m *Model) tiles(rows int, f func(lo, hi int)) {
	step := m.TileRows
	if step == 0 {
		step = DefaultTileRows
	}
	for lo := 0; lo < rows; lo += step {
		at := m.arena.mark()
		f(lo, min(lo+step, rows))
		m.arena.release(at)
	}
}

// depth makes room for the sources of rows rows.
func (m *Model) depth(rows int) depth {
	c := m.Config
	d := depth{rows: rows, hidden: c.Hidden, stride: kernel.Pad(c.Hidden), slots: (c.Layers+c.ResBlock-1)/c.ResBlock + 1, eps: c.Eps}
	d.data = m.arena.floats(rows * d.slots * d.stride)
	if d.hidden != d.stride {
		clear(d.data)
	}
	return d
}

// admit checks what a pass may not assume.
func (m *Model) admit(st *State, ids []int, pass Pass) error {
	switch {
	case len(ids) == 0:
		return fmt.Errorf("a pass needs at least one token")
	case st.held > 0 || st.past > 0:
		return fmt.Errorf("the previous pass has not been committed")
	case st.cut != nil && (st.cut != m.cut || pass.Hold || !slices.Equal(ids, st.cut.ids)):
		return fmt.Errorf("the sequence was cut off inside a pass of %d tokens, and this is not what goes on with it: begin again from an earlier state", len(st.cut.ids))
	case st.pos+len(ids) > m.Config.MaxPositions:
		return fmt.Errorf("%d tokens after %d exceed the context of %d", len(ids), st.pos, m.Config.MaxPositions)
	}
	for i, id := range ids {
		if id < 0 || id >= m.Config.Vocab {
			return fmt.Errorf("token %d at position %d is not in the vocabulary: ids are 0 to %d", id, st.pos+i, m.Config.Vocab-1)
		}
	}
	return nil
}

// attention is steps 1 to 4 of C.5.
func (m *Model) attention(ctx context.Context, l int, st *State, d *depth, hold bool) error {
	w, release, err := m.Spine.Attention(ctx, l)
	if err != nil {
		return err
	}
	defer release()
	restart := l%m.Config.ResBlock == 0
	tile := func(lo, hi int) {
		last, t := time.Now(), d.view(lo, hi)
		x, y := m.arena.mat(t.rows, d.hidden), m.arena.mat(t.rows, d.hidden)
		m.mixNorm(x, &t, w.Res, w.Norm)
		if restart {
			t.bank()
		}
		clock(&m.times.Mix, &last)
		m.observe(l, "attn_in", x)
		if w.KDA != nil {
			m.kda(y, x, w.KDA, &st.kda[l], hold)
			clock(&m.times.KDA, &last)
		} else {
			m.mla(y, x, w.MLA, &st.mla[l])
			clock(&m.times.MLA, &last)
		}
		m.observe(l, "attn_out", y)
		m.join(&t, y, restart)
	}
	if hold { // what is held is one piece
		defer m.arena.release(m.arena.mark())
		tile(0, d.rows)
	} else {
		m.tiles(d.rows, tile)
	}
	if restart {
		d.bank()
	}
	return nil
}

// feedForward is steps 5 to 7 of C.5.
func (m *Model) feedForward(ctx context.Context, l int, d *depth) error {
	w, release, err := m.Spine.FeedForward(ctx, l)
	if err != nil {
		return err
	}
	defer release()
	if w.MoE != nil {
		return m.moe(ctx, l, d, w)
	}
	m.tiles(d.rows, func(lo, hi int) {
		last, t := time.Now(), d.view(lo, hi)
		x, y := m.arena.mat(t.rows, d.hidden), m.arena.mat(t.rows, d.hidden)
		m.mixNorm(x, &t, w.Res, w.Norm)
		clock(&m.times.Mix, &last)
		m.observe(l, "mlp_in", x)
		m.mlp(y, x, w.Dense)
		m.observe(l, "mlp_out", y)
		m.join(&t, y, false)
		clock(&m.times.Dense, &last)
	})
	return nil
}

// join adds y to the stream, or makes it the stream after a bank.
func (m *Model) join(d *depth, y kernel.Mat, restart bool) {
	s := d.stream()
	m.Pool.RunCost(y.Rows, y.Cols, func(_ *kernel.Scratch, r int) {
		if restart {
			copy(s.Row(r), y.Row(r))
		} else {
			kernel.Add(s.Row(r), s.Row(r), y.Row(r))
		}
	})
}

// head is spec C.6 for the rows of d; position is that of the row behind them.
func (m *Model) head(ctx context.Context, d depth, position int) (kernel.Mat, error) {
	if d.rows == 0 {
		return kernel.Mat{}, nil
	}
	w, release, err := m.Spine.Output(ctx)
	if err != nil {
		return kernel.Mat{}, err
	}
	x := m.arena.mat(d.rows, d.hidden)
	m.mixNorm(x, &d, w.Res, w.Norm)
	release()
	logits := m.arena.mat(d.rows, m.Config.Vocab)
	if err := m.Spine.Head(ctx, func(lo int, w *kernel.Matrix) error {
		m.Pool.MatMul(kernel.Job{Y: logits.ColSlice(lo, lo+w.Rows), X: x, W: w})
		return nil
	}); err != nil {
		return kernel.Mat{}, err
	}
	for r := range d.rows {
		if !kernel.Finite(logits.Row(r)) {
			return kernel.Mat{}, fmt.Errorf("the logits of position %d are not finite: the checkpoint is damaged: check its files", position-d.rows+r)
		}
	}
	m.observe(m.Config.Layers, "logits", logits)
	return logits, nil
}

func (m *Model) observe(l int, name string, v kernel.Mat) {
	if m.Observe != nil {
		m.Observe(l, name, v)
	}
}

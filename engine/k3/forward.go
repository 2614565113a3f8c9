package k3

import (
	"context"
	"fmt"
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
}

// Forward runs len(ids) rows, the tokens that follow st, through all layers and
// returns the logits [Logits][vocab] of the last rows. They are valid until the
// next pass. On an error, st is unusable.
//
// Rows see each other only through attention and recurrence, in order, so any
// cutting of a sequence into passes gives the same bits.
func (m *Model) Forward(ctx context.Context, st *State, ids []int, pass Pass) (logits kernel.Mat, err error) {
	c := m.Config
	if err := m.admit(st, ids); err != nil {
		return kernel.Mat{}, err
	}
	m.arena.reset()
	rows, last := len(ids), time.Now()
	d := depth{
		hidden: c.Hidden, stride: kernel.Pad(c.Hidden), slots: (c.Layers+c.ResBlock-1)/c.ResBlock + 1, eps: c.Eps,
	}
	d.data = m.arena.floats(rows * d.slots * d.stride)
	d.inv = m.arena.floats(rows * d.slots)
	if d.hidden != d.stride {
		clear(d.data)
	}
	if err := m.Spine.Embed(ctx, d.stream(rows), ids); err != nil {
		return kernel.Mat{}, err
	}
	clock(&m.times.Embed, &last)

	x, y := m.arena.mat(rows, c.Hidden), m.arena.mat(rows, c.Hidden)
	for l := range c.Layers {
		if err := ctx.Err(); err != nil {
			return kernel.Mat{}, err
		}
		if err := m.layer(ctx, l, st, &d, x, y, pass.Hold); err != nil {
			return kernel.Mat{}, err
		}
		m.passes++
		if pass.Progress != nil {
			pass.Progress(l)
		}
	}
	position := st.pos + rows
	if pass.Hold {
		st.held = rows
	} else {
		st.pos = position
	}

	last = time.Now()
	logits, err = m.head(ctx, &d, x, pass.Logits, position)
	clock(&m.times.Head, &last)
	return logits, err
}

// admit checks what a pass may not assume.
func (m *Model) admit(st *State, ids []int) error {
	switch {
	case len(ids) == 0:
		return fmt.Errorf("a pass needs at least one token")
	case st.held > 0:
		return fmt.Errorf("the previous pass has not been committed")
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

// layer is spec C.5. x and y are [rows][hidden] buffers.
func (m *Model) layer(ctx context.Context, l int, st *State, d *depth, x, y kernel.Mat, hold bool) error {
	if err := m.attention(ctx, l, st, d, x, y, hold); err != nil {
		return err
	}
	if err := m.feedForward(ctx, l, d, x, y); err != nil {
		return err
	}
	m.observe(l, "stream", d.stream(x.Rows))
	return nil
}

// attention is steps 1 to 4 of C.5.
func (m *Model) attention(ctx context.Context, l int, st *State, d *depth, x, y kernel.Mat, hold bool) error {
	w, release, err := m.Spine.Attention(ctx, l)
	if err != nil {
		return err
	}
	defer release()
	defer m.arena.release(m.arena.mark())
	last := time.Now()
	m.mixNorm(x, d, w.Res, w.Norm)
	restart := l%m.Config.ResBlock == 0
	if restart {
		d.bank(m.Pool, x.Rows)
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
	m.join(d, y, restart)
	return nil
}

// feedForward is steps 5 to 7 of C.5.
func (m *Model) feedForward(ctx context.Context, l int, d *depth, x, y kernel.Mat) error {
	w, release, err := m.Spine.FeedForward(ctx, l)
	if err != nil {
		return err
	}
	defer release()
	defer m.arena.release(m.arena.mark())
	last := time.Now()
	m.mixNorm(x, d, w.Res, w.Norm)
	clock(&m.times.Mix, &last)
	m.observe(l, "mlp_in", x)
	if w.Dense != nil {
		m.mlp(y, x, w.Dense)
		clock(&m.times.Dense, &last)
	} else if err := m.moe(ctx, y, x, l, w.MoE, func() { m.hint(l+1, d, x.Rows) }); err != nil {
		return err
	}
	m.observe(l, "mlp_out", y)
	m.join(d, y, false)
	return nil
}

// join adds y to the stream, or makes it the stream after a bank.
func (m *Model) join(d *depth, y kernel.Mat, restart bool) {
	s := d.stream(y.Rows)
	m.Pool.RunCost(y.Rows, y.Cols, func(_ *kernel.Scratch, r int) {
		if restart {
			copy(s.Row(r), y.Row(r))
		} else {
			kernel.Add(s.Row(r), s.Row(r), y.Row(r))
		}
	})
}

// head is spec C.6 for the last n rows; position is that of the row behind them.
func (m *Model) head(ctx context.Context, d *depth, x kernel.Mat, n, position int) (kernel.Mat, error) {
	if n == 0 {
		return kernel.Mat{}, nil
	}
	w, release, err := m.Spine.Output(ctx)
	if err != nil {
		return kernel.Mat{}, err
	}
	skip := x.Rows - n
	x = x.Slice(0, n)
	tail := *d
	tail.data, tail.inv = d.data[skip*d.slots*d.stride:], d.inv[skip*d.slots:]
	m.mixNorm(x, &tail, w.Res, w.Norm)
	release()
	logits := m.arena.mat(n, m.Config.Vocab)
	if err := m.Spine.Head(ctx, func(lo int, w *kernel.Matrix) error {
		m.Pool.MatMul(kernel.Job{Y: logits.ColSlice(lo, lo+w.Rows), X: x, W: w})
		return nil
	}); err != nil {
		return kernel.Mat{}, err
	}
	for r := range n {
		if !kernel.Finite(logits.Row(r)) {
			return kernel.Mat{}, fmt.Errorf("the logits of position %d are not finite: the checkpoint is damaged: check its files", position-n+r)
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

package k3

import (
	"context"
	"slices"
	"time"

	"deltafin/engine/kernel"
	"deltafin/prefill"
)

// MoE is the dense part of a latent mixture of experts (spec B.2, C.11).
type MoE struct {
	Router *kernel.Matrix // gate [experts][hidden]
	Bias   []float32      // e_score_correction_bias [experts], for the choice only
	Down   *kernel.Matrix // routed_expert_down_proj [latent][hidden]
	Norm   []float32      // routed_expert_norm [latent]; nil without latent_moe_use_norm
	Up     *kernel.Matrix // routed_expert_up_proj [hidden][latent]
	Shared MLP
}

// moe adds Up(norm(sum of w[e] * expert[e](Down x))) + shared(x) to the stream, x being
// the mixed and normalised stream (spec C.11). The dense parts go tile by tile, the routed
// experts take all rows at once.
func (m *Model) moe(ctx context.Context, l int, d *depth, ffn *FeedForward) error {
	c, w, rows := m.Config, ffn.MoE, d.rows
	defer m.arena.release(m.arena.mark())
	y, z, sum := m.arena.mat(rows, c.Hidden), m.arena.mat(rows, c.Latent), m.arena.mat(rows, c.Latent)
	ids, weights := make([]int32, rows*c.TopK), make([]float32, rows*c.TopK)
	m.tiles(rows, func(lo, hi int) {
		last, t, x := time.Now(), d.view(lo, hi), y.Slice(lo, hi)
		m.mixNorm(x, &t, ffn.Res, ffn.Norm)
		clock(&m.times.Mix, &last)
		m.observe(l, "mlp_in", x)
		score := m.arena.mat(t.rows, c.Experts)
		m.Pool.MatMul(kernel.Job{Y: score, X: x, W: w.Router}, kernel.Job{Y: z.Slice(lo, hi), X: x, W: w.Down})
		m.route(ids[lo*c.TopK:hi*c.TopK], weights[lo*c.TopK:hi*c.TopK], score, w.Bias)
		clock(&m.times.Router, &last)
	})
	if m.ObserveRoutes != nil && l > m.shown { // once, also when the layer is done again after a cut
		m.shown = l
		m.ObserveRoutes(l, ids, weights)
	}

	// While experts are read, the model guesses the next layer's and runs the shared
	// experts; what is left of these is done afterwards.
	last := time.Now()
	clear(sum.Data)
	hinted, shared := false, 0
	if err := m.routed(ctx, sum, z, l, ids, weights, func() bool {
		if !hinted {
			hinted = true
			m.hint(l+1, d)
			return true
		}
		return m.shared(y, &shared, &w.Shared)
	}); err != nil {
		return err
	}
	clock(&m.times.Experts, &last)
	for m.shared(y, &shared, &w.Shared) {
	}
	m.tiles(rows, func(lo, hi int) {
		t, s, u := d.view(lo, hi), y.Slice(lo, hi), sum.Slice(lo, hi)
		if w.Norm != nil {
			m.Pool.RunCost(t.rows, 4*c.Latent, func(_ *kernel.Scratch, r int) { kernel.RMSNorm(u.Row(r), u.Row(r), w.Norm, c.Eps) })
		}
		out := m.arena.mat(t.rows, c.Hidden)
		m.Pool.MatMul(kernel.Job{Y: out, X: u, W: w.Up})
		m.Pool.RunCost(t.rows, out.Cols, func(_ *kernel.Scratch, r int) { kernel.Add(out.Row(r), out.Row(r), s.Row(r)) })
		m.observe(l, "mlp_out", out)
		m.join(&t, out, false)
	})
	clock(&m.times.Shared, &last)
	return nil
}

// sharedRows is how many rows the shared experts take at a time: a piece of work
// that is short against a wait for a drive.
const sharedRows = 64

// shared replaces the next few rows of x, from row *from on, by the shared experts' output,
// and reports whether any were left.
func (m *Model) shared(x kernel.Mat, from *int, w *MLP) bool {
	if *from == x.Rows {
		return false
	}
	defer m.arena.release(m.arena.mark())
	t := x.Slice(*from, min(*from+sharedRows, x.Rows))
	out := m.arena.mat(t.Rows, t.Cols)
	m.mlp(out, t, w)
	for r := range t.Rows {
		copy(t.Row(r), out.Row(r))
	}
	*from += t.Rows
	return true
}

// route turns router logits into the chosen experts of every row, ascending, and
// their weights (spec C.11 steps 1-3): the topK highest sigmoid scores after the
// bias, the lower id first among equals; weights from the unbiased scores.
func (m *Model) route(ids []int32, weights []float32, score kernel.Mat, bias []float32) {
	c := m.Config
	m.Pool.RunCost(score.Rows, 32*c.Experts, func(_ *kernel.Scratch, r int) {
		s := score.Row(r)
		kernel.Sigmoid(s, s)
		chosen := ids[r*c.TopK:][:c.TopK]
		biased := make([]float32, len(s))
		kernel.Add(biased, s, bias)
		top(chosen, biased)
		w := weights[r*c.TopK:][:c.TopK]
		for j, e := range chosen {
			w[j] = s[e]
		}
		kernel.Weights(w, w, c.Renormalize && c.TopK > 1, c.RoutedScale)
	})
}

// top writes the indices of the len(dst) largest scores to dst, ascending. Among
// equal scores the lower index wins.
func top(dst []int32, score []float32) {
	n := 0
	for e, s := range score {
		// dst[:n] is in order of rank; a later index never passes an equal score.
		i := n
		for i > 0 && s > score[dst[i-1]] {
			i--
		}
		if i == len(dst) {
			continue
		}
		n = min(n+1, len(dst))
		copy(dst[i+1:n], dst[i:n-1])
		dst[i] = int32(e)
	}
	slices.Sort(dst)
}

// expertRows is how many rows of an expert are computed at a time.
const expertRows = 512

// routed adds the routed experts of every row to sum. Each expert of the union is
// streamed once and applied to all its rows. Experts may come in any order;
// results that come before a lower id's wait, so that they are added in ascending id.
func (m *Model) routed(ctx context.Context, sum, z kernel.Mat, l int, ids []int32, weights []float32, idle func() bool) error {
	c := m.Config
	groups := prefill.Plan(ids, c.TopK, c.Experts)
	union := make([]int32, len(groups))
	most := 0
	for i, g := range groups {
		union[i], most = g.Expert, max(most, len(g.Rows))
	}
	step := min(most, expertRows)
	if !expertBatch.On() {
		step = 1
	}
	buf := struct{ gate, up, y kernel.Mat }{m.arena.mat(step, c.MoEInter), m.arena.mat(step, c.MoEInter), m.arena.mat(step, c.Latent)}
	add := func(g *prefill.Group, lo int, y kernel.Mat) {
		m.Pool.RunCost(y.Rows, c.Latent, func(_ *kernel.Scratch, j int) {
			kernel.Axpy(sum.Row(int(g.Rows[lo+j])), y.Row(j), weights[g.Slots[lo+j]])
		})
	}
	waiting := make([]kernel.Mat, len(groups))
	next := 0
	return m.Experts.Stream(ctx, l, union, func(i int, e *Expert) error {
		g := &groups[i]
		if i != next {
			waiting[i] = kernel.NewMat(len(g.Rows), c.Latent)
		}
		for lo := 0; lo < len(g.Rows); lo += step {
			hi := min(lo+step, len(g.Rows))
			y := buf.y.Slice(0, hi-lo)
			if i != next {
				y = waiting[i].Slice(lo, hi)
			}
			m.expert(y, z, buf.gate.Slice(0, hi-lo), buf.up.Slice(0, hi-lo), e, g.Rows[lo:hi])
			if i == next {
				add(g, lo, y)
			}
		}
		if i == next {
			for next++; next < len(groups) && waiting[next].Rows > 0; next++ {
				add(&groups[next], 0, waiting[next])
				waiting[next] = kernel.Mat{}
			}
		}
		return nil
	}, idle)
}

// expert sets y to the expert's output for the given rows of z: Down(situ(Gate z, Up z)).
// gate and up are buffers of as many rows.
func (m *Model) expert(y, z, gate, up kernel.Mat, e *Expert, rows []int32) {
	m.Pool.MatMul(kernel.Job{Y: gate, X: z, W: &e.Gate, Index: rows}, kernel.Job{Y: up, X: z, W: &e.Up, Index: rows})
	m.situ(gate, up)
	m.Pool.MatMul(kernel.Job{Y: y, X: gate, W: &e.Down})
}

// hint tells the source of experts which ones layer l will likely route to, if both
// can. A pass of many rows routes to nearly all experts, so that all are named, in the order of
// use; for few rows the layer's own router is applied to the stream as it is now, most often chosen
// first.
func (m *Model) hint(l int, d *depth) {
	c, rows := m.Config, d.rows
	h, ok := m.Experts.(Hinter)
	if !ok || l >= c.Layers || !c.IsMoE(l) {
		return
	}
	if rows*c.TopK >= c.Experts {
		all := make([]int32, c.Experts)
		for e := range all {
			all[e] = int32(e)
		}
		h.Hint(l, all)
		return
	}
	s, ok := m.Spine.(RoutingSpine)
	if !ok {
		return
	}
	w := s.Routing(l)
	if w == nil {
		return
	}
	defer m.arena.release(m.arena.mark())
	x, score := m.arena.mat(rows, c.Hidden), m.arena.mat(rows, c.Experts)
	m.mixNorm(x, d, w.Res, w.Norm)
	m.Pool.MatMul(kernel.Job{Y: score, X: x, W: w.Router})
	ids, weights := make([]int32, rows*c.TopK), make([]float32, rows*c.TopK)
	m.route(ids, weights, score, w.Bias)
	groups := prefill.Plan(ids, c.TopK, c.Experts)
	slices.SortStableFunc(groups, func(a, b prefill.Group) int { return len(b.Rows) - len(a.Rows) })
	likely := make([]int32, len(groups))
	for i, g := range groups {
		likely[i] = g.Expert
	}
	h.Hint(l, likely)
}

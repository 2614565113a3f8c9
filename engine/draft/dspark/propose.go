package dspark

import (
	"context"
	"fmt"

	"deltafin/engine/checkpoint"
	"deltafin/engine/draft"
	"deltafin/engine/kernel"
)

// tile is how many watched rows are projected at a time.
const tile = 128

// work is the memory of a proposal's intermediate values. One proposal runs at a time.
type work struct {
	mask     kernel.Mat // [1][hidden], the embedding of the mask token
	h, x, y  kernel.Mat // [Rows][hidden]
	qa       kernel.Mat // [Rows][q_lora]
	kv       kernel.Mat // [Rows][kv_lora+rope]
	q        kernel.Mat // [Rows][heads*(nope+rope)]
	query    kernel.Mat // [Rows*heads][kv_lora], absorbed
	shared   kernel.Mat // [Rows*heads][rope]
	weighted kernel.Mat // [Rows*heads][kv_lora]
	o        kernel.Mat // [Rows][heads*v]
	gate, up kernel.Mat // [Rows][intermediate]
	logits   kernel.Mat // [Rows][vocab]
	markov   kernel.Mat // [1][markov]
	bias     kernel.Mat // [1][vocab], of the Markov head

	streams, context, kva kernel.Mat // [tile][watched*hidden], [tile][hidden], [tile][layers*(kv_lora+rope)]
}

// allocate makes the values of a draft, each of floats(rows, stride).
func (b *work) allocate(c *checkpoint.DraftConfig, floats func(rows, stride int) []float32) {
	mat := func(rows, cols int) kernel.Mat {
		return kernel.Mat{Rows: rows, Cols: cols, Stride: kernel.Pad(cols), Data: floats(rows, kernel.Pad(cols))}
	}
	b.mask = mat(1, c.Hidden)
	b.h, b.x, b.y = mat(Rows, c.Hidden), mat(Rows, c.Hidden), mat(Rows, c.Hidden)
	b.qa, b.kv = mat(Rows, c.QLora), mat(Rows, c.KVLora+c.Rope)
	b.q, b.o = mat(Rows, c.Heads*(c.Nope+c.Rope)), mat(Rows, c.Heads*c.VDim)
	b.query, b.shared, b.weighted = mat(Rows*c.Heads, c.KVLora), mat(Rows*c.Heads, c.Rope), mat(Rows*c.Heads, c.KVLora)
	b.gate, b.up = mat(Rows, c.Intermediate), mat(Rows, c.Intermediate)
	b.logits, b.markov, b.bias = mat(Rows, c.Vocab), mat(1, c.Markov), mat(1, c.Vocab)
	b.streams, b.context = mat(tile, c.Hidden*len(c.TargetLayers)), mat(tile, c.Hidden)
	b.kva = mat(tile, c.Layers*kernel.Pad(c.KVLora+c.Rope))
}

func floats(rows, stride int) []float32 { return kernel.Floats(rows * stride) }

// Propose computes all rows and returns the first k guesses, at most Rows. It has no idea of a sequence
// of which nothing was watched.
func (s *sequence) Propose(ctx context.Context, tokens []int, k int) (_ []draft.Guess, err error) {
	k = min(k, Rows)
	if k <= 0 || len(tokens) == 0 || s.watched+s.undone() == 0 {
		return nil, nil
	}
	defer func() {
		if err != nil && ctx.Err() == nil { // nobody will ask again
			s.failed, s.positions, s.pending = true, nil, nil
		}
	}()
	p := s.p
	if err := p.load(ctx); err != nil {
		return nil, err
	}
	if err := s.project(ctx); err != nil {
		return nil, err
	}
	newest := tokens[len(tokens)-1]
	h := p.work.h
	if err := p.target.Embed(ctx, h.Slice(0, 1), []int{newest}); err != nil {
		return nil, err
	}
	for r := 1; r < Rows; r++ {
		copy(h.Row(r), p.work.mask.Row(0))
	}
	s.reserve(s.watched)
	var turns [Rows]turn
	for r := range turns {
		turns[r] = turnAt(p.freq, len(tokens)-1+r)
	}
	for i := range p.w.layers {
		s.attend(&p.w.layers[i], &s.caches[i], &turns)
		p.mlp(&p.w.layers[i])
	}
	for r := range Rows {
		kernel.RMSNorm(h.Row(r), h.Row(r), p.w.finalNorm, p.c.Eps)
		if !kernel.Finite(h.Row(r)) {
			return nil, fmt.Errorf("dspark: the values of row %d are not finite: %s does not fit this model, or is damaged", r, p.draft.Path)
		}
	}
	return p.guesses(ctx, newest, k)
}

// attend is the first half of a layer: h += O attention(norm(h)), every row seeing the
// whole context and all rows.
func (s *sequence) attend(w *layer, c *cache, turns *[Rows]turn) {
	p, b, cfg, pool := s.p, &s.p.work, s.p.c, s.p.target.Pool
	n, qk := cfg.Heads, cfg.Nope+cfg.Rope
	for r := range Rows {
		kernel.RMSNorm(b.x.Row(r), b.h.Row(r), w.inputNorm, cfg.Eps)
	}
	pool.MatMul(kernel.Job{Y: b.qa, X: b.x, W: w.qa}, kernel.Job{Y: b.kv, X: b.x, W: w.kva})
	for r := range Rows {
		kernel.RMSNorm(b.qa.Row(r), b.qa.Row(r), w.qaNorm, cfg.Eps)
		c.set(s.held()+r, b.kv.Row(r), w.kvNorm, cfg.Eps, turns[r])
	}
	pool.MatMul(kernel.Job{Y: b.q, X: b.qa, W: w.qb})

	// As in the model's own latent attention, the key rows of kv_b are absorbed into the query,
	// and its value rows are applied to the weighted latent: nothing is expanded by position.
	byHead := func(m kernel.Mat, h int) kernel.Mat {
		return kernel.Mat{Rows: Rows, Cols: m.Cols, Stride: n * m.Stride, Data: m.Data[h*m.Stride:]}
	}
	pool.RunCost(n, Rows*cfg.Nope*cfg.KVLora, func(scratch *kernel.Scratch, h int) {
		y := byHead(b.query, h)
		for r := range Rows {
			clear(y.Row(r))
			shared := b.shared.Row(r*n + h)
			copy(shared, b.q.Row(r)[h*qk+cfg.Nope:])
			turns[r].rotate(shared)
		}
		at := h * (cfg.Nope + cfg.VDim)
		kernel.Chain(y, w.kvb.Sub(at, at+cfg.Nope), b.q.ColSlice(h*qk, h*qk+cfg.Nope), scratch)
	})
	// Attend is causal by rows. Here no row is hidden from another, so all are heads of one.
	pool.Attend(b.weighted, b.query, b.shared, kernel.Attention{
		Heads: Rows * n, Scale: p.scale, Latent: c.latent, Key: c.key, First: s.held() + Rows - 1,
	})
	jobs := make([]kernel.Job, n)
	for h := range jobs {
		v := h*(cfg.Nope+cfg.VDim) + cfg.Nope
		jobs[h] = kernel.Job{Y: b.o.ColSlice(h*cfg.VDim, (h+1)*cfg.VDim), X: byHead(b.weighted, h), W: w.kvb.Sub(v, v+cfg.VDim)}
	}
	pool.MatMul(jobs...)
	pool.MatMul(kernel.Job{Y: b.y, X: b.o, W: w.o})
	p.join()
}

// mlp is the second half: h += Down(silu(Gate x) * Up x), x = norm(h).
func (p *proposer) mlp(w *layer) {
	b := &p.work
	for r := range Rows {
		kernel.RMSNorm(b.x.Row(r), b.h.Row(r), w.postNorm, p.c.Eps)
	}
	p.target.Pool.MatMul(kernel.Job{Y: b.gate, X: b.x, W: w.gate}, kernel.Job{Y: b.up, X: b.x, W: w.up})
	p.target.Pool.RunCost(Rows, 16*b.gate.Cols, func(_ *kernel.Scratch, r int) {
		g, u := b.gate.Row(r), b.up.Row(r)
		for i := range u {
			u[i] *= g[i]
		}
		kernel.Gate(u, u, g)
	})
	p.target.Pool.MatMul(kernel.Job{Y: b.y, X: b.up, W: w.down})
	p.join()
}

// join adds y to the stream of the rows.
func (p *proposer) join() {
	for r := range Rows {
		kernel.Add(p.work.h.Row(r), p.work.h.Row(r), p.work.y.Row(r))
	}
}

// guesses makes tokens of the first k rows. The Markov head shifts the logits of each by the token
// before it, so they come one after another.
func (p *proposer) guesses(ctx context.Context, newest, k int) ([]draft.Guess, error) {
	b, w, pool := &p.work, p.w, p.target.Pool
	h, logits := b.h.Slice(0, k), b.logits.Slice(0, k)
	if err := p.target.Head(ctx, func(lo int, m *kernel.Matrix) error {
		pool.MatMul(kernel.Job{Y: logits.ColSlice(lo, lo+m.Rows), X: h, W: m})
		return nil
	}); err != nil {
		return nil, err
	}
	guesses := make([]draft.Guess, k)
	m, bias := b.markov.Row(0), b.bias.Row(0)
	for r, last := 0, newest; r < k; r++ {
		w.markov1.Widen(m, last)
		pool.MatMul(kernel.Job{Y: b.bias, X: b.markov, W: w.markov2})
		kernel.Add(bias, bias, logits.Row(r))
		// A sigmoid of 17 is 1 in binary32, which no estimate should be.
		c := []float32{kernel.Dot(w.confidence[:p.c.Hidden], h.Row(r)) + kernel.Dot(w.confidence[p.c.Hidden:], m) + w.bias[0]}
		c[0] = min(max(c[0], -16), 16)
		kernel.Sigmoid(c, c)
		last = kernel.ArgMax(bias)
		guesses[r] = draft.Guess{ID: last, P: c[0]}
	}
	return guesses, nil
}

package text

import (
	"context"
	"encoding/binary"
	"fmt"
	"maps"
	"math"
	"slices"

	"deltafin/engine/checkpoint"
	"deltafin/engine/draft/weights"
	"deltafin/engine/drive"
	"deltafin/engine/kernel"
)

// model is the weights of a Qwen3 text model and the keys and values of one text.
//
// The architecture is that of the Qwen3 technical report (arXiv:2505.09388) as its released
// configurations and tensors name it: embedding; per layer RMSNorm, grouped-query attention with an
// RMSNorm over each query and key head before the rotation, a residual, RMSNorm, SwiGLU, a
// residual; RMSNorm; output matrix. Rotary positions pair channel i of a head with
// channel i + head_dim/2.
//
// Weights are bf16, activations float32. Keys and values are kept in bf16: that is what the
// released model computes them in, and half of the memory and of what each new token reads.
type model struct {
	c       *checkpoint.TextConfig
	pool    *kernel.Pool
	embed   *kernel.Matrix // [vocab][hidden]
	head    *kernel.Matrix // [vocab][hidden]; embed if tied
	norm    []float32      // [hidden]
	layers  []layer
	freq    []float64 // [head_dim/2] angle per position
	room    int       // positions of the cache
	weights *weights.Set

	// The text in the cache, and for a position whose logits were once computed the token
	// after it that they prefer; P is 0 for the others.
	ids  []int32
	best []choice

	work map[string][]float32 // scratch by name
}

// choice is a token and its probability.
type choice struct {
	id int32
	p  float32
}

type layer struct {
	inputNorm, postNorm []float32      // [hidden]
	q, k, v, o          *kernel.Matrix // [heads*dim][hidden], [kv heads*dim][hidden] twice, [hidden][heads*dim]
	qNorm, kNorm        []float32      // [dim]
	gate, up, down      *kernel.Matrix // [intermediate][hidden] twice, [hidden][intermediate]
	keys, values        []byte         // [kv heads][room][dim] bf16
}

// passRows is the most rows of a pass: enough to use each weight many times, few
// enough that a long prompt is cancelled within a moment.
const passRows = 64

// lastRows is the most rows of a pass whose logits are wanted.
const lastRows = 16

// load reads the weights of t.
func load(ctx context.Context, t *checkpoint.Text, drives *drive.Set, pool *kernel.Pool, room int) (*model, error) {
	c := t.Config
	m := &model{c: c, pool: pool, room: room, work: map[string][]float32{}}
	w, err := weights.Read(ctx, drives, t.Paths, slices.Collect(maps.Values(t.Tensor)))
	if err != nil {
		return nil, err
	}
	m.weights, m.embed, m.head, m.norm = w, w.Matrix[checkpoint.TextEmbed], w.Matrix[checkpoint.TextHead], w.Vector[checkpoint.TextNorm]
	if c.Tied {
		m.head = m.embed
	}
	cache := func() []byte { return kernel.Bytes(2 * room * c.KVHeads * c.HeadDim) }
	for l := range c.Layers {
		at := func(name string) string { return fmt.Sprintf("model.layers.%d.%s.weight", l, name) }
		m.layers = append(m.layers, layer{
			inputNorm: w.Vector[at("input_layernorm")], postNorm: w.Vector[at("post_attention_layernorm")],
			q: w.Matrix[at("self_attn.q_proj")], k: w.Matrix[at("self_attn.k_proj")], v: w.Matrix[at("self_attn.v_proj")], o: w.Matrix[at("self_attn.o_proj")],
			qNorm: w.Vector[at("self_attn.q_norm")], kNorm: w.Vector[at("self_attn.k_norm")],
			gate: w.Matrix[at("mlp.gate_proj")], up: w.Matrix[at("mlp.up_proj")], down: w.Matrix[at("mlp.down_proj")],
			keys: cache(), values: cache(),
		})
	}
	for i := range c.HeadDim / 2 {
		m.freq = append(m.freq, math.Pow(float64(c.Theta), -2*float64(i)/float64(c.HeadDim)))
	}
	return m, nil
}

// modelBytes is the memory of a loaded model: weights, cache and scratch.
func modelBytes(t *checkpoint.Text, room int) int64 {
	c := t.Config
	var n int64
	for _, x := range t.Tensor {
		n += weights.Bytes(x)
	}
	n += 2 * 2 * int64(c.Layers) * int64(room) * int64(c.KVHeads*c.HeadDim)
	heads := 3*c.Heads*c.HeadDim + 2*c.KVHeads*c.HeadDim + c.Heads*kernel.Pad(room)
	return n + 4*(passRows*int64(3*c.Hidden+2*c.Intermediate+heads)+(lastRows+1)*int64(c.Vocab))
}

// follow makes ids the beginning of the text in the cache and returns the preferred token
// after them. What is already there is not computed again, and what lies there beyond ids stays.
func (m *model) follow(ctx context.Context, ids []int32) (choice, error) {
	n := len(ids)
	if common(m.ids, ids) < n || m.best[n-1].p == 0 {
		if _, err := m.rows(ctx, ids, n-1); err != nil {
			return choice{}, err
		}
	}
	return m.best[n-1], nil
}

// rows is follow for the logits [len(ids)-first][vocab] of the at most lastRows positions from
// first on, which are computed anew. They are valid until the next call.
func (m *model) rows(ctx context.Context, ids []int32, first int) (kernel.Mat, error) {
	n := min(common(m.ids, ids), first)
	m.ids, m.best = m.ids[:n], m.best[:n]
	for n < len(ids) {
		if err := ctx.Err(); err != nil {
			return kernel.Mat{}, err
		}
		end := min(n+passRows, len(ids))
		if end < len(ids) && end > first {
			end = first // the rows that give logits are of one pass
		}
		x := m.pass(ids[n:end], n)
		m.ids = append(m.ids, ids[n:end]...)
		m.best = append(m.best, make([]choice, end-n)...)
		if end < len(ids) {
			n = end
			continue
		}
		logits := m.mat("logits", end-first, m.c.Vocab)
		m.pool.MatMul(kernel.Job{Y: logits, X: x.Slice(first-n, end-n), W: m.head})
		for r := range logits.Rows {
			if !kernel.Finite(logits.Row(r)) {
				return kernel.Mat{}, fmt.Errorf("the logits of position %d are not finite: the weights are damaged, fetch them again", first+r)
			}
			m.best[first+r] = m.prefer(logits.Row(r), nil)
		}
		return logits, nil
	}
	panic("text: no rows to compute")
}

// common is the length of the longest common prefix.
func common(a, b []int32) int {
	n := 0
	for n < len(a) && n < len(b) && a[n] == b[n] {
		n++
	}
	return n
}

// prefer is the greatest of the logits among the tokens in among (nil for all), and its
// probability if it is one of them.
func (m *model) prefer(logits []float32, among []int32) choice {
	odds := m.mat("odds", 1, len(logits)).Row(0)
	if among == nil {
		copy(odds, logits)
	} else {
		odds = odds[:len(among)]
		for i, id := range among {
			odds[i] = logits[id]
		}
	}
	best := kernel.ArgMax(odds)
	softmax(odds, 1)
	c := choice{int32(best), odds[best]}
	if among != nil {
		c.id = among[best]
	}
	return c
}

// mat is scratch [rows][cols] of that name with unspecified contents.
func (m *model) mat(name string, rows, cols int) kernel.Mat {
	n := rows * kernel.Pad(cols)
	if len(m.work[name]) < n {
		m.work[name] = kernel.Floats(n)
	}
	return kernel.Mat{Rows: rows, Cols: cols, Stride: kernel.Pad(cols), Data: m.work[name][:n]}
}

// pass runs ids at the positions from first on through the layers, enters their keys and
// values, and returns the normalised stream [len(ids)][hidden].
func (m *model) pass(ids []int32, first int) kernel.Mat {
	c, rows := m.c, len(ids)
	x, h := m.mat("stream", rows, c.Hidden), m.mat("normed", rows, c.Hidden)
	q, k, v := m.mat("q", rows, c.Heads*c.HeadDim), m.mat("k", rows, c.KVHeads*c.HeadDim), m.mat("v", rows, c.KVHeads*c.HeadDim)
	gate, up, y := m.mat("gate", rows, c.Intermediate), m.mat("up", rows, c.Intermediate), m.mat("part", rows, c.Hidden)
	for r, id := range ids {
		m.embed.Widen(x.Row(r), int(id))
	}
	cos, sin := m.angles(first, rows)
	norm := func(w []float32) {
		for r := range rows {
			kernel.RMSNorm(h.Row(r), x.Row(r), w, c.Eps)
		}
	}
	for i := range m.layers {
		l := &m.layers[i]
		norm(l.inputNorm)
		m.pool.MatMul(kernel.Job{Y: q, X: h, W: l.q}, kernel.Job{Y: k, X: h, W: l.k}, kernel.Job{Y: v, X: h, W: l.v})
		for r := range rows {
			heads(q.Row(r), l.qNorm, c.Eps, cos.Row(r), sin.Row(r))
			heads(k.Row(r), l.kNorm, c.Eps, cos.Row(r), sin.Row(r))
			m.keep(l.keys, first+r, k.Row(r))
			m.keep(l.values, first+r, v.Row(r))
		}
		m.attend(l, q, first)
		m.pool.MatMul(kernel.Job{Y: y, X: q, W: l.o})
		for r := range rows {
			kernel.Add(x.Row(r), x.Row(r), y.Row(r))
		}
		norm(l.postNorm)
		m.pool.MatMul(kernel.Job{Y: gate, X: h, W: l.gate}, kernel.Job{Y: up, X: h, W: l.up})
		for r := range rows {
			g := gate.Row(r)
			kernel.Gate(g, g, g) // SiLU
			for j, u := range up.Row(r) {
				g[j] *= u
			}
		}
		m.pool.MatMul(kernel.Job{Y: y, X: gate, W: l.down})
		for r := range rows {
			kernel.Add(x.Row(r), x.Row(r), y.Row(r))
		}
	}
	norm(m.norm)
	return h
}

// angles gives the cosines and sines [rows][head_dim/2] of the positions from first on.
func (m *model) angles(first, rows int) (cos, sin kernel.Mat) {
	cos, sin = m.mat("cos", rows, len(m.freq)), m.mat("sin", rows, len(m.freq))
	for r := range rows {
		for i, f := range m.freq {
			s, c := math.Sincos(float64(first+r) * f)
			cos.Row(r)[i], sin.Row(r)[i] = float32(c), float32(s)
		}
	}
	return cos, sin
}

// heads normalises and rotates each head of row.
func heads(row, w []float32, eps float32, cos, sin []float32) {
	for ; len(row) > 0; row = row[len(w):] {
		h := row[:len(w)]
		kernel.RMSNorm(h, h, w, eps)
		a, b := h[:len(cos)], h[len(cos):]
		for i := range a {
			a[i], b[i] = a[i]*cos[i]-b[i]*sin[i], b[i]*cos[i]+a[i]*sin[i]
		}
	}
}

// keep enters row [kv heads][dim] at a position of a cache, rounded to bf16 (nearest, ties to even).
func (m *model) keep(cache []byte, position int, row []float32) {
	d := m.c.HeadDim
	for h := range m.c.KVHeads {
		to := cache[2*d*(h*m.room+position):]
		for i, x := range row[h*d:][:d] {
			u := math.Float32bits(x)
			u += 0x7fff + u>>16&1
			binary.LittleEndian.PutUint16(to[2*i:], uint16(u>>16))
		}
	}
}

// attend replaces each query head in q by what it reads from the cache: row r sees the
// positions up to first+r. Query heads that share a key head are rows of one product.
func (m *model) attend(l *layer, q kernel.Mat, first int) {
	c, d := m.c, m.c.HeadDim
	n, group := first+q.Rows, c.Heads/c.KVHeads
	rows := q.Rows * group
	// Row (head of keys, row, head of its group).
	queries, scores := m.mat("queries", c.KVHeads*rows, d), m.mat("scores", c.KVHeads*rows, n)
	head := func(i int) []float32 {
		g, r, j := i/rows, i%rows/group, i%group
		return q.Row(r)[(g*group+j)*d:][:d]
	}
	for i := range queries.Rows {
		copy(queries.Row(i), head(i))
	}
	view := func(cache []byte, g int) *kernel.Matrix {
		return &kernel.Matrix{Format: kernel.BF16, Rows: n, Cols: d, Stride: d, Data: cache[2*d*g*m.room:][:2*d*n]}
	}
	jobs := make([]kernel.Job, c.KVHeads)
	for g := range jobs {
		jobs[g] = kernel.Job{Y: scores.Slice(g*rows, (g+1)*rows), X: queries.Slice(g*rows, (g+1)*rows), W: view(l.keys, g)}
	}
	m.pool.MatMul(jobs...)
	scale := float32(1 / math.Sqrt(float64(d)))
	m.pool.RunCost(c.KVHeads, rows*n*d, func(s *kernel.Scratch, g int) {
		y, x := queries.Slice(g*rows, (g+1)*rows), scores.Slice(g*rows, (g+1)*rows)
		for i := range rows {
			clear(y.Row(i))
			p := x.Row(i)
			seen := first + i/group + 1
			clear(p[seen:])
			softmax(p[:seen], scale)
		}
		kernel.Chain(y, view(l.values, g), x, s)
	})
	for i := range queries.Rows {
		copy(head(i), queries.Row(i))
	}
}

// softmax sets p to the softmax of scale*p.
func softmax(p []float32, scale float32) {
	top := p[kernel.ArgMax(p)]
	for i := range p {
		p[i] = scale * (p[i] - top)
	}
	kernel.Exp(p, p)
	inv := 1 / kernel.Sum(p)
	for i := range p {
		p[i] *= inv
	}
}

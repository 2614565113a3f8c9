package k3

import (
	"math"

	"deltafin/engine/kernel"
)

// MLA is the weights of gated multi-head latent attention (spec B.2, C.8).
type MLA struct {
	QA     *kernel.Matrix // q_a_proj [q_lora][hidden]
	QANorm []float32      // [q_lora]
	QB     *kernel.Matrix // q_b_proj [heads*(nope+rope)][q_lora]
	KVA    *kernel.Matrix // kv_a_proj_with_mqa [kv_lora+rope][hidden]
	KVNorm []float32      // [kv_lora]
	KVB    *kernel.Matrix // kv_b_proj [heads*(nope+v)][kv_lora]: per head the key rows, then the value rows
	G      *kernel.Matrix // g_proj [heads*v][hidden]
	O      *kernel.Matrix // o_proj [hidden][heads*v]
}

// mlaState is one MLA layer's cache: per position the normalised latent and the
// shared key part, nothing per head (spec C.8 step 2).
type mlaState struct {
	latent, key kernel.Mat // [positions][kv_lora], [positions][rope]; Data grows
}

// grow makes room for n more positions and returns where they start.
func (st *mlaState) grow(n int) (first int) {
	first = st.latent.Rows
	for _, c := range []*kernel.Mat{&st.latent, &st.key} {
		c.Rows += n
		if need := c.Rows * c.Stride; need > len(c.Data) {
			d := kernel.Floats(max(need, len(c.Data)+len(c.Data)/2, 64*c.Stride))
			copy(d, c.Data)
			c.Data = d
		}
	}
	return first
}

// truncate forgets positions n and later.
func (st *mlaState) truncate(n int) { st.latent.Rows, st.key.Rows = n, n }

// attendRows is how many rows attend at a time: the absorbed queries and weighted
// latents of a row are heads*kv_lora values each, 200 KB at K3's size.
const attendRows = 32

// mla appends the rows to the cache and attends to it:
// out = O(attention * sigmoid(G x)).
func (m *Model) mla(out, x kernel.Mat, w *MLA, st *mlaState) {
	c, mat := m.Config, m.arena.mat
	rows, qk := x.Rows, c.Nope+c.Rope
	qa, q, kva := mat(rows, c.QLora), mat(rows, c.Heads*qk), mat(rows, c.KVLora+c.Rope)
	g, o := mat(rows, c.Heads*c.VDim), mat(rows, c.Heads*c.VDim)
	m.Pool.MatMul(kernel.Job{Y: qa, X: x, W: w.QA}, kernel.Job{Y: kva, X: x, W: w.KVA}, kernel.Job{Y: g, X: x, W: w.G})
	first := st.grow(rows)
	for r := range rows {
		kernel.RMSNorm(qa.Row(r), qa.Row(r), w.QANorm, latentEps)
		kernel.RMSNorm(st.latent.Row(first+r), kva.Row(r)[:c.KVLora], w.KVNorm, latentEps)
		copy(st.key.Row(first+r), kva.Row(r)[c.KVLora:])
	}
	m.Pool.MatMul(kernel.Job{Y: q, X: qa, W: w.QB})

	// Per head, the key rows of kv_b are absorbed into the query, and its value rows
	// are applied to the weighted latent.
	jobs := make([]kernel.Job, c.Heads)
	n := min(rows, attendRows)
	query, shared, weighted := mat(n*c.Heads, c.KVLora), mat(n*c.Heads, c.Rope), mat(n*c.Heads, c.KVLora)
	for lo := 0; lo < rows; lo += attendRows {
		n := min(attendRows, rows-lo)
		m.Pool.RunCost(c.Heads, n*c.Nope*c.KVLora, func(s *kernel.Scratch, h int) {
			y := byHead(query, h, c.Heads, n)
			for r := range n {
				clear(y.Row(r))
				copy(shared.Row(r*c.Heads+h), q.Row(lo + r)[h*qk+c.Nope:][:c.Rope])
			}
			kernel.Chain(y, w.KVB.Sub(h*(c.Nope+c.VDim), h*(c.Nope+c.VDim)+c.Nope), q.Slice(lo, lo+n).ColSlice(h*qk, h*qk+c.Nope), s)
		})
		all := n * c.Heads
		m.Pool.Attend(weighted.Slice(0, all), query.Slice(0, all), shared.Slice(0, all), kernel.Attention{
			Heads: c.Heads, Scale: inverseSqrt(qk), Latent: st.latent, Key: st.key, First: first + lo,
		})
		for h := range jobs {
			v := h*(c.Nope+c.VDim) + c.Nope
			jobs[h] = kernel.Job{
				Y: o.Slice(lo, lo+n).ColSlice(h*c.VDim, (h+1)*c.VDim),
				X: byHead(weighted, h, c.Heads, n),
				W: w.KVB.Sub(v, v+c.VDim),
			}
		}
		m.Pool.MatMul(jobs...)
	}
	m.Pool.RunCost(rows, 16*o.Cols, func(_ *kernel.Scratch, r int) { kernel.Gate(o.Row(r), o.Row(r), g.Row(r)) })
	m.Pool.MatMul(kernel.Job{Y: out, X: o, W: w.O})
}

// byHead views head h of the first n rows of a [rows*heads] Mat.
func byHead(v kernel.Mat, h, heads, n int) kernel.Mat {
	return kernel.Mat{Rows: n, Cols: v.Cols, Stride: heads * v.Stride, Data: v.Data[h*v.Stride:]}
}

// inverseSqrt is n^-0.5, correctly rounded from binary64.
func inverseSqrt(n int) float32 { return float32(1 / math.Sqrt(float64(n))) }

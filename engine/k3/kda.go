package k3

import "deltafin/engine/kernel"

// KDA is the weights of Kimi Delta Attention (spec B.2, C.7). P = heads * dim.
type KDA struct {
	Q, K, V, G *kernel.Matrix // [P][hidden]
	FA         *kernel.Matrix // f_a_proj [dim][hidden]
	FB         *kernel.Matrix // f_b_proj [P][dim]
	B          *kernel.Matrix // b_proj [heads][hidden]
	O          *kernel.Matrix // o_proj [hidden][P]
	Conv       [3][][]float32 // q, k, v: per tap, oldest first, [P]
	A          []float32      // exp(A_log) per head: the file's entries beyond heads are padding
	DtBias     []float32      // [P]
	Norm       []float32      // o_norm [dim], shared by all heads
}

// kdaState is one KDA layer's state: the recurrent matrix of each head and the
// projection outputs that the convolution still needs.
type kdaState struct {
	s    []float32      // [heads][dim][stride]
	tail [3][][]float32 // q, k, v: the last taps-1 inputs, oldest first, [P]
	held *heldKDA
}

// heldKDA is what an uncommitted pass leaves behind: enough to replay any prefix
// of it.
type heldKDA struct {
	u       [3]kernel.Mat // convolution inputs [rows][P]
	k, v, a kernel.Mat    // normalised keys, values, decays [rows][P]
	beta    kernel.Mat    // [rows][heads]
}

// kda is attention by recurrence: out = O(norm(recurrence) * sigmoid(G x)).
func (m *Model) kda(out, x kernel.Mat, w *KDA, st *kdaState, hold bool) {
	c := m.Config
	rows, p, dim := x.Rows, c.KDAHeads*c.KDADim, c.KDADim
	mat := m.arena.mat
	if hold {
		mat = kernel.NewMat // outlives the pass
	}
	var u, y [3]kernel.Mat
	for i := range u {
		u[i], y[i] = mat(rows, p), mat(rows, p)
	}
	decay, beta := mat(rows, p), mat(rows, c.KDAHeads)
	g, fa, o := m.arena.mat(rows, p), m.arena.mat(rows, dim), m.arena.mat(rows, p)
	m.Pool.MatMul(
		kernel.Job{Y: u[0], X: x, W: w.Q}, kernel.Job{Y: u[1], X: x, W: w.K}, kernel.Job{Y: u[2], X: x, W: w.V},
		kernel.Job{Y: g, X: x, W: w.G}, kernel.Job{Y: fa, X: x, W: w.FA}, kernel.Job{Y: beta, X: x, W: w.B})
	m.Pool.MatMul(kernel.Job{Y: decay, X: fa, W: w.FB})
	m.Pool.RunCost(3*rows, 16*p, func(_ *kernel.Scratch, i int) {
		s, r := i/rows, i%rows
		kernel.Conv(y[s].Row(r), w.Conv[s], taps(st.tail[s], u[s], r))
	})
	m.Pool.RunCost(rows, 8*c.KDAHeads, func(_ *kernel.Scratch, r int) { kernel.Sigmoid(beta.Row(r), beta.Row(r)) })

	q, k, v := y[0], y[1], y[2]
	qScale := inverseSqrt(dim)
	m.Pool.RunCost(c.KDAHeads, rows*dim*(2*dim+40), func(sc *kernel.Scratch, h int) {
		lo, hi := h*dim, (h+1)*dim
		s := st.head(h, dim)
		if hold {
			s = append([]float32(nil), s...)
		}
		for r := range rows {
			qh, kh, vh, ah, oh := q.Row(r)[lo:hi], k.Row(r)[lo:hi], v.Row(r)[lo:hi], decay.Row(r)[lo:hi], o.Row(r)[lo:hi]
			kernel.L2Norm(qh, qh, l2Eps, qScale)
			kernel.L2Norm(kh, kh, l2Eps, 1)
			kernel.Decay(ah, ah, w.DtBias[lo:hi], w.A[h], c.GateLowerBound)
			kernel.KDAStep(s, stateStride(dim), ah, kh, qh, vh, beta.Row(r)[h], oh)
			kernel.RMSNorm(oh, oh, w.Norm, c.Eps)
			kernel.Gate(oh, oh, g.Row(r)[lo:hi])
		}
	})
	m.Pool.MatMul(kernel.Job{Y: out, X: o, W: w.O})
	st.held = nil
	if hold {
		st.held = &heldKDA{u: u, k: k, v: v, a: decay, beta: beta}
	} else {
		st.shift(u, rows)
	}
}

// taps returns the convolution inputs of row r, oldest first: rows of u and, before
// them, of the tail.
func taps(tail [][]float32, u kernel.Mat, r int) [][]float32 {
	t := make([][]float32, len(tail)+1)
	for j := range t {
		if i := r - len(tail) + j; i >= 0 {
			t[j] = u.Row(i)
		} else {
			t[j] = tail[len(tail)+i]
		}
	}
	return t
}

// stateStride is the length of a row of the recurrent matrix: whole vectors.
func stateStride(dim int) int { return (dim + 7) &^ 7 }

func (st *kdaState) head(h, dim int) []float32 {
	n := dim * stateStride(dim)
	return st.s[h*n:][:n]
}

// shift makes the last inputs of the first n rows of u the new tail.
func (st *kdaState) shift(u [3]kernel.Mat, n int) {
	for s := range u {
		old := st.tail[s]
		next := make([][]float32, len(old))
		for j := range next {
			if i := n - len(old) + j; i >= 0 {
				next[j] = append([]float32(nil), u[s].Row(i)...)
			} else {
				next[j] = old[len(old)+i]
			}
		}
		st.tail[s] = next
	}
}

// commit replays the first n held rows onto the state. The recurrence is the same
// kernel in the same order, so the state equals that of a pass over n rows.
func (st *kdaState) commit(p *kernel.Pool, heads, dim, n int) {
	d := st.held
	st.held = nil
	p.RunCost(heads, n*dim*2*dim, func(sc *kernel.Scratch, h int) {
		lo, hi := h*dim, (h+1)*dim
		o := make([]float32, dim)
		for r := range n {
			k := d.k.Row(r)[lo:hi]
			kernel.KDAStep(st.head(h, dim), stateStride(dim), d.a.Row(r)[lo:hi], k, k, d.v.Row(r)[lo:hi], d.beta.Row(r)[h], o)
		}
	})
	st.shift(d.u, n)
}

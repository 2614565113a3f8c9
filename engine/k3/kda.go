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

// kdaInputs is what goes into the recurrence of a pass.
type kdaInputs struct {
	u       [3]kernel.Mat // convolution inputs [rows][P]
	k, v, a kernel.Mat    // normalised keys, values, decays [rows][P]
	beta    kernel.Mat    // [rows][heads]
}

func (a *arena) kdaInputs(rows, heads, dim int) (in kdaInputs) {
	for _, x := range []*kernel.Mat{&in.u[0], &in.u[1], &in.u[2], &in.k, &in.v, &in.a} {
		*x = a.mat(rows, heads*dim)
	}
	in.beta = a.mat(rows, heads)
	return in
}

// heldKDA is what an uncommitted pass leaves behind: enough to replay any prefix
// of it.
type heldKDA struct {
	kdaInputs
	arena arena // of its own: they outlive the pass
}

// hold makes room for a pass that is not committed at once. It takes the place of one that
// was: passes are checked over and over.
func (m *Model) hold(rows int) *heldKDA {
	h, heads, dim := &heldKDA{}, m.Config.KDAHeads, m.Config.KDADim
	if n := len(m.spare); n > 0 {
		h, m.spare = m.spare[n-1], m.spare[:n-1]
	}
	h.arena.reset(rows * (6*kernel.Pad(heads*dim) + kernel.Pad(heads)))
	h.kdaInputs = h.arena.kdaInputs(rows, heads, dim)
	return h
}

// kda is attention by recurrence: out = O(norm(recurrence) * sigmoid(G x)).
func (m *Model) kda(out, x kernel.Mat, w *KDA, st *kdaState, hold bool) {
	c := m.Config
	rows, p, dim := x.Rows, c.KDAHeads*c.KDADim, c.KDADim
	mat := m.arena.mat
	var in kdaInputs
	if hold {
		st.held = m.hold(rows)
		in = st.held.kdaInputs
	} else {
		in = m.arena.kdaInputs(rows, c.KDAHeads, dim)
	}
	u, y, decay, beta := in.u, [3]kernel.Mat{mat(rows, p), in.k, in.v}, in.a, in.beta
	g, fa, o := mat(rows, p), mat(rows, dim), mat(rows, p)
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
			own := sc.Floats(len(s))
			copy(own, s)
			s = own
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
	if !hold {
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

// replay applies the held rows from to to-1 to the state. The recurrence is the same
// kernel in the same order, so the state equals that of a pass over those rows.
func (st *kdaState) replay(p *kernel.Pool, heads, dim, from, to int) {
	d := st.held
	p.RunCost(heads, (to-from)*dim*2*dim, func(_ *kernel.Scratch, h int) {
		lo, hi := h*dim, (h+1)*dim
		o := make([]float32, dim)
		for r := from; r < to; r++ {
			k := d.k.Row(r)[lo:hi]
			kernel.KDAStep(st.head(h, dim), stateStride(dim), d.a.Row(r)[lo:hi], k, k, d.v.Row(r)[lo:hi], d.beta.Row(r)[h], o)
		}
	})
	var u [3]kernel.Mat
	for i := range u {
		u[i] = d.u[i].Slice(from, to)
	}
	st.shift(u, to-from)
}

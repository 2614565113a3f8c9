package reference

// KDAWeights are one Kimi Delta Attention layer; P = heads * head_dim.
type KDAWeights[F Float] struct {
	Q, K, V, Gate       Matrix[F] // [P][hidden]
	QConv, KConv, VConv Matrix[F] // [P][taps], the last tap belongs to the current token
	FA                  Matrix[F] // [head_dim][hidden]
	FB                  Matrix[F] // [P][head_dim]
	Beta                Matrix[F] // [heads][hidden]
	ALog                []F       // [heads], one scalar a head
	DtBias              []F       // [P]
	ONorm               []F       // [head_dim], shared by all heads
	Out                 Matrix[F] // [hidden][P]
}

// KDAState is one layer's recurrent state.
type KDAState[F Float] struct {
	// QConv, KConv, VConv hold the last taps-1 projected inputs, oldest first, each [P].
	QConv, KConv, VConv [][]F
	S                   []Matrix[F] // [heads] of [key channel][value channel]
}

// NewKDAState is the state before the first token: zeros.
func NewKDAState[F Float](c LinearConfig) *KDAState[F] {
	zeros := func() [][]F {
		w := make([][]F, c.ShortConvKernelSize-1)
		for i := range w {
			w[i] = make([]F, c.NumHeads*c.HeadDim)
		}
		return w
	}
	s := &KDAState[F]{QConv: zeros(), KConv: zeros(), VConv: zeros()}
	for range c.NumHeads {
		s.S = append(s.S, Matrix[F]{c.HeadDim, c.HeadDim, make([]F, c.HeadDim*c.HeadDim)})
	}
	return s
}

// KDATrace holds one position's values inside a KDA layer, each [heads][head_dim].
type KDATrace[F Float] struct {
	Q, K, V [][]F // after convolution, normalisation and the query's scale
	Alpha   [][]F // decay, in (e^lower, 1)
	Beta    []F   // [heads]
	O       [][]F // read from the updated state
	Normed  [][]F // after the gated norm
}

// ShortConv is the causal depthwise convolution and its SiLU (spec C.7 step 2). window is
// [taps][P], oldest first and the current token last; w is [P][taps].
func ShortConv[F Float](window [][]F, w Matrix[F]) []F {
	y := make([]F, w.Rows)
	for c := range y {
		var s F
		for j, u := range window {
			s += w.Row(c)[j] * u[c]
		}
		y[c] = SiLU(s)
	}
	return y
}

// DecayGate is one head's decay e^(lower sigmoid(e^aLog z)), z [head_dim] (spec C.7 step
// 4). aLog belongs to the head, not to a channel (spec F.1).
func DecayGate[F Float](z []F, aLog F, lower float64) []F {
	a := Exp(aLog)
	y := make([]F, len(z))
	for i, v := range z {
		y[i] = Exp(F(lower) * Sigmoid(a*v))
	}
	return y
}

// KDAStep is one token of one head's recurrence (spec C.7 step 6): it decays s, writes the
// delta against the decayed state and reads the updated one. s is [dk][dv] and changes;
// q, k, alpha are [dk], v and the result [dv].
func KDAStep[F Float](s Matrix[F], q, k, v, alpha []F, beta F) []F {
	for i := range s.Rows {
		for j := range s.Cols {
			s.Row(i)[j] *= alpha[i]
		}
	}
	u := make([]F, s.Cols)
	for j := range u {
		var seen F
		for i := range s.Rows {
			seen += s.Row(i)[j] * k[i]
		}
		u[j] = beta * (v[j] - seen)
	}
	for i := range s.Rows {
		for j := range s.Cols {
			s.Row(i)[j] += k[i] * u[j]
		}
	}
	o := make([]F, s.Cols)
	for j := range o {
		for i := range s.Rows {
			o[j] += s.Row(i)[j] * q[i]
		}
	}
	return o
}

// GatedNorm is one head's RMSNorm times the sigmoid of its gate (spec C.7 step 7); all
// [head_dim].
func GatedNorm[F Float](o, w, gate []F, eps float64) []F {
	y := RMSNorm(o, w, eps)
	for i := range y {
		y[i] *= Sigmoid(gate[i])
	}
	return y
}

// KDALayer is spec C.7 for one position: x [hidden] is the normalised input, the result
// [hidden] the layer's output. It changes st.
func KDALayer[F Float](w *KDAWeights[F], x []F, st *KDAState[F], c Config) ([]F, KDATrace[F]) {
	lin := c.Linear
	var tr KDATrace[F]
	conv := func(window *[][]F, proj, taps Matrix[F]) []F {
		all := append((*window)[:len(*window):len(*window)], proj.Mul(x))
		*window = all[1:]
		return ShortConv(all, taps)
	}
	q := conv(&st.QConv, w.Q, w.QConv)
	k := conv(&st.KConv, w.K, w.KConv)
	v := conv(&st.VConv, w.V, w.VConv)
	z := Add(w.FB.Mul(w.FA.Mul(x)), w.DtBias)
	beta := w.Beta.Mul(x)
	gate := w.Gate.Mul(x)
	scale := 1 / Sqrt(F(lin.HeadDim))
	var heads []F
	for h := range lin.NumHeads {
		of := func(x []F) []F { return x[h*lin.HeadDim : (h+1)*lin.HeadDim] }
		qh, kh, vh := L2Norm(of(q)), L2Norm(of(k)), of(v)
		for i := range qh {
			qh[i] *= scale
		}
		alpha := DecayGate(of(z), w.ALog[h], lin.GateLowerBound)
		b := Sigmoid(beta[h])
		o := KDAStep(st.S[h], qh, kh, vh, alpha, b)
		y := GatedNorm(o, w.ONorm, of(gate), c.RMSNormEps)
		heads = append(heads, y...)
		tr.Q, tr.K, tr.V = append(tr.Q, qh), append(tr.K, kh), append(tr.V, vh)
		tr.Alpha, tr.Beta = append(tr.Alpha, alpha), append(tr.Beta, b)
		tr.O, tr.Normed = append(tr.O, o), append(tr.Normed, y)
	}
	return w.Out.Mul(heads), tr
}

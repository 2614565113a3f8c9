package kernel

// Dot is the contract's dot product of two equally long vectors.
func Dot(x, y []float32) float32 { return active.Load().dot(x, y[:len(x)]) }

// Sum adds x in the order of [Dot] with weights 1.
func Sum(x []float32) float32 { return active.Load().sum(x) }

// Exp sets dst[i] to e^x[i]. Here and below dst may be one of the sources.
func Exp(dst, x []float32) { active.Load().exp(dst[:len(x)], x) }

// Sigmoid sets dst[i] to 1/(1+e^-x[i]).
func Sigmoid(dst, x []float32) { active.Load().sigmoid(dst[:len(x)], x) }

// Tanh sets dst[i] to tanh(x[i]).
func Tanh(dst, x []float32) { active.Load().tanh(dst[:len(x)], x) }

// SiTU is the SiTU-GLU activation (spec C.9): beta*tanh(g/beta) * sigmoid(g) * linear*tanh(u/linear).
func SiTU(dst, g, u []float32, beta, linear float32) {
	active.Load().situ(dst[:len(g)], g, u[:len(g)], beta, linear)
}

// RMSNorm sets dst to (x * inv) * w with inv = 1 / sqrt(Dot(x, x)/n + eps) (spec C.4).
func RMSNorm(dst, x, w []float32, eps float32) {
	p := active.Load()
	p.scaleMul(dst[:len(x)], x, w[:len(x)], invRMS(p.dot(x, x), len(x), eps))
}

// InvRMS is 1 / sqrt(Dot(x, x)/n + eps), the factor that RMSNorm applies to x.
func InvRMS(x []float32, eps float32) float32 { return invRMS(active.Load().dot(x, x), len(x), eps) }

// L2Norm sets dst to (x * 1/sqrt(Dot(x, x) + eps)) * scale (spec C.7 step 3: eps is
// added to the sum of squares).
func L2Norm(dst, x []float32, eps, scale float32) {
	p := active.Load()
	p.scale(dst[:len(x)], x, 1/sqrt(p.dot(x, x)+eps))
	p.scale(dst[:len(x)], dst, scale)
}

// Gate sets dst[i] to x[i] * sigmoid(g[i]).
func Gate(dst, x, g []float32) { active.Load().gate(dst[:len(x)], x, g[:len(x)]) }

// Add sets dst to x + y.
func Add(dst, x, y []float32) { active.Load().add(dst[:len(x)], x, y[:len(x)]) }

// Axpy fuses a*x onto dst.
func Axpy(dst, x []float32, a float32) { active.Load().axpy(dst[:len(x)], x, a) }

// Decay is KDA's per-channel decay of one head (spec C.7 step 4):
// exp(lower * sigmoid(a * (z + bias))).
func Decay(dst, z, bias []float32, a, lower float32) {
	active.Load().decay(dst[:len(z)], z, bias[:len(z)], a, lower)
}

// Conv is the causal depthwise convolution with SiLU (spec C.7 step 2): u holds one
// vector of inputs per tap, oldest first, w the weights of each tap.
func Conv(dst []float32, w, u [][]float32) { active.Load().conv(dst, w, u) }

// KDAStep advances the recurrence of one head by one token (spec C.7 step 6) and
// writes its output to o. The state s is [len(k)][stride], of which the first
// len(v) columns are the head's; stride is a multiple of 8.
func KDAStep(s []float32, stride int, decay, k, q, v []float32, beta float32, o []float32) {
	active.Load().kdaStep(s, stride, decay, k[:len(decay)], q[:len(decay)], v, beta, o[:len(v)])
}

// Weights turns the unbiased scores of one row's chosen experts, in ascending
// expert id, into combination weights (spec C.11 step 3): s / (Sum(s) + 1e-20) * scale
// when renormalising, else s * scale.
func Weights(dst, s []float32, renormalize bool, scale float32) {
	z := Sum(s) + 1e-20
	for i, v := range s {
		if renormalize {
			v /= z
		}
		dst[i] = v * scale
	}
}

// MixDepth is the attention over depth (spec C.3): out = sum of p[i] * v[i], p =
// softmax(Dot(fold, v[i]) * inv[i]), for the n = len(inv) rows of v in ascending
// order, the running stream last. inv[i] is [InvRMS] of v[i].
func MixDepth(out []float32, v Mat, fold, inv []float32, scratch *Scratch) {
	p, n := active.Load(), len(inv)
	e := make([]float32, n)
	m := float32(0)
	for i := range e {
		e[i] = float32(p.dot(fold, v.Row(i)) * inv[i])
		if i == 0 || e[i] > m {
			m = e[i]
		}
	}
	for i := range e {
		e[i] -= m
	}
	p.exp(e, e)
	var z float32
	for i, x := range e {
		if i == 0 {
			z = x
		} else {
			z += x
		}
	}
	for i := range e {
		e[i] /= z
	}
	clear(out)
	w := FloatMatrix(n, v.Cols, v.Stride, v.Data)
	p.chain(out, len(out), &w, e, n, 1, scratch)
}

// ArgMax is the index of the largest value, the lowest one among equals.
func ArgMax(x []float32) int {
	best := 0
	for i, v := range x {
		if v > x[best] {
			best = i
		}
	}
	return best
}

// Finite reports whether x has neither a NaN nor an infinity.
func Finite(x []float32) bool {
	for _, v := range x {
		if v-v != 0 {
			return false
		}
	}
	return true
}

package reference

import "math"

// Matrix is W of y = W x, [Rows][Cols] row-major; a row makes one output.
type Matrix[F Float] struct {
	Rows, Cols int
	Data       []F
}

// Row is row i, shared with the matrix.
func (m Matrix[F]) Row(i int) []F { return m.Data[i*m.Cols : (i+1)*m.Cols : (i+1)*m.Cols] }

// Mul is W x: x [Cols] gives [Rows].
func (m Matrix[F]) Mul(x []F) []F {
	y := make([]F, m.Rows)
	for i := range y {
		y[i] = Dot(m.Row(i), x)
	}
	return y
}

// Dot is the sum of a[i] b[i], in ascending order.
func Dot[F Float](a, b []F) F {
	var s F
	b = b[:len(a)]
	for i, v := range a {
		s += v * b[i]
	}
	return s
}

// Add is a + b, elementwise, in a new vector.
func Add[F Float](a, b []F) []F {
	y := make([]F, len(a))
	for i := range y {
		y[i] = a[i] + b[i]
	}
	return y
}

// Argmax is the index of the largest value, the lowest among equals.
func Argmax[F Float](x []F) int {
	best := 0
	for i, v := range x {
		if v > x[best] {
			best = i
		}
	}
	return best
}

// Exp is e^x rounded to F.
func Exp[F Float](x F) F { return F(math.Exp(float64(x))) }

// Tanh is tanh(x) rounded to F.
func Tanh[F Float](x F) F { return F(math.Tanh(float64(x))) }

// Sqrt is the correctly rounded square root.
func Sqrt[F Float](x F) F { return F(math.Sqrt(float64(x))) }

// Sigmoid is 1 / (1 + e^-x), without overflow on either side.
func Sigmoid[F Float](x F) F {
	if x >= 0 {
		return 1 / (1 + Exp(-x))
	}
	e := Exp(x)
	return e / (1 + e)
}

// SiLU is x sigmoid(x).
func SiLU[F Float](x F) F { return x * Sigmoid(x) }

// Softmax is e^(s-max) over its sum, in a new vector.
func Softmax[F Float](s []F) []F {
	top := s[Argmax(s)]
	p := make([]F, len(s))
	var z F
	for i, v := range s {
		p[i] = Exp(v - top)
		z += p[i]
	}
	for i := range p {
		p[i] /= z
	}
	return p
}

// RMSNorm is w x / sqrt(mean(x^2) + eps) (spec C.4); x and w have one length.
func RMSNorm[F Float](x, w []F, eps float64) []F {
	r := 1 / Sqrt(Dot(x, x)/F(len(x))+F(eps))
	y := make([]F, len(x))
	for i := range y {
		y[i] = x[i] * r * w[i]
	}
	return y
}

// L2NormEps is added to the SUM of squares under the root, not to their mean (spec C.7
// step 3, F.4). The configuration does not carry it.
const L2NormEps = 1e-6

// L2Norm is x / sqrt(sum(x^2) + L2NormEps).
func L2Norm[F Float](x []F) []F {
	r := 1 / Sqrt(Dot(x, x)+F(L2NormEps))
	y := make([]F, len(x))
	for i := range y {
		y[i] = x[i] * r
	}
	return y
}

// SiTUGLU is b1 tanh(g/b1) sigmoid(g) b2 tanh(u/b2) elementwise (spec C.9): the sigmoid
// sees the uncapped gate.
func SiTUGLU[F Float](gate, up []F, b1, b2 float64) []F {
	y := make([]F, len(gate))
	for i, g := range gate {
		y[i] = F(b1) * Tanh(g/F(b1)) * Sigmoid(g) * (F(b2) * Tanh(up[i]/F(b2)))
	}
	return y
}

// AttnResMix is the attention over depth (spec C.3). sources are the banked vectors in
// order and the running stream last, each [hidden]. Scores use the normalised values, the
// sum the raw ones. out is [hidden], probs [sources].
func AttnResMix[F Float](sources [][]F, norm, proj []F, eps float64) (out, probs []F) {
	s := make([]F, len(sources))
	for i, v := range sources {
		var dot F
		for d := range v {
			dot += norm[d] * proj[d] * v[d]
		}
		s[i] = dot / Sqrt(Dot(v, v)/F(len(v))+F(eps))
	}
	probs = Softmax(s)
	out = make([]F, len(sources[0]))
	for i, v := range sources {
		for d := range out {
			out[d] += probs[i] * v[d]
		}
	}
	return out, probs
}

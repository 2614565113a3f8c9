package kernel

import "math"

// The elementwise functions are fixed sequences of binary32 operations. Each is
// within 2 ulp of the true value for every input; see TestElementwiseAccuracy.

// Coefficients of exp on [-ln2/2, ln2/2]: exp(r) = 1 + r*(1 + r*(expC0 + expC1*r + ...)).
// The polynomial is that of the Cephes library's expf (S. Moshier), public domain.
const (
	log2e  = 1.44269504088896341
	ln2Hi  = 0.693359375
	ln2Lo  = -2.12194440e-4
	expMin = -104 // 2^-150.04: rounds to 0
	expMax = 89   // overflows
	// magic pushes the integer part of a small float into the low mantissa bits.
	magic = 12582912 // 1.5 * 2^23

	expC0 = 5.0000001201e-1
	expC1 = 1.6666665459e-1
	expC2 = 4.1665795894e-2
	expC3 = 8.3334519073e-3
	expC4 = 1.3981999507e-3
	expC5 = 1.9875691500e-4

	// tanh(a) = a + a*z*(tanhC0 + tanhC1*z + ...) for a <= tanhSmall, z = a*a (Cephes tanhf).
	tanhSmall = 0.625
	tanhC0    = -3.33332819422e-1
	tanhC1    = 1.33314422036e-1
	tanhC2    = -5.37397155531e-2
	tanhC3    = 2.06390887954e-2
	tanhC4    = -5.70498872745e-3
)

// exp1 is e^x: +0 below about -103.97, +Inf above about 88.72.
func exp1(x float32) float32 {
	if x < expMin {
		x = expMin
	}
	if x > expMax {
		x = expMax
	}
	t := FMA(x, log2e, magic)
	n := int32(math.Float32bits(t)) - int32(math.Float32bits(magic))
	f := t - magic
	r := FMA(f, -ln2Hi, x)
	r = FMA(f, -ln2Lo, r)
	p := FMA(expC5, r, expC4)
	p = FMA(p, r, expC3)
	p = FMA(p, r, expC2)
	p = FMA(p, r, expC1)
	p = FMA(p, r, expC0)
	p = FMA(p, r, 1)
	y := FMA(p, r, 1)
	// Two factors, so that a subnormal result is rounded once and the factors stay normal.
	h := n >> 1
	y *= math.Float32frombits(uint32(h+127) << 23)
	return y * math.Float32frombits(uint32(n-h+127)<<23)
}

func abs1(x float32) float32 { return math.Float32frombits(math.Float32bits(x) &^ (1 << 31)) }

// sigmoid1 is 1 / (1 + e^-x). The quotient is corrected once with what was lost
// in rounding 1 + e: without that step it is up to 2.4 ulp off.
func sigmoid1(x float32) float32 {
	e := exp1(-abs1(x))
	n := e
	if x >= 0 {
		n = 1
	}
	d := 1 + e
	lo := e - (d - 1)
	c := 1 / d
	y := n * c
	r := FMA(-y, d, n)
	r = FMA(-y, lo, r)
	return FMA(r, c, y)
}

// tanh1 is the hyperbolic tangent.
func tanh1(x float32) float32 {
	a := abs1(x)
	var y float32
	if a < tanhSmall {
		z := a * a
		p := FMA(tanhC4, z, tanhC3)
		p = FMA(p, z, tanhC2)
		p = FMA(p, z, tanhC1)
		p = FMA(p, z, tanhC0)
		y = FMA(p*z, a, a)
	} else {
		y = 1 - 2/(exp1(a+a)+1)
	}
	return math.Float32frombits(math.Float32bits(y) | math.Float32bits(x)&(1<<31))
}

func silu1(x float32) float32 { return x * sigmoid1(x) }

// situ1 is one element of SiTU-GLU (spec C.9).
func situ1(g, u, beta, linear float32) float32 {
	a := float32(beta*tanh1(g/beta)) * sigmoid1(g)
	return a * float32(linear*tanh1(u/linear))
}

// invRMS is 1 / sqrt(mean square + eps) of x from its sum of squares.
func invRMS(squares float32, n int, eps float32) float32 {
	return 1 / sqrt(squares/float32(n)+eps)
}

// sqrt is correctly rounded: binary64 has more than twice the digits needed.
func sqrt(x float32) float32 { return float32(math.Sqrt(float64(x))) }

// defExp .. defGate are the slice forms of the definitions; dst may be the source.
func defExp(dst, x []float32) {
	for i, v := range x {
		dst[i] = exp1(v)
	}
}

func defSigmoid(dst, x []float32) {
	for i, v := range x {
		dst[i] = sigmoid1(v)
	}
}

func defTanh(dst, x []float32) {
	for i, v := range x {
		dst[i] = tanh1(v)
	}
}

func defSiTU(dst, g, u []float32, beta, linear float32) {
	for i, v := range g {
		dst[i] = situ1(v, u[i], beta, linear)
	}
}

// defScaleMul: dst = (x * inv) * w.
func defScaleMul(dst, x, w []float32, inv float32) {
	for i, v := range x {
		dst[i] = float32(v*inv) * w[i]
	}
}

// defGate: dst = x * sigmoid(g).
func defGate(dst, x, g []float32) {
	for i, v := range x {
		dst[i] = v * sigmoid1(g[i])
	}
}

// defAdd: dst = x + y.
func defAdd(dst, x, y []float32) {
	for i, v := range x {
		dst[i] = v + y[i]
	}
}

// defAxpy: dst = fma(a, x, dst).
func defAxpy(dst, x []float32, a float32) {
	for i, v := range x {
		dst[i] = FMA(a, v, dst[i])
	}
}

// defScale: dst = x * a.
func defScale(dst, x []float32, a float32) {
	for i, v := range x {
		dst[i] = v * a
	}
}

// defDecay: dst = exp(lower * sigmoid(a * (z + bias))) (spec C.7 step 4).
func defDecay(dst, z, bias []float32, a, lower float32) {
	for i, v := range z {
		dst[i] = exp1(lower * sigmoid1(a*float32(v+bias[i])))
	}
}

// defConv: dst[c] = silu(sum over taps j ascending of w[j][c] * u[j][c]), fused onto +0.
func defConv(dst []float32, w, u [][]float32) {
	for c := range dst {
		var a float32
		for j := range w {
			a = FMA(w[j][c], u[j][c], a)
		}
		dst[c] = silu1(a)
	}
}

// defKDAStep advances one head by one token (spec C.7 step 6). s is the state
// [len(k)][stride], of which the first len(v) columns are used.
func defKDAStep(s []float32, stride int, decay, k, q, v []float32, beta float32, o []float32) {
	n := len(v)
	u := make([]float32, n)
	for i, d := range decay {
		row := s[i*stride:][:n]
		for c, x := range row {
			x *= d
			row[c] = x
			u[c] = FMA(k[i], x, u[c])
		}
	}
	for c := range u {
		u[c] = beta * float32(v[c]-u[c])
	}
	clear(o[:n])
	for i := range decay {
		row := s[i*stride:][:n]
		for c, x := range row {
			x = FMA(k[i], u[c], x)
			row[c] = x
			o[c] = FMA(q[i], x, o[c])
		}
	}
}

// defChain: y[c] = fma(x[j], w[j][c], y[c]) for j ascending; w is a matrix whose
// rows are the terms, y has w.Cols values.
func defChain(y []float32, w *Matrix, x []float32) {
	row := make([]float32, w.Cols)
	for j, v := range x {
		w.Widen(row, j)
		defAxpy(y, row, v)
	}
}

// defScaleDiv: dst = dst / a.
func defScaleDiv(dst []float32, a float32) {
	for i, v := range dst {
		dst[i] = v / a
	}
}

package kernel

import (
	"flag"
	"math"
	"testing"
)

// -stride 1 visits all 2^32 inputs (minutes).
var inputStride = flag.Uint("stride", 4099, "TestElementwiseAccuracy visits every stride-th float32")

// ulps is the distance of y from the true value in units of the last place of a
// binary32 at that value; an overflow to infinity counts as the next power of two.
func ulps(y float32, truth float64, least int) float64 {
	_, e := math.Frexp(truth)
	ulp := math.Ldexp(1, max(e-24, least))
	v := float64(y)
	if math.IsInf(v, 0) {
		v = math.Copysign(math.Ldexp(1, 128), v)
		if math.Abs(truth) > math.Abs(v) {
			return 0
		}
	}
	return math.Abs(v-truth) / ulp
}

func sigmoid64(x float64) float64 {
	if x < 0 {
		return math.Exp(x) / (1 + math.Exp(x))
	}
	return 1 / (1 + math.Exp(-x))
}

// TestElementwiseAccuracy: every stride-th float32, all exponents and both signs.
func TestElementwiseAccuracy(t *testing.T) {
	situ := func(dst, x []float32) {
		one := make([]float32, len(x))
		for i := range one {
			one[i] = 25
		}
		SiTU(dst, x, one, 4, 25)
	}
	for _, c := range []struct {
		name  string
		bound float64
		least int // an ulp is never taken smaller than 2^least
		f     func(dst, x []float32)
		truth func(x float64) float64
	}{
		{"exp", 2, -149, Exp, math.Exp},
		{"sigmoid", 2, -149, Sigmoid, sigmoid64},
		{"tanh", 2, -149, Tanh, math.Tanh},
		// Products of functions that are within 2 ulp each; a subnormal sigmoid has
		// few digits, which its product with up to 104 shows.
		{"silu", 3, -142, func(dst, x []float32) { Gate(dst, x, x) }, func(x float64) float64 { return x * sigmoid64(x) }},
		{"situ(g, 25)", 8, -142, situ, func(x float64) float64 {
			return 4 * math.Tanh(x/4) * sigmoid64(x) * 25 * math.Tanh(1)
		}},
	} {
		var worst float64
		var at float32
		x, y := make([]float32, 4096), make([]float32, 4096)
		check := func(n int) {
			c.f(y[:n], x[:n])
			for i, v := range x[:n] {
				if u := ulps(y[i], c.truth(float64(v)), c.least); !(u <= worst) {
					worst, at = u, v
				}
			}
		}
		n := 0
		for b := uint64(0); b < 1<<32; b += uint64(*inputStride) {
			v := math.Float32frombits(uint32(b))
			if v-v != 0 {
				continue
			}
			x[n] = v
			if n++; n == len(x) {
				check(n)
				n = 0
			}
		}
		check(n)
		t.Logf("%-12s worst %.3f ulp at %v (%#08x)", c.name, worst, at, math.Float32bits(at))
		if !(worst <= c.bound) {
			t.Errorf("%s: %.3f ulp at %v, bound %v", c.name, worst, at, c.bound)
		}
	}
}

func TestElementwiseSpecialValues(t *testing.T) {
	inf, nan, zero := float32(math.Inf(1)), float32(math.NaN()), float32(math.Copysign(0, -1))
	for _, c := range []struct {
		name    string
		f       func(dst, x []float32)
		x, want float32
	}{
		{"exp", Exp, 0, 1},
		{"exp", Exp, zero, 1},
		{"exp", Exp, inf, inf},
		{"exp", Exp, -inf, 0},
		{"exp", Exp, nan, nan},
		{"exp", Exp, 88.72284, inf},
		{"exp", Exp, -103.97208, math.SmallestNonzeroFloat32},
		{"exp", Exp, -104, 0},
		{"sigmoid", Sigmoid, 0, .5},
		{"sigmoid", Sigmoid, inf, 1},
		{"sigmoid", Sigmoid, -inf, 0},
		{"sigmoid", Sigmoid, nan, nan},
		{"tanh", Tanh, 0, 0},
		{"tanh", Tanh, zero, zero},
		{"tanh", Tanh, inf, 1},
		{"tanh", Tanh, -inf, -1},
		{"tanh", Tanh, nan, nan},
	} {
		y := []float32{0}
		c.f(y, []float32{c.x})
		if !same(y[0], c.want) {
			t.Errorf("%s(%v) = %v, want %v", c.name, c.x, y[0], c.want)
		}
	}
}

package kernel

import (
	"fmt"
	"math"
	"sync/atomic"
)

// primitives are the operations that an implementation provides. Everything
// else in this package is composed of them, so two implementations that agree
// on these agree on the model. Slices of one call have the lengths that the
// portable definitions (def*) assume.
type primitives struct {
	name string

	dot     func(x, y []float32) float32
	sum     func(x []float32) float32
	exp     func(dst, x []float32)
	sigmoid func(dst, x []float32)
	tanh    func(dst, x []float32)
	situ    func(dst, g, u []float32, beta, linear float32)
	// scaleMul: dst = (x * inv) * w.
	scaleMul func(dst, x, w []float32, inv float32)
	gate     func(dst, x, g []float32)
	add      func(dst, x, y []float32)
	axpy     func(dst, x []float32, a float32)
	scale    func(dst, x []float32, a float32)
	scaleDiv func(dst []float32, a float32) // dst = dst / a
	decay    func(dst, z, bias []float32, a, lower float32)
	conv     func(dst []float32, w, u [][]float32)
	kdaStep  func(s []float32, stride int, decay, k, q, v []float32, beta float32, o []float32)

	// chain: y[r][c] = fma(x[r][j], w[j][c], y[r][c]) for j ascending, for rows rows of
	// y (stride ys, w.Cols values) and x (stride xs, w.Rows values).
	chain func(y []float32, ys int, w *Matrix, x []float32, xs, rows int, scratch *Scratch)

	// pack writes x, whole blocks, to dst in the order of mxPlace.
	pack func(dst, x []float32) span

	// gemm: y[r*ys+o-lo] = dot(w row o, x row r) for lo <= o < hi and all rows of x, which
	// are w.Stride values, in the order of mxPlace if w is MXFP4.
	gemm func(y []float32, ys int, w *Matrix, lo, hi int, x *acts, scratch *Scratch)
}

// acts are the activations of a gemm: rows rows, stride values apart.
type acts struct {
	data         []float32
	stride, rows int
	span         span // of all rows, if packed for MXFP4
}

// span is the range of magnitudes of some values, as bits: the least that is not
// zero (all ones if there is none) and the greatest, which tells infinities and NaNs.
type span struct{ least, most uint32 }

var noSpan = span{least: math.MaxUint32}

func (s span) union(t span) span { return span{min(s.least, t.least), max(s.most, t.most)} }

func spanOf(x []float32) span {
	s := noSpan
	for _, v := range x {
		b := math.Float32bits(v) &^ (1 << 31)
		s.most = max(s.most, b)
		if b != 0 {
			s.least = min(s.least, b)
		}
	}
	return s
}

// Scratch is a worker's private memory; buf grows to what a kernel asks for.
type Scratch struct{ buf []float32 }

// Floats returns n values of unspecified content, cache-line aligned, valid until the next
// call.
func (s *Scratch) Floats(n int) []float32 {
	if len(s.buf) < n {
		s.buf = Floats(n)
	}
	return s.buf[:n]
}

// portable is the definition.
var portable = primitives{
	name: "portable",
	dot:  dotF32, sum: sum, exp: defExp, sigmoid: defSigmoid, tanh: defTanh, situ: defSiTU,
	scaleMul: defScaleMul, gate: defGate, add: defAdd, axpy: defAxpy, scale: defScale, scaleDiv: defScaleDiv,
	decay: defDecay, conv: defConv, kdaStep: defKDAStep,
	chain: func(y []float32, ys int, w *Matrix, x []float32, xs, rows int, _ *Scratch) {
		for r := range rows {
			defChain(y[r*ys:][:w.Cols], w, x[r*xs:][:w.Rows])
		}
	},
	pack: func(dst, x []float32) span {
		permute(dst, x)
		return spanOf(x)
	},
	gemm: defGemm,
}

func defGemm(y []float32, ys int, w *Matrix, lo, hi int, x *acts, _ *Scratch) {
	b, k := w.rowBytes(), w.Stride/Lane32
	for r := range x.rows {
		xr := x.data[r*x.stride:][:w.Stride]
		for o := lo; o < hi; o++ {
			row := w.Data[o*b:][:b]
			var v float32
			switch w.Format {
			case MXFP4:
				v = dotMXFP4(row, w.Scale[o*k:][:k], xr)
			case Int8:
				v = dotRow(Int8, row, xr) * w.RowScale[o]
			default:
				v = dotRow(w.Format, row, xr)
			}
			y[r*ys+o-lo] = v
		}
	}
}

// implementations lists what this binary has for this processor, best last.
var implementations = []*primitives{&portable}

var active atomic.Pointer[primitives]

func init() { active.Store(&portable) }

// Implementations names the forms of the kernels that can run here, best last.
func Implementations() []string {
	var names []string
	for _, p := range implementations {
		names = append(names, p.name)
	}
	return names
}

// Active names the form in use.
func Active() string { return active.Load().name }

// Use makes the named form the one in use, for the whole process. It changes
// speed only: all forms give the same bits.
func Use(name string) error {
	for _, p := range implementations {
		if p.name == name {
			active.Store(p)
			return nil
		}
	}
	return fmt.Errorf("kernels %q do not run on this processor: have %v", name, Implementations())
}

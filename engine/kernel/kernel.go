// Package kernel decides one thing: in which order every floating-point
// operation of the model happens.
//
// For one checkpoint and one token sequence the logits are one fixed sequence
// of bits, on every processor, for every thread count and every number of rows
// computed together. There is one way to hold that: fix the order inside each
// output element, and let everything else (which outputs run where, how many
// at once, from which copy of the weights) be free. This package is that
// order. The portable Go functions in it are the definition; assembly stands
// behind them and must give the same bits for every input.
//
// # The dot product
//
// [Dot] is the only reduction over a hidden dimension. Its length is padded
// with zeros to a multiple of [Lane32] = 32. Eight lanes start at +0; lane j takes
// elements j, j+8, j+16, ... in ascending order with a fused multiply-add. The
// lanes are then added as a fixed tree (see tree). MXFP4 weights are reduced per
// block of 32: each lane forms a partial of its four elements with the unscaled
// e2m1 values, and the block's scale enters with one more fused multiply-add
// (see dotMXFP4).
//
// # Rounding
//
// Everything is IEEE-754 binary32, round to nearest even, with subnormals. A
// product that is added without fusing is written float32(a*b) + c, because Go
// may fuse a*b + c on some processors; a fused one is [FMA].
//
// # Forms
//
// The definition runs everywhere. On amd64 assembly takes its place at start-up:
// "avx2" where the processor has AVX2 and FMA, and "avx512" (F, BW, VL, DQ), which
// is avx2 with other tiles for MXFP4, and for bf16 and int8 with one row. [Use]
// chooses another form, for tests and measurements; the build tag noasm leaves
// only the definition. The assembly is written by the program in gen ('go generate')
// and compared with the definition bit for bit by forms_test.go.
//
// How fast they are against what the processor can do is measured by kernelbench.
// On an EPYC of family 26 (Zen 5, two cores shared with other work), medians
// against AVX2 read bandwidth (one row) and 256-bit FMA peak (more rows), one
// thread / two:
//
//	                  avx512     avx2
//	mxfp4, 1 row      62 / 59%   41 / 44%
//	bf16, 1 row       93 / 100%  89 / 95%
//	int8, 1 row       84 / 90%   73 / 81%
//	mxfp4, 4 rows     80 / 87%   69 / 69%
//	mxfp4, 16 rows    91 / 97%   76 / 76%
//	mxfp4, 64 rows    89 / 91%   82 / 83%
//	bf16, 16 rows     the same   85 / 87%
//
// One activation in forty being subnormal halves the speed of mxfp4 with one row
// there (5.1 against 10.0 GB/s of packed weights with avx2); the bits are the same.
package kernel

// Lane32 is the granule of a dot product: lengths are padded to a multiple of
// it, which is also the block length of MXFP4.
const Lane32 = 32

// Pad returns n rounded up to a multiple of [Lane32].
func Pad(n int) int { return (n + Lane32 - 1) &^ (Lane32 - 1) }

// Mat is a view of activations: Rows rows of Cols float32 values, Stride values
// apart. Data[r*Stride+c] is row r, column c.
type Mat struct {
	Rows, Cols, Stride int
	Data               []float32
}

// NewMat returns a zeroed [rows][cols] Mat whose stride is [Pad](cols).
func NewMat(rows, cols int) Mat {
	s := Pad(cols)
	return Mat{rows, cols, s, Floats(rows * s)}
}

// Row returns row r, cols values long.
func (m Mat) Row(r int) []float32 { return m.Data[r*m.Stride:][:m.Cols:m.Cols] }

// Slice returns rows lo..hi-1 as a view.
func (m Mat) Slice(lo, hi int) Mat {
	m.Data, m.Rows = m.Data[lo*m.Stride:], hi-lo
	return m
}

// ColSlice returns columns lo..hi-1 of every row as a view.
func (m Mat) ColSlice(lo, hi int) Mat {
	if m.Rows == 0 {
		m.Cols = hi - lo
		return m
	}
	m.Data, m.Cols = m.Data[lo:], hi-lo
	return m
}

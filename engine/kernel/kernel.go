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
// "avx2" where the processor has AVX2 and FMA, and "avx512" where it has AVX-512 F, BW,
// VL and DQ too. A 512-bit register carries two outputs of eight lanes, or sixteen
// independent elements, so the order within an output stays. [Use] chooses another
// form, for tests and measurements; the build tag noasm leaves only the definition. The
// assembly is written by the program in gen ('go generate') and compared with the
// definition bit for bit by forms_test.go.
//
// How fast they are against what the processor can do is measured by kernelbench;
// docs/kernels.md has the figures, what was tried, and why the forms are as they are.
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

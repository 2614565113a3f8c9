package kernel

import (
	"fmt"
	"math"
	"unsafe"
)

// Format is how the weights of a [Matrix] are stored.
type Format uint8

// The weight formats. Each widens to binary32 exactly.
const (
	F32   Format = iota // little-endian binary32
	BF16                // upper half of a binary32
	Int8                // signed byte; a row's result is multiplied by its scale once
	MXFP4               // e2m1 nibbles, even column in the low one, and an E8M0 scale per 32 columns (spec B.3)
)

var formats = []Format{F32, BF16, Int8, MXFP4}

func (f Format) String() string { return [...]string{"f32", "bf16", "int8", "mxfp4"}[f] }

// Matrix is a weight matrix [Rows][Cols], row-major, rows being outputs.
//
// A row occupies Stride weights of Data, a multiple of [Lane32] that is at least
// Cols; the weights from Cols to Stride are zero. Scale holds, for MXFP4, the
// E8M0 bytes [Rows][Stride/32]. RowScale holds, for Int8, one factor per row.
type Matrix struct {
	Format             Format
	Rows, Cols, Stride int
	Data               []byte
	Scale              []byte
	RowScale           []float32
}

// rowBytes is the size of one row of Data.
func (m *Matrix) rowBytes() int {
	switch m.Format {
	case F32:
		return m.Stride * 4
	case BF16:
		return m.Stride * 2
	case Int8:
		return m.Stride
	default:
		return m.Stride / 2
	}
}

// Bytes is the size of the weights and their scales.
func (m *Matrix) Bytes() int64 {
	return int64(len(m.Data)) + int64(len(m.Scale)) + 4*int64(len(m.RowScale))
}

// NewMatrix makes a Matrix of the given form over data as a checkpoint stores
// it, [rows][cols] without padding. When cols is a multiple of [Lane32] data is
// used in place, otherwise it is copied into padded rows.
func NewMatrix(f Format, rows, cols int, data, scale []byte) (*Matrix, error) {
	m := &Matrix{Format: f, Rows: rows, Cols: cols, Stride: cols}
	want := rows * m.rowBytes()
	if len(data) != want {
		return nil, fmt.Errorf("%v matrix [%d][%d] needs %d bytes of weights, got %d", f, rows, cols, want, len(data))
	}
	m.Data = data
	if f == MXFP4 {
		if cols%Lane32 != 0 || len(scale) != rows*cols/Lane32 {
			return nil, fmt.Errorf("mxfp4 matrix [%d][%d] needs a multiple of %d columns and %d scales, got %d", rows, cols, Lane32, rows*cols/Lane32, len(scale))
		}
		m.Scale = scale
		return m, nil
	}
	if cols%Lane32 == 0 {
		return m, nil
	}
	from := m.rowBytes()
	m.Stride = Pad(cols)
	to := m.rowBytes()
	m.Data = Bytes(rows * to)
	for r := range rows {
		copy(m.Data[r*to:], data[r*from:][:from])
	}
	return m, nil
}

// Sub returns rows lo..hi-1 as a matrix over the same memory.
func (m *Matrix) Sub(lo, hi int) *Matrix {
	s, b := *m, m.rowBytes()
	s.Rows, s.Data = hi-lo, m.Data[lo*b:hi*b]
	if m.Scale != nil {
		k := m.Stride / Lane32
		s.Scale = m.Scale[lo*k : hi*k]
	}
	if m.RowScale != nil {
		s.RowScale = m.RowScale[lo:hi]
	}
	return &s
}

// FloatMatrix is an F32 matrix over float32 rows that are stride values apart,
// stride being a multiple of [Lane32]; values from cols to stride must be zero.
func FloatMatrix(rows, cols, stride int, data []float32) Matrix {
	return Matrix{Format: F32, Rows: rows, Cols: cols, Stride: stride, Data: AsBytes(data[:rows*stride])}
}

// Widen writes row r of m to dst, Cols values, each exact. For Int8 the row's
// scale is multiplied in with one rounding.
func (m *Matrix) Widen(dst []float32, r int) {
	row := m.Data[r*m.rowBytes():][:m.rowBytes()]
	for c := range dst[:m.Cols] {
		switch m.Format {
		case F32, BF16, Int8:
			dst[c] = weight(m.Format, row, c)
			if m.Format == Int8 {
				dst[c] *= m.RowScale[r]
			}
		default:
			dst[c] = e2m1[row[c/2]>>(c%2*4)&15] * Scale(m.Scale[r*m.Stride/Lane32+c/Lane32])
		}
	}
}

// e2m1 is the value of a four-bit float: sign, two exponent bits, one mantissa bit.
var e2m1 = [16]float32{0, .5, 1, 1.5, 2, 3, 4, 6, float32(math.Copysign(0, -1)), -.5, -1, -1.5, -2, -3, -4, -6}

// scales is the value of every E8M0 byte; 255 is NaN.
var scales = func() (t [256]float32) {
	for i := range 255 {
		t[i] = float32(math.Ldexp(1, i-127))
	}
	t[255] = float32(math.NaN())
	return t
}()

// Scale is the value of an E8M0 byte: 2^(e-127), subnormal for 0, NaN for 255.
func Scale(e byte) float32 { return scales[e] }

// weight returns element c of a row of F32, BF16 or Int8 weights.
func weight(f Format, row []byte, c int) float32 {
	switch f {
	case F32:
		return math.Float32frombits(uint32(row[4*c]) | uint32(row[4*c+1])<<8 | uint32(row[4*c+2])<<16 | uint32(row[4*c+3])<<24)
	case BF16:
		return math.Float32frombits(uint32(row[2*c])<<16 | uint32(row[2*c+1])<<24)
	default:
		return float32(int8(row[c]))
	}
}

// align is the alignment of all buffers of this package: a cache line.
const align = 64

// Bytes returns n zero bytes that start on a cache line.
func Bytes(n int) []byte {
	b := make([]byte, n+align)
	o := int(-uintptr(unsafe.Pointer(&b[0])) & (align - 1))
	return b[o : o+n : o+n]
}

// Floats returns n zeros that start on a cache line.
func Floats(n int) []float32 {
	if n == 0 {
		return nil
	}
	return unsafe.Slice((*float32)(unsafe.Pointer(&Bytes(4 * n)[0])), n)
}

// AsBytes views float32 values as little-endian bytes.
func AsBytes(f []float32) []byte {
	if len(f) == 0 {
		return nil
	}
	return unsafe.Slice((*byte)(unsafe.Pointer(&f[0])), 4*len(f))
}

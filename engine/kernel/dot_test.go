package kernel

import (
	"math"
	"math/rand/v2"
	"testing"
)

// random fills a slice with values around 1, among them zeros of both signs and a few
// subnormal ones.
func random(rng *rand.Rand, n int) []float32 {
	x := Floats(n)
	for i := range x {
		switch rng.IntN(40) {
		case 0:
			x[i] = math.Float32frombits(rng.Uint32() & 0x80000000)
		case 1:
			x[i] = math.Float32frombits(rng.Uint32() & 0x807fffff)
		default:
			x[i] = float32(rng.NormFloat64())
		}
	}
	return x
}

// randomMatrix has scales of about 1/16 and never a NaN or an infinity among its weights.
func randomMatrix(rng *rand.Rand, f Format, rows, cols int) *Matrix {
	m := &Matrix{Format: f, Rows: rows, Cols: cols, Stride: Pad(cols)}
	m.Data = Bytes(rows * m.rowBytes())
	for r := range rows {
		row := m.Data[r*m.rowBytes():][:m.rowBytes()]
		switch f {
		case F32:
			copy(row, AsBytes(random(rng, cols)))
		case BF16:
			for c, v := range random(rng, cols) {
				b := math.Float32bits(v) >> 16
				row[2*c], row[2*c+1] = byte(b), byte(b>>8)
			}
		case Int8:
			for c := range cols {
				row[c] = byte(rng.Uint32())
			}
		default:
			for c := range cols {
				row[c/2] |= byte(rng.IntN(16)) << (c % 2 * 4)
			}
		}
	}
	switch f {
	case Int8:
		m.RowScale = random(rng, rows)
	case MXFP4:
		m.Scale = Bytes(rows * m.Stride / Lane32)
		for i := range m.Scale {
			m.Scale[i] = byte(120 + rng.IntN(8))
		}
	}
	return m
}

// spelledDot is the contract's dot product written without this package: pad to a
// multiple of 32, eight lanes, tree.
func spelledDot(w, x []float32) float32 {
	for len(w)%32 != 0 {
		w, x = append(w[:len(w):len(w)], 0), append(x[:len(x):len(x)], 0)
	}
	var lane [8]float32
	for j := range lane {
		for i := j; i < len(w); i += 8 {
			lane[j] = exactFMA(w[i], x[i], lane[j])
		}
	}
	return ((lane[0] + lane[4]) + (lane[2] + lane[6])) + ((lane[1] + lane[5]) + (lane[3] + lane[7]))
}

// mxSteps lists, for lane 0..7, the columns of a block of 32 in the order in which
// the contract adds them.
var mxSteps = [8][4]int{
	{0, 2, 16, 18},
	{4, 6, 20, 22},
	{8, 10, 24, 26},
	{12, 14, 28, 30},
	{1, 3, 17, 19},
	{5, 7, 21, 23},
	{9, 11, 25, 27},
	{13, 15, 29, 31},
}

func spelledMX(m *Matrix, o int, x []float32) float32 {
	var lane [8]float32
	for b := range m.Cols / 32 {
		for j := range lane {
			var p float32
			for step, c := range mxSteps[j] {
				n := m.Data[o*m.Cols/2+b*16+c/2] >> (c % 2 * 4) & 15
				w := [8]float32{0, .5, 1, 1.5, 2, 3, 4, 6}[n&7]
				if n >= 8 {
					w = -w
				}
				if step == 0 {
					p = w * x[b*32+c]
				} else {
					p = exactFMA(w, x[b*32+c], p)
				}
			}
			s := float32(math.Ldexp(1, int(m.Scale[o*m.Cols/32+b])-127))
			lane[j] = exactFMA(s, p, lane[j])
		}
	}
	return ((lane[0] + lane[4]) + (lane[2] + lane[6])) + ((lane[1] + lane[5]) + (lane[3] + lane[7]))
}

func TestDotHasTheContractsOrder(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 4))
	for n := 0; n < 200; n += 1 + n/9 {
		x, y := random(rng, n), random(rng, n)
		if got, want := Dot(x, y), spelledDot(x, y); !same(got, want) {
			t.Errorf("Dot of %d = %x, want %x", n, got, want)
		}
		one := make([]float32, n)
		for i := range one {
			one[i] = 1
		}
		if got, want := Sum(x), spelledDot(one, x); !same(got, want) {
			t.Errorf("Sum of %d = %x, want %x", n, got, want)
		}
	}
}

// TestMatMulIsDot: every output of every format is the spelled-out dot product of
// the widened row, whatever the column count.
func TestMatMulIsDot(t *testing.T) {
	rng := rand.New(rand.NewPCG(5, 6))
	p := NewPool(1)
	for _, f := range formats {
		for _, cols := range []int{1, 8, 31, 32, 33, 96, 200} {
			if f == MXFP4 {
				cols = Pad(cols)
			}
			m := randomMatrix(rng, f, 5, cols)
			x, y := Mat{1, cols, cols, random(rng, cols)}, NewMat(1, m.Rows)
			p.MatMul(Job{Y: y, X: x, W: m})
			row := make([]float32, cols)
			for o := range m.Rows {
				m.Widen(row, o)
				var want float32
				switch f {
				case MXFP4:
					want = spelledMX(m, o, x.Data)
				case Int8:
					for c := range row {
						row[c] = float32(int8(m.Data[o*m.rowBytes()+c]))
					}
					want = spelledDot(row, x.Data) * m.RowScale[o]
				default:
					want = spelledDot(row, x.Data)
				}
				if !same(y.Data[o], want) {
					t.Errorf("%v %d columns, output %d: %x, want %x", f, cols, o, y.Data[o], want)
				}
			}
		}
	}
}

func TestMXPlaceIsThePermutationOfTheContract(t *testing.T) {
	for lane, steps := range mxSteps {
		for step, c := range steps {
			if got := mxPlace(c); got != step*8+lane {
				t.Errorf("column %d goes to %d, want step %d, lane %d", c, got, step, lane)
			}
			if mxColumn[step*8+lane] != uint8(c) {
				t.Errorf("mxColumn[%d] = %d, want %d", step*8+lane, mxColumn[step*8+lane], c)
			}
		}
	}
}

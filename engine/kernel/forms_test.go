package kernel

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"
	"unsafe"
)

// A form of a primitive is tested by running it and the definition on the same
// inputs. Inputs end at an unreadable page, so reading too far is a crash, and
// outputs lie between words that must not change.

// kinds of float inputs; NaNs are compared as NaNs.
var kinds = map[string]func(rng *rand.Rand) float32{
	"plain":     func(rng *rand.Rand) float32 { return float32(rng.NormFloat64()) },
	"wide":      func(rng *rand.Rand) float32 { return float32(math.Ldexp(rng.NormFloat64(), rng.IntN(16)-8)) },
	"tiny":      func(rng *rand.Rand) float32 { return float32(math.Ldexp(rng.NormFloat64(), -rng.IntN(150))) },
	"subnormal": func(rng *rand.Rand) float32 { return math.Float32frombits(rng.Uint32() & 0x807fffff) },
	"huge":      func(rng *rand.Rand) float32 { return float32(math.Ldexp(rng.NormFloat64(), 100+rng.IntN(26))) },
	"zeros":     func(rng *rand.Rand) float32 { return math.Float32frombits(rng.Uint32() & 0x80000000) },
	"boundary": func(rng *rand.Rand) float32 {
		v := [...]uint32{0, 1, 0x7fffff, 0x800000, 0x3f800000, 0x3f7fffff, 0x3f1fffff, 0x3f200000, 0x7f7fffff, 0x42b17218, 0x42cff1b5, 0x42d00000, 0x4b400000, 0x7f800000}
		return math.Float32frombits(v[rng.IntN(len(v))] | rng.Uint32()&0x80000000)
	},
	"any bits": func(rng *rand.Rand) float32 { return math.Float32frombits(rng.Uint32()) },
}

type arena struct {
	t    testing.TB
	rng  *rand.Rand
	draw func(rng *rand.Rand) float32
	all  [][]float32
}

const guard = 0x7fa5a5a5

// floats returns n drawn values ending at a fence, with eight guard words before them.
func (a *arena) floats(n int) []float32 {
	b := fenced(a.t, 4*(n+8))
	f := unsafe.Slice((*float32)(unsafe.Pointer(&b[0])), n+8)
	for i := range f {
		if i < 8 {
			f[i] = math.Float32frombits(guard)
		} else {
			f[i] = a.draw(a.rng)
		}
	}
	a.all = append(a.all, f)
	return f[8:len(f):len(f)]
}

// twins returns two equal slices of their own.
func (a *arena) twins(n int) (x, y []float32) {
	x, y = a.floats(n), a.floats(n)
	copy(y, x)
	return x, y
}

func (a *arena) bytes(n int) []byte { return fenced(a.t, n) }

// check looks at the guard words.
func (a *arena) check(what string) {
	a.t.Helper()
	for i, f := range a.all {
		for j := range 8 {
			if math.Float32bits(f[j]) != guard {
				a.t.Errorf("%s: wrote before slice %d", what, i)
			}
		}
	}
	a.all = a.all[:0]
}

// forEachForm runs f for every implementation but the definition, every kind of input.
func forEachForm(t *testing.T, f func(t *testing.T, p *primitives, a *arena, what string)) {
	if len(implementations) == 1 {
		t.Skip("NOT RUN: this binary has only the definition")
	}
	for _, p := range implementations[1:] {
		for kind, draw := range kinds {
			t.Run(p.name+"/"+kind, func(t *testing.T) {
				f(t, p, &arena{t: t, rng: rand.New(rand.NewPCG(13, 14)), draw: draw}, p.name+", "+kind)
			})
		}
	}
}

func TestElementwiseFormsEqualTheDefinition(t *testing.T) {
	type op struct {
		name string
		run  func(p *primitives, dst, x, y []float32)
	}
	ops := []op{
		{"exp", func(p *primitives, dst, x, _ []float32) { p.exp(dst, x) }},
		{"sigmoid", func(p *primitives, dst, x, _ []float32) { p.sigmoid(dst, x) }},
		{"tanh", func(p *primitives, dst, x, _ []float32) { p.tanh(dst, x) }},
		{"situ", func(p *primitives, dst, x, y []float32) { p.situ(dst, x, y, 4, 25) }},
		{"scaleMul", func(p *primitives, dst, x, y []float32) { p.scaleMul(dst, x, y, 1.1) }},
		{"gate", func(p *primitives, dst, x, y []float32) { p.gate(dst, x, y) }},
		{"add", func(p *primitives, dst, x, y []float32) { p.add(dst, x, y) }},
		{"axpy", func(p *primitives, dst, x, y []float32) { copy(dst, y); p.axpy(dst, x, -1.3) }},
		{"scale", func(p *primitives, dst, x, _ []float32) { p.scale(dst, x, .7) }},
		{"scale in place", func(p *primitives, dst, x, _ []float32) { copy(dst, x); p.scale(dst, dst, .7) }},
		{"exp in place", func(p *primitives, dst, x, _ []float32) { copy(dst, x); p.exp(dst, dst) }},
		{"scaleDiv", func(p *primitives, dst, x, _ []float32) { copy(dst, x); p.scaleDiv(dst, 3.3) }},
		{"decay", func(p *primitives, dst, x, y []float32) { p.decay(dst, x, y, 1.7, -5) }},
		{"conv", func(p *primitives, dst, x, y []float32) {
			p.conv(dst, [][]float32{x, y, x, y}, [][]float32{y, y, x, x})
		}},
	}
	forEachForm(t, func(t *testing.T, p *primitives, a *arena, what string) {
		for _, n := range []int{0, 1, 2, 7, 8, 9, 15, 16, 17, 31, 33, 64, 100} {
			for _, o := range ops {
				x, y := a.floats(n), a.floats(n)
				got, want := a.twins(n)
				o.run(&portable, want, x, y)
				o.run(p, got, x, y)
				where := fmt.Sprintf("%s: %s of %d", what, o.name, n)
				wantSame(t, where, got, want)
				a.check(where)
			}
		}
	})
}

func TestReductionFormsEqualTheDefinition(t *testing.T) {
	forEachForm(t, func(t *testing.T, p *primitives, a *arena, what string) {
		for n := 0; n < 300; n += 1 + n/7 {
			x, y := a.floats(n), a.floats(n)
			if got, want := p.dot(x, y), portable.dot(x, y); !same(got, want) {
				t.Errorf("%s: dot of %d is %x, want %x", what, n, got, want)
			}
			if got, want := p.sum(x), portable.sum(x); !same(got, want) {
				t.Errorf("%s: sum of %d is %x, want %x", what, n, got, want)
			}
		}
	})
}

func TestKDAFormsEqualTheDefinition(t *testing.T) {
	forEachForm(t, func(t *testing.T, p *primitives, a *arena, what string) {
		for _, c := range []struct{ k, v, stride int }{{1, 1, 8}, {5, 8, 8}, {16, 24, 32}, {8, 33, 40}, {128, 128, 128}, {7, 80, 96}, {3, 48, 64}} {
			s1, s2 := a.twins((c.k-1)*c.stride + Pad(c.v))
			if c.stride < Pad(c.v) {
				s1, s2 = s1[:c.k*c.stride], s2[:c.k*c.stride]
			}
			decay, k, q, v := a.floats(c.k), a.floats(c.k), a.floats(c.k), a.floats(c.v)
			o1, o2 := a.twins(c.v)
			portable.kdaStep(s1, c.stride, decay, k, q, v, .75, o1)
			p.kdaStep(s2, c.stride, decay, k, q, v, .75, o2)
			where := fmt.Sprintf("%s: kdaStep %+v", what, c)
			wantSame(t, where+" output", o2, o1)
			wantSame(t, where+" state", s2, s1)
			a.check(where)
		}
	})
}

// matrix draws a matrix whose weights, scales and row scales end at a fence.
func (a *arena) matrix(f Format, rows, cols, leastScale, mostScale int) *Matrix {
	m := &Matrix{Format: f, Rows: rows, Cols: cols, Stride: cols}
	m.Data = a.bytes(rows * m.rowBytes())
	for i := range m.Data {
		m.Data[i] = byte(a.rng.Uint32())
	}
	switch f {
	case F32:
		x := a.floats(rows * cols)
		copy(m.Data, AsBytes(x))
	case BF16:
		for i := range len(m.Data) / 2 {
			b := math.Float32bits(a.draw(a.rng)) >> 16
			m.Data[2*i], m.Data[2*i+1] = byte(b), byte(b>>8)
		}
	case Int8:
		m.RowScale = a.floats(rows)
	case MXFP4:
		m.Scale = a.bytes(rows * cols / Lane32)
		for i := range m.Scale {
			m.Scale[i] = byte(leastScale + a.rng.IntN(mostScale-leastScale+1))
		}
	}
	return m
}

func gemmForm(t testing.TB, p *primitives, a *arena, m *Matrix, lo, hi, rows, extra int, what string) {
	n, xs, ys := hi-lo, m.Stride+extra, hi-lo+extra
	x := a.floats((rows-1)*xs + m.Stride)
	if m.Format == MXFP4 {
		x = a.floats(rows * m.Stride)
		xs = m.Stride
	}
	acts := &acts{data: x, stride: xs, rows: rows, span: noSpan}
	if m.Format == MXFP4 {
		packed, want := a.floats(len(x)), a.floats(len(x))
		acts.span = p.pack(packed, x)
		if span := portable.pack(want, x); span != acts.span {
			t.Errorf("%s: span %x, want %x", what, acts.span, span)
		}
		wantSame(t, what+" packed", packed, want)
		acts.data = packed
	}
	got, want := a.twins((rows-1)*ys + n)
	defGemm(want, ys, m, lo, hi, acts, nil)
	p.gemm(got, ys, m, lo, hi, acts, &Scratch{})
	wantSame(t, what, got, want)
	a.check(what)
}

func TestGemmFormsEqualTheDefinition(t *testing.T) {
	forEachForm(t, func(t *testing.T, p *primitives, a *arena, what string) {
		type size struct{ outputs, lo, hi, cols, rows int }
		var sizes []size
		for rows := range 20 { // every tile and every cut into tiles
			sizes = append(sizes, size{17, 0, 17, 64, 1 + rows})
		}
		for _, f := range formats {
			for _, c := range append(sizes, []size{
				{1, 0, 1, 32, 1},
				{5, 1, 5, 64, 1},
				{48, 0, 48, 96, 1},
				{7, 0, 7, 32, 2},
				{13, 2, 13, 64, 3},
				{50, 1, 49, 160, 4},
				{3, 0, 3, 32, 5},
				{48, 0, 48, 448, 6},
				{14, 0, 14, 96, 7},
				{25, 1, 25, 64, 9},
				{13, 0, 13, 32, 66},
				{24, 0, 24, 288, 8},
				{19, 2, 19, 544, 17},
				{17, 0, 16, 1120, 5},
				{9, 1, 9, 64, 129},
			}...) {
				for _, s := range [][2]int{{120, 127}, {0, 30}, {0, 254}, {240, 255}} {
					if s[0] != 120 && (f != MXFP4 || c.outputs == 17) {
						continue
					}
					m := a.matrix(f, c.outputs, c.cols, s[0], s[1])
					gemmForm(t, p, a, m, c.lo, c.hi, c.rows, 3, fmt.Sprintf("%s: %v %+v, scales %v", what, f, c, s))
				}
			}
		}
	})
}

func TestChainFormsEqualTheDefinition(t *testing.T) {
	forEachForm(t, func(t *testing.T, p *primitives, a *arena, what string) {
		for _, f := range formats {
			for _, c := range []struct{ terms, cols, rows int }{{1, 1, 1}, {3, 8, 2}, {32, 40, 13}, {5, 33, 1}, {16, 64, 3}, {7, 200, 5}, {128, 512, 2}, {9, 300, 1}, {6, 72, 6}, {4, 136, 7}, {3, 130, 4}, {2, 64, 5}} {
				m := a.matrix(f, c.terms, Pad(c.cols), 120, 127)
				m.Cols = c.cols
				x := a.floats((c.rows-1)*(c.terms+2) + c.terms)
				y1, y2 := a.twins((c.rows-1)*(c.cols+5) + c.cols)
				portable.chain(y1, c.cols+5, m, x, c.terms+2, c.rows, &Scratch{})
				p.chain(y2, c.cols+5, m, x, c.terms+2, c.rows, &Scratch{})
				where := fmt.Sprintf("%s: chain %v %+v", what, f, c)
				wantSame(t, where, y2, y1)
				a.check(where)
			}
		}
	})
}

// FuzzGemmForms compares every form of every format on drawn sizes and values.
func FuzzGemmForms(f *testing.F) {
	f.Add(uint64(1), uint8(3), uint8(1), uint8(1), uint8(1), uint8(120), uint8(127), uint8(0))
	f.Add(uint64(2), uint8(3), uint8(50), uint8(20), uint8(64), uint8(0), uint8(255), uint8(2))
	f.Add(uint64(3), uint8(1), uint8(49), uint8(9), uint8(7), uint8(0), uint8(0), uint8(7))
	names := []string{"plain", "wide", "tiny", "subnormal", "huge", "zeros", "boundary", "any bits"}
	f.Fuzz(func(t *testing.T, seed uint64, format, outputs, blocks, rows, least, most, kind uint8) {
		least, most = min(least, most), max(least, most)
		out, b, r := 1+int(outputs)%56, 1+int(blocks)%24, 1+int(rows)%70
		for _, p := range implementations[1:] {
			a := &arena{t: t, rng: rand.New(rand.NewPCG(seed, 1)), draw: kinds[names[kind%8]]}
			m := a.matrix(formats[format%4], out, b*Lane32, int(least), int(most))
			lo := a.rng.IntN(out)
			gemmForm(t, p, a, m, lo, out, r, int(seed%9), p.name)
		}
	})
}

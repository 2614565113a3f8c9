package kernel

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"math/rand/v2"
)

// oneHash is the SHA-256 of all primitives' results on fixed inputs. It is the
// contract in one line: every form on every processor and operating system has it,
// and a change of it is a change of every logit.
const oneHash = "f1a01ab73e0aa56a7617b03ee4c93ef0ae74587e098f8e5454799f4db791c2ca"

// Check runs every form that this binary has for this processor, the definition
// included, on fixed inputs, which takes milliseconds. Its error names a form that does not
// give the bits that all must give.
func Check() error {
	for _, p := range implementations {
		if got := hashOf(p); got != oneHash {
			return fmt.Errorf("the %s kernels do not compute what they must: their results have the hash %.16s, expected %.16s", p.name, got, oneHash)
		}
	}
	return nil
}

func hashOf(p *primitives) string {
	rng := rand.New(rand.NewPCG(21, 22))
	// Integers only: the results must not depend on a math library.
	draw := func(n int) []float32 {
		x := Floats(n)
		for i := range x {
			x[i] = float32(int32(rng.Uint32())) / (1 << 29)
		}
		return x
	}
	h := sha256.New()
	put := func(x []float32) { h.Write(AsBytes(x)) }
	const n = 203
	x, y, dst := draw(n), draw(n), draw(n)
	put([]float32{p.dot(x, y), p.sum(x)})
	for _, f := range []func(){
		func() { p.exp(dst, x) },
		func() { p.sigmoid(dst, x) },
		func() { p.tanh(dst, x) },
		func() { p.situ(dst, x, y, 4, 25) },
		func() { p.scaleMul(dst, x, y, 1.1) },
		func() { p.gate(dst, x, y) },
		func() { p.add(dst, x, y) },
		func() { p.axpy(dst, x, -1.3) },
		func() { p.scale(dst, x, .7) },
		func() { p.scaleDiv(dst, 3.3) },
		func() { p.decay(dst, x, y, 1.7, -5) },
		func() { p.conv(dst, [][]float32{x, y, y, x}, [][]float32{y, y, x, x}) },
	} {
		f()
		put(dst)
	}
	state, out := draw(40*64), draw(48)
	p.kdaStep(state, 64, draw(40), draw(40), draw(40), draw(48), .75, out)
	put(state)
	put(out)
	for _, f := range formats {
		m := &Matrix{Format: f, Rows: 29, Cols: 416, Stride: 416}
		m.Data, m.Scale, m.RowScale = Bytes(29*m.rowBytes()), Bytes(29*416/Lane32), draw(29)
		w := draw(29 * 416)
		for i := range m.Data {
			switch f {
			case F32:
				m.Data[i] = AsBytes(w)[i]
			case BF16:
				m.Data[i] = AsBytes(w)[i/2*4+2+i%2]
			default:
				m.Data[i] = byte(rng.Uint32())
			}
		}
		for i := range m.Scale {
			m.Scale[i] = byte(118 + rng.IntN(8))
		}
		for _, rows := range []int{1, 3, 9} {
			a := &acts{data: draw(rows * 416), stride: 416, rows: rows, span: noSpan}
			if f == MXFP4 {
				packed := Floats(len(a.data))
				a.span = p.pack(packed, a.data)
				a.data = packed
			}
			y := Floats(rows * 29)
			p.gemm(y, 29, m, 0, 29, a, &Scratch{})
			put(y)
		}
		acc := draw(2 * 416)
		p.chain(acc, 416, m, draw(2*29), 29, 2, &Scratch{})
		put(acc)
	}
	return hex.EncodeToString(h.Sum(nil))
}

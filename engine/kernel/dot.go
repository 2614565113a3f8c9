package kernel

import (
	"encoding/binary"
	"math"
)

// tree adds the eight lanes: (((0+4)+(2+6)) + ((1+5)+(3+7))).
func tree(a *[8]float32) float32 {
	b0, b1, b2, b3 := a[0]+a[4], a[1]+a[5], a[2]+a[6], a[3]+a[7]
	c0, c1 := b0+b2, b1+b3
	return c0 + c1
}

// dotF32 is the definition of the dot product of x and y, equally long.
func dotF32(x, y []float32) float32 {
	var a [8]float32
	for i, v := range x {
		a[i&7] = FMA(v, y[i], a[i&7])
	}
	padLanes(&a, len(x))
	return tree(&a)
}

// padLanes does what the zeros from n to Pad(n) do to the lanes: adding +0 to a
// lane changes it only if it is -0.
func padLanes(a *[8]float32, n int) {
	for i := n; i < Pad(n); i++ {
		a[i&7] += 0
	}
}

// sum is Dot with weights 1: lane j adds elements j, j+8, ...
func sum(x []float32) float32 {
	var a [8]float32
	for i, v := range x {
		a[i&7] += v
	}
	padLanes(&a, len(x))
	return tree(&a)
}

// dotRow is the definition of the dot product of a row of F32, BF16 or Int8
// weights with x, both a multiple of Lane32 long.
func dotRow(f Format, row []byte, x []float32) float32 {
	var a [8]float32
	switch f {
	case F32:
		for i, v := range x {
			w := math.Float32frombits(binary.LittleEndian.Uint32(row[4*i:]))
			a[i&7] = FMA(w, v, a[i&7])
		}
	case BF16:
		for i, v := range x {
			w := math.Float32frombits(uint32(binary.LittleEndian.Uint16(row[2*i:])) << 16)
			a[i&7] = FMA(w, v, a[i&7])
		}
	default:
		for i, v := range x {
			a[i&7] = FMA(float32(int8(row[i])), v, a[i&7])
		}
	}
	return tree(&a)
}

// mxPlace says where column e of an MXFP4 block of 32 goes: position
// step*8 + lane. The AVX2 unpack (a nibble table lookup and a byte
// interleave) yields exactly this order: low nibbles (even columns) in lanes
// 0..3, high nibbles in lanes 4..7, and of each group of eight bytes the even
// ones before the odd ones.
func mxPlace(e int) int {
	lane := e&1*4 + e/2%8/2
	step := e/16*2 + e/2&1
	return step*8 + lane
}

// mxColumn is the inverse of mxPlace.
var mxColumn = func() (t [Lane32]uint8) {
	for e := range Lane32 {
		t[mxPlace(e)] = uint8(e)
	}
	return t
}()

// permute writes x, a multiple of Lane32 long, to dst in the order of mxPlace.
func permute(dst, x []float32) {
	for b := 0; b < len(x); b += Lane32 {
		d, s := (*[Lane32]float32)(dst[b:]), (*[Lane32]float32)(x[b:])
		for i, e := range mxColumn {
			d[i] = s[e]
		}
	}
}

// dotMXFP4 is the definition of the dot product of a row of MXFP4 weights with
// xp, the activations in the order of mxPlace. Per block of 32 and lane: the
// first product is rounded, three more are fused onto it, and the block's scale
// is fused into the lane's running sum.
func dotMXFP4(row, scale []byte, xp []float32) float32 {
	var a [8]float32
	for b, e := range scale {
		w, x, s := (*[16]byte)(row[b*16:]), (*[Lane32]float32)(xp[b*Lane32:]), Scale(e)
		for j := range 4 {
			b0, b1, b2, b3 := &e2m1Pair[w[2*j]], &e2m1Pair[w[2*j+1]], &e2m1Pair[w[2*j+8]], &e2m1Pair[w[2*j+9]]
			for nibble := range 2 {
				lane := nibble*4 + j
				p := b0[nibble] * x[lane]
				p = FMA(b1[nibble], x[8+lane], p)
				p = FMA(b2[nibble], x[16+lane], p)
				p = FMA(b3[nibble], x[24+lane], p)
				a[lane] = FMA(s, p, a[lane])
			}
		}
	}
	return tree(&a)
}

// e2m1Pair is the values of a byte's low and high nibble.
var e2m1Pair = func() (t [256][2]float32) {
	for b := range t {
		t[b] = [2]float32{e2m1[b&15], e2m1[b>>4]}
	}
	return t
}()

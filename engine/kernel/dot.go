package kernel

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
	for i, v := range x {
		a[i&7] = FMA(weight(f, row, i), v, a[i&7])
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
		for lane := range 8 {
			var p float32
			for step := range 4 {
				c := mxColumn[step*8+lane]
				v := e2m1[w[c/2]>>(c%2*4)&15]
				if step == 0 {
					p = v * x[lane]
				} else {
					p = FMA(v, x[step*8+lane], p)
				}
			}
			a[lane] = FMA(s, p, a[lane])
		}
	}
	return tree(&a)
}

package main

import (
	"fmt"
	"math"

	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

var e2m1 = [16]float32{0, .5, 1, 1.5, 2, 3, 4, 6, float32(math.Copysign(0, -1)), -.5, -1, -1.5, -2, -3, -4, -6}

// mxData are the constants of the MXFP4 unpack.
type mxData struct {
	shifts, low4, high16, tableHi, tableLo, scales Mem
	byte255, least, firstScales                    Mem // of the AVX-512 form
}

func bytes32(name string, f func(i int) byte) Mem {
	v := make([]uint32, 8)
	for i := range 32 {
		v[i/4] |= uint32(f(i)) << (i % 4 * 8)
	}
	return words(name, v...)
}

func newMXData() (d mxData) {
	d.shifts = words("mxShifts", 0, 0, 0, 0, 4, 4, 4, 4)
	d.low4 = repeat("mxLow4", 0x0f0f0f0f, 8)
	d.high16 = repeat("mxHigh16", 0xffff0000, 8)
	d.tableHi = bytes32("mxTableHi", func(i int) byte { return byte(math.Float32bits(e2m1[i&15]) >> 24) })
	d.tableLo = bytes32("mxTableLo", func(i int) byte { return byte(math.Float32bits(e2m1[i&15]) >> 16) })
	s := make([]uint32, 256)
	for e := range s {
		s[e] = math.Float32bits(float32(math.Ldexp(1, e-127)))
	}
	s[255] = 0x7fc00000
	d.scales = words("mxScales", s...)
	d.byte255, d.least = words("mx255", 255), words("mxLeast", 0x400000)
	d.firstScales = words("mxFirstScales", 0, 0, 0, 0, 0, 0, 0, 0, 8, 8, 8, 8, 8, 8, 8, 8)
	return d
}

// mxConst are the constants where the loop wants them: two loads a cycle are too
// few for a block's activations and its constants.
type mxConst struct {
	shifts, low4, high16, hi, lo Op
	table                        reg.GPVirtual
}

// load keeps n of the constants in registers, the others in memory.
func (d mxData) load(n int) mxConst {
	c := mxConst{shifts: d.shifts, low4: d.low4, high16: d.high16, table: GP64()}
	LEAQ(d.scales, c.table)
	for i, r := range []struct {
		m  Mem
		to *Op
	}{{d.tableHi, &c.hi}, {d.tableLo, &c.lo}, {d.high16, &c.high16}, {d.low4, &c.low4}, {d.shifts, &c.shifts}} {
		if i < n {
			v := YMM()
			VMOVDQU(r.m, v)
			*r.to = v
		}
	}
	return c
}

// scale broadcasts the value of the E8M0 byte at m. A table and not a shift to the
// exponent, because the byte 0 is a subnormal; it takes the load ports, which
// have room, and not the vector ones.
func (c mxConst) scale(m Mem) reg.VecVirtual {
	s, e := YMM(), GP64()
	MOVBLZX(m, e.As32())
	VBROADCASTSS(Mem{Base: c.table, Index: e, Scale: 4}, s)
	return s
}

// unpack expands the 16 bytes at m to the four steps of a block, in the order of
// mxPlace: broadcast, low nibbles to the low half and high ones to the high half,
// the two upper bytes of each value from a table (e2m1 fits in bf16), interleaved.
// Ten vector instructions for four vectors; use(step, v) may destroy v.
func (c mxConst) unpack(m Mem, use func(step int, v reg.VecVirtual)) {
	n, l := YMM(), YMM()
	VBROADCASTI128(m, n)
	VPSRLVD(c.shifts, n, n)
	VPAND(c.low4, n, n)
	VPSHUFB(n, c.lo, l)
	VPSHUFB(n, c.hi, n)
	for i := range 2 {
		w, v := YMM(), YMM()
		if i == 0 {
			VPUNPCKLBW(n, l, w)
		} else {
			VPUNPCKHBW(n, l, w)
		}
		VPSLLD(Imm(16), w, v)
		use(2*i, v)
		VPAND(c.high16, w, w)
		use(2*i+1, w)
	}
}

func mx(d mxData) {
	for _, s := range [][2]int{{1, 1}, {1, 2}, {1, 3}, {1, 4}} {
		d.fused(s[0], s[1])
	}
	d.expand()
	for t := 1; t <= 4; t++ {
		mxTile(3, t)
	}
	for t := 1; t <= 4; t++ {
		mxTile(1, t)
	}
	mxPack()
	byteSpan()
}

func (d mxData) fused(R, T int) {
	name := fmt.Sprintf("mxFused%dx%d", R, T)
	function(name, "func(w *byte, ws int, sc *byte, ss int, x *float32, xs int, acc *float32, as int, groups, blocks int)",
		fmt.Sprintf("%s: for groups of %d rows of w and %d rows of x, per block of 32 columns with scale s and per lane:", name, R, T),
		"	p = w[0]*x[0]; p = fma(w[i], x[i], p), i = 1..3; acc = fma(s, p, acc)")
	ws, ss, xs, as := param("ws"), param("ss"), param("xs"), param("as")
	w := strided{param("w"), ws, ws}
	sc := strided{param("sc"), ss, ss}
	x := strided{GP64(), xs, stride3(xs, T)}
	acc := strided{param("acc"), as, stride3(as, T)}
	groups := param("groups")
	c := d.load(min(5, 16-2*T*R-4))
	a := ymms(R * T)
	Label(name + "_group")
	for t := range T {
		for r := range R {
			VMOVUPS(acc.at(t, r*32), a[t*R+r])
		}
	}
	n := GP64()
	Load(Param("blocks"), n)
	Load(Param("x"), x.base)
	Label(name + "_block")
	PREFETCHT0(Mem{Base: w.base, Index: ws, Scale: 4}) // the same columns four rows on
	for r := range R {
		p := ymms(T)
		c.unpack(w.at(r, 0), func(step int, v reg.VecVirtual) {
			for t := range T {
				if step == 0 {
					VMULPS(x.at(t, 0), v, p[t])
				} else {
					VFMADD231PS(x.at(t, step*32), v, p[t])
				}
			}
		})
		s := c.scale(sc.at(r, 0))
		for t := range T {
			VFMADD231PS(s, p[t], a[t*R+r])
		}
	}
	ADDQ(I32(16), w.base)
	INCQ(sc.base)
	ADDQ(I32(128), x.base)
	DECQ(n)
	JNZ(LabelRef(name + "_block"))
	for t := range T {
		for r := range R {
			VMOVUPS(a[t*R+r], acc.at(t, r*32))
		}
	}
	Load(Param("blocks"), n)
	SUBQ(n, sc.base)
	SHLQ(Imm(4), n)
	SUBQ(n, w.base)
	LEAQ(Mem{Base: w.base, Index: ws, Scale: uint8(R)}, w.base)
	LEAQ(Mem{Base: sc.base, Index: ss, Scale: uint8(R)}, sc.base)
	ADDQ(I32(32*R), acc.base)
	DECQ(groups)
	JNZ(LabelRef(name + "_group"))
	end()
}

// expand writes scaled weights for the tiles.
func (d mxData) expand() {
	function("mxExpand", "func(dst *float32, w *byte, ws int, sc *byte, ss int, rows, blocks int)",
		"mxExpand: dst[row][32*blocks] = e2m1 * scale, in the order of mxPlace.")
	dst, ws, ss, rows := param("dst"), param("ws"), param("ss"), param("rows")
	w, sc := param("w"), param("sc")
	c, n := d.load(5), GP64()
	Label("mxExpand_row")
	Load(Param("blocks"), n)
	Label("mxExpand_block")
	PREFETCHT0(Mem{Base: w, Disp: 256}) // the next panel of the row
	s := c.scale(Mem{Base: sc})
	c.unpack(Mem{Base: w}, func(step int, v reg.VecVirtual) {
		VMULPS(s, v, v)
		VMOVUPS(v, Mem{Base: dst, Disp: step * 32})
	})
	ADDQ(I32(16), w)
	INCQ(sc)
	ADDQ(I32(128), dst)
	DECQ(n)
	JNZ(LabelRef("mxExpand_block"))
	Load(Param("blocks"), n)
	SUBQ(n, sc)
	ADDQ(ss, sc)
	SHLQ(Imm(4), n)
	SUBQ(n, w)
	ADDQ(ws, w)
	DECQ(rows)
	JNZ(LabelRef("mxExpand_row"))
	end()
}

// mxTile keeps the partials of a block in registers and the lanes in memory.
func mxTile(R, T int) {
	name := fmt.Sprintf("mxTile%dx%d", R, T)
	function(name, tileSignature,
		fmt.Sprintf("%s: for groups of %d rows of scaled weights and %d rows of x, per block and lane:", name, R, T),
		"	p = w[0]*x[0]; p = fma(w[i], x[i], p), i = 1..3; acc = acc + p")
	ws, xs, as := param("ws"), param("xs"), param("as")
	w := strided{param("w"), ws, stride3(ws, R)}
	x := strided{GP64(), xs, stride3(xs, T)}
	acc := strided{param("acc"), as, stride3(as, T)}
	groups, n := param("groups"), GP64()
	Label(name + "_group")
	Load(Param("blocks"), n)
	Load(Param("x"), x.base)
	Label(name + "_block")
	p := ymms(R * T)
	for j := range 4 {
		v := ymms(R)
		for r := range R {
			VMOVUPS(w.at(r, j*32), v[r])
		}
		for t := range T {
			xv := YMM()
			VMOVUPS(x.at(t, j*32), xv)
			for r := range R {
				if j == 0 {
					VMULPS(xv, v[r], p[t*R+r])
				} else {
					VFMADD231PS(xv, v[r], p[t*R+r])
				}
			}
		}
	}
	for t := range T {
		for r := range R {
			VADDPS(acc.at(t, r*32), p[t*R+r], p[t*R+r])
			VMOVUPS(p[t*R+r], acc.at(t, r*32))
		}
	}
	ADDQ(I32(128), w.base)
	ADDQ(I32(128), x.base)
	DECQ(n)
	JNZ(LabelRef(name + "_block"))
	nextTile(w, acc, ws, n, R)
	DECQ(groups)
	JNZ(LabelRef(name + "_group"))
	end()
}

func nextTile(w, acc strided, ws, n reg.GPVirtual, R int) {
	Load(Param("blocks"), n)
	SHLQ(Imm(7), n)
	SUBQ(n, w.base)
	for range R {
		ADDQ(ws, w.base)
	}
	ADDQ(I32(32*R), acc.base)
}

// mxPack permutes activations: of 16 columns, a 4x4 transposition with the even
// rows of the result in low halves and the odd ones in high halves.
func mxPack() {
	function("mxPack", "func(dst, x *float32, blocks int, span *[16]uint32)",
		"mxPack: dst = x in the order of mxPlace, per block of 32. span[0:8] takes the least value of",
		"bits(|x|)-1 and span[8:16] the greatest of bits(|x|), per lane, both from what is there.")
	dst, x, n, span := param("dst"), param("x"), param("blocks"), param("span")
	order, sign, one, least, most := YMM(), YMM(), YMM(), YMM(), YMM()
	VMOVDQU(words("mxOrder", 0, 4, 2, 6, 1, 5, 3, 7), order)
	VPCMPEQD(one, one, one)
	VPSRLD(Imm(1), one, sign)
	VMOVDQU(Mem{Base: span}, least)
	VMOVDQU(Mem{Base: span, Disp: 32}, most)
	Label("mxPack_block")
	for h := range 2 {
		a, b := YMM(), YMM()
		VMOVUPS(Mem{Base: x, Disp: h * 64}, a)
		VMOVUPS(Mem{Base: x, Disp: h*64 + 32}, b)
		for i, pick := range []uint64{0x44, 0xee} {
			v := YMM()
			VSHUFPS(Imm(pick), b, a, v)
			VPERMPS(v, order, v)
			VMOVUPS(v, Mem{Base: dst, Disp: h*64 + i*32})
		}
		for _, v := range []reg.VecVirtual{a, b} {
			VPAND(sign, v, v)
			VPMAXUD(v, most, most)
			VPADDD(one, v, v)
			VPMINUD(v, least, least)
		}
	}
	ADDQ(I32(128), x)
	ADDQ(I32(128), dst)
	DECQ(n)
	JNZ(LabelRef("mxPack_block"))
	VMOVDQU(least, Mem{Base: span})
	VMOVDQU(most, Mem{Base: span, Disp: 32})
	end()
}

// byteSpan finds the least and greatest scale of a run.
func byteSpan() {
	function("byteSpan", "func(p *byte, n int, least, most *[32]byte)",
		"byteSpan: least and most, per byte, of n bytes at p and of what is there; n is a multiple of 32.")
	p, n, lp, mp := param("p"), param("n"), param("least"), param("most")
	least, most, v := YMM(), YMM(), YMM()
	VMOVDQU(Mem{Base: lp}, least)
	VMOVDQU(Mem{Base: mp}, most)
	Label("byteSpan_loop")
	VMOVDQU(Mem{Base: p}, v)
	VPMINUB(v, least, least)
	VPMAXUB(v, most, most)
	ADDQ(I32(32), p)
	SUBQ(Imm(32), n)
	JNZ(LabelRef("byteSpan_loop"))
	VMOVDQU(least, Mem{Base: lp})
	VMOVDQU(most, Mem{Base: mp})
	end()
}

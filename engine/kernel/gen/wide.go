package main

import (
	"fmt"
	"math"

	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// The AVX-512 forms: a 512-bit register carries the eight lanes of two outputs, row
// r in its lower half and row r+1 in its upper one, so the order within an output
// is that of AVX2.

func zmms(n int) []reg.VecVirtual {
	v := make([]reg.VecVirtual, n)
	for i := range v {
		v[i] = ZMM()
	}
	return v
}

// upper is the mask of a pair's upper half.
func upper() reg.OpmaskVirtual {
	g, k := GP32(), K()
	MOVL(U32(0xff00), g)
	KMOVW(g, k)
	return k
}

type mxWide struct {
	shifts, values, zero reg.VecVirtual
	table                reg.GPVirtual
	upper                reg.OpmaskVirtual
}

var mxWideData struct {
	shifts, values Mem
	made           bool
}

// loadWide needs the scales of d.
func (d mxData) loadWide() (c mxWide) {
	m := &mxWideData
	if !m.made {
		m.made = true
		m.shifts = words("mxShifts512", 0, 0, 0, 0, 4, 4, 4, 4, 0, 0, 0, 0, 4, 4, 4, 4)
		v := make([]uint32, 16)
		for i := range 32 {
			v[i/2] |= math.Float32bits(e2m1[i&15]) >> 16 << (i % 2 * 16)
		}
		m.values = words("mxValues512", v...)
	}
	c.shifts, c.values, c.zero = ZMM(), ZMM(), ZMM()
	VMOVDQU32(m.shifts, c.shifts)
	VMOVDQU32(m.values, c.values)
	VPXORD(c.zero, c.zero, c.zero)
	c.table, c.upper = GP64(), upper()
	LEAQ(d.scales, c.table)
	return c
}

// unpack expands a block of the rows at a and b. The wanted nibbles come to the
// low bits of bytes; two 32-entry lookups (VPERMW, whose fifth index bit the table
// ignores) turn even and odd bytes into bf16, which are in the order of the lanes
// already and only have to move to the upper halves of 32-bit words. Nine vector
// instructions for four vectors of sixteen.
func (c mxWide) unpack(a, b Mem, use func(step int, v reg.VecVirtual)) {
	n := ZMM()
	VBROADCASTI32X4(a, n)
	VBROADCASTI32X4(b, c.upper, n)
	VPSRLVD(c.shifts, n, n)
	even, odd := ZMM(), ZMM()
	VPERMW(c.values, n, even)
	VPSRLD(Imm(8), n, n)
	VPERMW(c.values, n, odd)
	for step := range 4 {
		from, v := []reg.VecVirtual{even, odd}[step&1], ZMM()
		if step < 2 {
			VPUNPCKLWD(from, c.zero, v)
		} else {
			VPUNPCKHWD(from, c.zero, v)
		}
		use(step, v)
	}
}

func (c mxWide) scale(a, b Mem) reg.VecVirtual {
	s, e := ZMM(), GP64()
	MOVBLZX(a, e.As32())
	VBROADCASTSS(Mem{Base: c.table, Index: e, Scale: 4}, s)
	MOVBLZX(b, e.As32())
	VBROADCASTSS(Mem{Base: c.table, Index: e, Scale: 4}, c.upper, s)
	return s
}

func wide(d mxData) {
	d.thin512(2, 2)
	d.thin512(1, 3)
	d.thin512(1, 4)
	gemvWide("Int8", 1)
	gemvWide("BF16", 2)
	d.gemv512()
}

// gemv512: eight rows, one of x, eight blocks at a time. On a core whose other
// thread is busy the number of instructions is the limit, so the scales of eight
// blocks are made together (one VPERMPS then gives a pair's two) and nothing is
// computed twice.
func (d mxData) gemv512() {
	const P = 3
	name := "mxWide6x1"
	function(name, "func(w *byte, ws int, sc *byte, ss int, x *float32, acc *float32, groups, eights int)",
		name+" does what mxFused1x1 does for groups of 6 rows of w and 8 blocks at a time.")
	ws, ss := param("ws"), param("ss")
	ws3, ss3 := stride3(ws, 4), stride3(ss, 4)
	w, w4 := strided{param("w"), ws, ws3}, strided{GP64(), ws, ws3}
	sc, sc4 := strided{param("sc"), ss, ss3}, strided{GP64(), ss, ss3}
	row := func(a, a4 strided, r, disp int) Mem {
		if r < 4 {
			return a.at(r, disp)
		}
		return a4.at(r-4, disp)
	}
	x, acc, n := GP64(), param("acc"), GP64()
	c := d.loadWide()
	one := ZMM()
	VPTERNLOGD(Imm(0xff), one, one, one)
	VPSRLD(Imm(31), one, one)
	a, s := zmms(P), zmms(P)
	Label(name + "_group")
	LEAQ(Mem{Base: w.base, Index: ws, Scale: 4}, w4.base)
	LEAQ(Mem{Base: sc.base, Index: ss, Scale: 4}, sc4.base)
	for p := range P {
		VMOVUPS(Mem{Base: acc, Disp: p * 64}, a[p])
	}
	Load(Param("eights"), n)
	Load(Param("x"), x)
	Label(name + "_eight")
	// The same columns six rows on, two lines of each row.
	next := strided{GP64(), ws, ws3}
	LEAQ(Mem{Base: w4.base, Index: ws, Scale: 2}, next.base)
	for r := range 2 * P {
		if r == 3 {
			LEAQ(Mem{Base: next.base, Index: ws3, Scale: 1}, next.base)
		}
		PREFETCHT0(next.at(r%3, 0))
		PREFETCHT0(next.at(r%3, 64))
	}
	for p := range P {
		b, nan := XMM(), K()
		VMOVQ(row(sc, sc4, 2*p, 0), b)
		VMOVHPS(row(sc, sc4, 2*p+1, 0), b, b)
		VPMOVZXBD(b, s[p])
		VPCMPEQD_BCST(d.byte255, s[p], nan)
		VPSLLD(Imm(23), s[p], s[p])
		// The byte 0 is 2^-127, a subnormal; 255 is a NaN.
		VPMAXUD_BCST(d.least, s[p], s[p])
		VPORD_BCST(d.least, s[p], nan, s[p])
	}
	which := ZMM()
	VMOVDQU32(d.firstScales, which)
	v := make([][4]reg.VecVirtual, P)
	unpack := func(b, p int) {
		c.unpack(row(w, w4, 2*p, 16*b), row(w, w4, 2*p+1, 16*b), func(step int, f reg.VecVirtual) { v[p][step] = f })
	}
	for p := range P {
		unpack(0, p)
	}
	for b := range 8 {
		xv := zmms(4)
		for step := range 4 {
			VBROADCASTF32X8(Mem{Base: x, Disp: 128*b + 32*step}, xv[step])
		}
		for p := range P {
			part, f := ZMM(), ZMM()
			VPERMPS(s[p], which, f)
			VMULPS(xv[0], v[p][0], part)
			for step := 1; step < 4; step++ {
				VFMADD231PS(xv[step], v[p][step], part)
			}
			VFMADD231PS(f, part, a[p])
			if b < 7 {
				unpack(b+1, p)
			}
		}
		if b < 7 {
			VPADDD(one, which, which)
		}
	}
	ADDQ(U32(128), w.base)
	ADDQ(U32(128), w4.base)
	ADDQ(Imm(8), sc.base)
	ADDQ(Imm(8), sc4.base)
	ADDQ(U32(1024), x)
	DECQ(n)
	JNZ(LabelRef(name + "_eight"))
	for p := range P {
		VMOVUPS(a[p], Mem{Base: acc, Disp: p * 64})
	}
	Load(Param("eights"), n)
	SHLQ(Imm(3), n)
	SUBQ(n, sc.base)
	SHLQ(Imm(4), n)
	SUBQ(n, w.base)
	LEAQ(Mem{Base: w.base, Index: ws, Scale: 4}, w.base)
	LEAQ(Mem{Base: w.base, Index: ws, Scale: 2}, w.base)
	LEAQ(Mem{Base: sc.base, Index: ss, Scale: 4}, sc.base)
	LEAQ(Mem{Base: sc.base, Index: ss, Scale: 2}, sc.base)
	ADDQ(U32(64*P), acc)
	Load(Param("groups"), n)
	DECQ(n)
	Store(n, Param("groups"))
	JNZ(LabelRef(name + "_group"))
	end()
}

// thin512 is fused for P pairs of rows.
func (d mxData) thin512(P, T int) {
	name := fmt.Sprintf("mxWide%dx%d", 2*P, T)
	function(name, "func(w *byte, ws int, sc *byte, ss int, x *float32, xs int, acc *float32, as int, groups, blocks int)",
		fmt.Sprintf("%s does what mxFused1x%d does for groups of %d rows of w.", name, T, 2*P))
	ws, ss, xs, as := param("ws"), param("ss"), param("xs"), param("as")
	w := strided{param("w"), ws, stride3(ws, 2*P)}
	sc := strided{param("sc"), ss, stride3(ss, 2*P)}
	x := strided{GP64(), xs, stride3(xs, T)}
	acc := strided{param("acc"), as, stride3(as, T)}
	c := d.loadWide()
	a := zmms(P * T)
	Label(name + "_group")
	for t := range T {
		for p := range P {
			VMOVUPS(acc.at(t, p*64), a[t*P+p])
		}
	}
	n, n4 := GP64(), GP64()
	Load(Param("blocks"), n)
	Load(Param("x"), x.base)
	Label(name + "_block")
	LEAQ(Mem{Base: w.base, Index: ws, Scale: 4}, n4)
	for r := range 2 * P { // the same columns four rows on
		PREFETCHT0(strided{n4, ws, w.s3}.at(r, 0))
	}
	xv := zmms(4 * T)
	for i := range xv {
		if P > 1 {
			VBROADCASTF32X8(x.at(i/4, i%4*32), xv[i])
		}
	}
	for p := range P {
		part := zmms(T)
		c.unpack(w.at(2*p, 0), w.at(2*p+1, 0), func(step int, v reg.VecVirtual) {
			for t := range T {
				if P == 1 {
					VBROADCASTF32X8(x.at(t, step*32), xv[t*4+step])
				}
				if step == 0 {
					VMULPS(xv[t*4+step], v, part[t])
				} else {
					VFMADD231PS(xv[t*4+step], v, part[t])
				}
			}
		})
		s := c.scale(sc.at(2*p, 0), sc.at(2*p+1, 0))
		for t := range T {
			VFMADD231PS(s, part[t], a[t*P+p])
		}
	}
	ADDQ(I32(16), w.base)
	INCQ(sc.base)
	ADDQ(I32(128), x.base)
	DECQ(n)
	JNZ(LabelRef(name + "_block"))
	for t := range T {
		for p := range P {
			VMOVUPS(a[t*P+p], acc.at(t, p*64))
		}
	}
	Load(Param("blocks"), n)
	SUBQ(n, sc.base)
	SHLQ(Imm(4), n)
	SUBQ(n, w.base)
	LEAQ(Mem{Base: w.base, Index: ws, Scale: uint8(2 * P)}, w.base)
	LEAQ(Mem{Base: sc.base, Index: ss, Scale: uint8(2 * P)}, sc.base)
	ADDQ(I32(int32(64*P)), acc.base)
	Load(Param("groups"), n)
	DECQ(n)
	Store(n, Param("groups"))
	JNZ(LabelRef(name + "_group"))
	end()
}

// gemvWide: eight rows, one of x. Fewer instructions than eight rows of AVX2 leave
// more of the reorder buffer to loads on their way from memory.
func gemvWide(f string, size int) {
	const P = 4
	name := fmt.Sprintf("tile%sWide8x1", f)
	function(name, tileSignature, fmt.Sprintf("%s does what tile%s4x1 does for groups of 8 rows.", name, f))
	ws := param("ws")
	ws3 := stride3(ws, 4)
	w := strided{param("w"), ws, ws3}
	v := strided{GP64(), ws, ws3}
	x, acc, groups, n := GP64(), param("acc"), param("groups"), GP64()
	row := func(r, disp int) Mem {
		if r < 4 {
			return w.at(r, disp)
		}
		return v.at(r-4, disp)
	}
	var spread [2]reg.VecVirtual
	var high reg.OpmaskVirtual
	if f == "BF16" {
		for j := range spread {
			t := make([]uint32, 16)
			for i := range t {
				t[i] = uint32(i/8*16+j*8+i%8) << 16
			}
			spread[j] = ZMM()
			VMOVDQU32(words(fmt.Sprintf("spread512x%d", j), t...), spread[j])
		}
		k := GP32()
		high = K()
		MOVL(U32(0xaaaaaaaa), k)
		KMOVD(k, high)
	}
	a := zmms(P)
	ahead := newPrefetcher(ws, 2*P, size)
	Label(name + "_group")
	LEAQ(Mem{Base: w.base, Index: ws, Scale: 4}, v.base)
	for p := range P {
		VMOVUPS(Mem{Base: acc, Disp: p * 64}, a[p])
	}
	Load(Param("blocks"), n)
	Load(Param("x"), x)
	Label(name + "_block")
	ahead.fetch(w.base, ws, ws3, n, 4, 2, size)
	xv := zmms(4)
	for j := range 4 {
		VBROADCASTF32X8(Mem{Base: x, Disp: j * 32}, xv[j])
	}
	for h := range 2 {
		for p := range P {
			if f == "BF16" {
				// Sixteen columns of two rows; their words go to the upper halves of dwords.
				v := ZMM()
				VMOVDQU32(row(2*p, h*32), v.AsY())
				VINSERTI64X4(Imm(1), row(2*p+1, h*32), v, v)
				for j := range 2 {
					e := ZMM()
					VPERMW_Z(v, spread[j], high, e)
					VFMADD231PS(xv[2*h+j], e, a[p])
				}
				continue
			}
			for j := 2 * h; j < 2*h+2; j++ {
				b, e := XMM(), ZMM()
				VMOVQ(row(2*p, j*8), b)
				VMOVHPS(row(2*p+1, j*8), b, b)
				VPMOVSXBD(b, e)
				VCVTDQ2PS(e, e)
				VFMADD231PS(xv[j], e, a[p])
			}
		}
	}
	ADDQ(I32(int32(32*size)), w.base)
	ADDQ(I32(int32(32*size)), v.base)
	ADDQ(I32(128), x)
	DECQ(n)
	JNZ(LabelRef(name + "_block"))
	for p := range P {
		VMOVUPS(a[p], Mem{Base: acc, Disp: p * 64})
	}
	Load(Param("blocks"), n)
	IMUL3Q(I32(int32(32*size)), n, n)
	SUBQ(n, w.base)
	LEAQ(Mem{Base: w.base, Index: ws, Scale: 8}, w.base)
	ADDQ(I32(64*P), acc)
	DECQ(groups)
	JNZ(LabelRef(name + "_group"))
	end()
}

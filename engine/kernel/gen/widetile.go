package main

import (
	"fmt"

	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// The AVX-512 tiles: four pairs of weight rows times up to six rows of x. Of 32
// registers 24 are accumulators, four the weights of the pairs and one the
// activations: ten loads feed 24 multiply-adds.
const (
	pairs   = 4
	maxWide = 6
)

func wideTiles(d mxData) {
	for _, f := range []string{"BF16", "Int8", "F32", "Panel"} {
		for t := 2; t <= maxWide; t++ {
			if f != "Panel" || t > 2 { // seven rows are 4 and 3
				wideTile(f, t)
			}
		}
	}
	panel("BF16")
	panel("Int8")
	panel("F32")
	for t := 1; t <= maxWide; t++ {
		chainWide("BF16", t)
		if t > 1 { // one row waits for its loads
			chainWide("F32", t)
		}
	}
	sixteen = true
	functions()
	kda(4)
	kda(1)
	sixteen = false
	d.panelMX()
	for t := 2; t <= 3; t++ {
		panelTileMX(t)
	}
}

// rows6 addresses up to six rows: three from each of two bases.
type rows6 struct{ lo, hi, s reg.GPVirtual }

// split sets hi three rows behind lo, if T rows need it.
func (a *rows6) split(T int) {
	if T > 3 {
		LEAQ(Mem{Base: a.s, Index: a.s, Scale: 2}, a.hi)
		ADDQ(a.lo, a.hi)
	}
}

func (a *rows6) move(by Op, T int) {
	ADDQ(by, a.lo)
	if T > 3 {
		ADDQ(by, a.hi)
	}
}

func (a *rows6) at(t, disp int) Mem {
	base := a.lo
	if t >= 3 {
		base, t = a.hi, t-3
	}
	if t == 0 {
		return Mem{Base: base, Disp: disp}
	}
	return Mem{Base: base, Index: a.s, Scale: uint8(t), Disp: disp}
}

// pairWidener leaves eight weights of two rows as float32 in the halves of a register.
// The first row is loaded as a broadcast: it costs what a load costs and writes the
// whole register.
type pairWidener struct {
	f      string
	spread reg.VecVirtual
	high   reg.OpmaskVirtual
}

func newPairWidener(f string) (c pairWidener) {
	c.f = f
	if f == "BF16" {
		c.spread, c.high = ZMM(), upper()
		m := spreadWords()
		VBROADCASTI64X4(m, c.spread)
	}
	return c
}

func (c pairWidener) widen(a, b Mem, v reg.VecVirtual) {
	switch c.f {
	case "BF16":
		VBROADCASTI32X4(a, v)
		VBROADCASTI32X4(b, c.high, v)
		VPSHUFB(c.spread, v, v)
	case "Int8":
		VMOVQ(a, v.AsX())
		VMOVHPS(b, v.AsX(), v.AsX())
		VPMOVSXBD(v.AsX(), v)
		VCVTDQ2PS(v, v)
	default:
		VBROADCASTF32X8(a, v)
		VINSERTF32X8(Imm(1), b, v, v)
	}
}

func wideTile(f string, T int) {
	size := map[string]int{"BF16": 2, "Int8": 1, "F32": 4}[f]
	name := fmt.Sprintf("tile%sWide8x%d", f, T)
	if f == "Panel" {
		function(name, "func(w *float32, x *float32, xs int, acc *float32, as int, blocks int)",
			fmt.Sprintf("%s: for 8 rows of w, widened by a panel function, and %d rows of x (xs bytes apart):", name, T),
			"	acc[t][r][lane] = fma(w[r][8i+lane], x[t][8i+lane], acc[t][r][lane]), i = 0 .. 4*blocks-1")
	} else {
		function(name, tileSignature, fmt.Sprintf("%s does what tile%s4x%d does for groups of 8 rows of w and %d of x.", name, f, T, T))
	}
	x := rows6{GP64(), GP64(), param("xs")}
	n := GP64()
	var w, v strided
	var c pairWidener
	var ahead prefetcher
	if f == "Panel" {
		w.base = param("w")
	} else {
		ws := param("ws")
		w = strided{param("w"), ws, stride3(ws, 4)}
		v = strided{GP64(), ws, w.s3}
		c = newPairWidener(f)
	}
	a := zmms(pairs * T)
	if f != "Panel" {
		ahead = newPrefetcher(w.s, 2*pairs, size)
		Label(name + "_group")
		LEAQ(Mem{Base: w.base, Index: w.s, Scale: 4}, v.base)
	}
	accumulators := func(move func(m Mem, r reg.VecVirtual)) {
		p, s := param("acc"), param("as")
		for t := range T {
			for i := range pairs {
				move(Mem{Base: p, Disp: i * 64}, a[t*pairs+i])
			}
			ADDQ(s, p)
		}
	}
	accumulators(func(m Mem, r reg.VecVirtual) { VMOVUPS(m, r) })
	Load(Param("blocks"), n)
	Load(Param("x"), x.lo)
	x.split(T)
	Label(name + "_block")
	if f != "Panel" {
		ahead.fetch(w.base, w.s, w.s3, n, 4, 2, size)
	}
	row := func(r, disp int) Mem {
		if r < 4 {
			return w.at(r, disp)
		}
		return v.at(r-4, disp)
	}
	for j := range 4 {
		wv := zmms(pairs)
		for p := range pairs {
			if f == "Panel" {
				VMOVUPS(Mem{Base: w.base, Disp: (j*pairs + p) * 64}, wv[p])
			} else {
				c.widen(row(2*p, j*8*size), row(2*p+1, j*8*size), wv[p])
			}
		}
		for t := range T {
			xv := ZMM()
			VBROADCASTF32X8(x.at(t, j*32), xv)
			for p := range pairs {
				VFMADD231PS(xv, wv[p], a[t*pairs+p])
			}
		}
	}
	if f == "Panel" {
		ADDQ(I32(4*pairs*64), w.base)
	} else {
		ADDQ(I32(int32(32*size)), w.base)
		ADDQ(I32(int32(32*size)), v.base)
	}
	x.move(U32(128), T)
	DECQ(n)
	JNZ(LabelRef(name + "_block"))
	accumulators(func(m Mem, r reg.VecVirtual) { VMOVUPS(r, m) })
	if f != "Panel" {
		Load(Param("blocks"), n)
		IMUL3Q(I32(int32(32*size)), n, n)
		SUBQ(n, w.base)
		LEAQ(Mem{Base: w.base, Index: w.s, Scale: 8}, w.base)
		Load(Param("acc"), n)
		ADDQ(U32(64*pairs), n)
		Store(n, Param("acc"))
		Load(Param("groups"), n)
		DECQ(n)
		Store(n, Param("groups"))
		JNZ(LabelRef(name + "_group"))
	}
	end()
}

// panel writes the widened weights of one pair of rows into its quarter of a panel.
func panel(f string) {
	size := map[string]int{"BF16": 2, "Int8": 1, "F32": 4}[f]
	name := "panel" + f
	function(name, "func(dst *float32, w *byte, ws, blocks, ahead int)",
		name+": dst[step][pair][row][lane] = w[2*pair+row][8*step+lane] of 8 rows, ws bytes apart; fetches what lies ahead bytes on.")
	dst, ws, blocks, ahead := param("dst"), param("ws"), param("blocks"), param("ahead")
	a, b, to, n, left := GP64(), GP64(), GP64(), GP64(), GP64()
	Load(Param("w"), a)
	MOVQ(I32(pairs), left)
	c := newPairWidener(f)
	Label(name + "_pair")
	LEAQ(Mem{Base: a, Index: ws, Scale: 1}, b)
	MOVQ(dst, to)
	MOVQ(blocks, n)
	Label(name + "_block")
	for i := 0; i < 32*size; i += 64 {
		PREFETCHT0(Mem{Base: a, Index: ahead, Scale: 1, Disp: i})
		PREFETCHT0(Mem{Base: b, Index: ahead, Scale: 1, Disp: i})
	}
	for j := range 4 {
		v := ZMM()
		c.widen(Mem{Base: a, Disp: 8 * j * size}, Mem{Base: b, Disp: 8 * j * size}, v)
		VMOVUPS(v, Mem{Base: to, Disp: j * pairs * 64})
	}
	ADDQ(I32(int32(32*size)), a)
	ADDQ(I32(int32(32*size)), b)
	ADDQ(I32(4*pairs*64), to)
	DECQ(n)
	JNZ(LabelRef(name + "_block"))
	// The next pair, from the start of the columns.
	IMUL3Q(I32(int32(32*size)), blocks, n)
	SUBQ(n, b)
	LEAQ(Mem{Base: b, Index: ws, Scale: 1}, a)
	ADDQ(I32(64), dst)
	DECQ(left)
	JNZ(LabelRef(name + "_pair"))
	end()
}

// panelMX is panel for MXFP4: weights are multiplied by their scale.
func (d mxData) panelMX() {
	const name = "panelMX"
	function(name, "func(dst *float32, w *byte, ws int, sc *byte, ss int, blocks, ahead int)",
		name+": dst[block][step][pair][row][lane] = e2m1 * scale of 8 rows, ws bytes apart, in the order of mxPlace;",
		"fetches what lies ahead bytes on.")
	dst, ws, ss, blocks, ahead := param("dst"), param("ws"), param("ss"), param("blocks"), param("ahead")
	a, b, sa, sb, to, n, left := GP64(), GP64(), GP64(), GP64(), GP64(), GP64(), GP64()
	Load(Param("w"), a)
	Load(Param("sc"), sa)
	MOVQ(I32(pairs), left)
	c := d.loadWide()
	Label(name + "_pair")
	LEAQ(Mem{Base: a, Index: ws, Scale: 1}, b)
	LEAQ(Mem{Base: sa, Index: ss, Scale: 1}, sb)
	MOVQ(dst, to)
	MOVQ(blocks, n)
	Label(name + "_block")
	PREFETCHT0(Mem{Base: a, Index: ahead, Scale: 1})
	PREFETCHT0(Mem{Base: b, Index: ahead, Scale: 1})
	s := c.scale(Mem{Base: sa}, Mem{Base: sb})
	c.unpack(Mem{Base: a}, Mem{Base: b}, func(step int, v reg.VecVirtual) {
		VMULPS(s, v, v)
		VMOVUPS(v, Mem{Base: to, Disp: step * pairs * 64})
	})
	ADDQ(I32(16), a)
	ADDQ(I32(16), b)
	INCQ(sa)
	INCQ(sb)
	ADDQ(I32(4*pairs*64), to)
	DECQ(n)
	JNZ(LabelRef(name + "_block"))
	SUBQ(blocks, sb)
	LEAQ(Mem{Base: sb, Index: ss, Scale: 1}, sa)
	MOVQ(blocks, n)
	SHLQ(Imm(4), n)
	SUBQ(n, b)
	LEAQ(Mem{Base: b, Index: ws, Scale: 1}, a)
	ADDQ(I32(64), dst)
	DECQ(left)
	JNZ(LabelRef(name + "_pair"))
	end()
}

// panelTileMX keeps lanes and partials in registers, twelve of each for three rows of
// x: the additions have pipes of their own, so four multiply-adds a block are what counts.
func panelTileMX(T int) {
	name := fmt.Sprintf("tileMXWide8x%d", T)
	function(name, "func(w, x *float32, xs int, acc *float32, as, blocks int)",
		fmt.Sprintf("%s: for 8 rows of w, widened by panelMX, and %d rows of x, per block and lane:", name, T),
		"	p = w[0]*x[0]; p = fma(w[i], x[i], p), i = 1..3; acc = acc + p")
	w, n := param("w"), param("blocks")
	x := rows6{param("x"), GP64(), param("xs")}
	acc := rows6{param("acc"), GP64(), param("as")}
	a := zmms(pairs * T)
	for i, r := range a {
		VMOVUPS(acc.at(i/pairs, i%pairs*64), r)
	}
	Label(name + "_block")
	p := zmms(pairs * T)
	for j := range 4 {
		wv := zmms(pairs)
		for i, v := range wv {
			VMOVUPS(Mem{Base: w, Disp: (j*pairs + i) * 64}, v)
		}
		for t := range T {
			xv := ZMM()
			VBROADCASTF32X8(x.at(t, j*32), xv)
			for i, v := range wv {
				if j == 0 {
					VMULPS(xv, v, p[t*pairs+i])
				} else {
					VFMADD231PS(xv, v, p[t*pairs+i])
				}
			}
		}
	}
	for i, r := range a {
		VADDPS(p[i], r, r)
	}
	ADDQ(I32(4*pairs*64), w)
	x.move(U32(128), T)
	DECQ(n)
	JNZ(LabelRef(name + "_block"))
	for i, r := range a {
		VMOVUPS(r, acc.at(i/pairs, i%pairs*64))
	}
	end()
}

// chainWide keeps R rows of 64 columns of y in registers over all terms, or 128 of one
// row.
func chainWide(f string, R int) {
	size, C := map[string]int{"BF16": 2, "F32": 4}[f], 4
	if R == 1 {
		C = 8
	}
	name := fmt.Sprintf("chain%sWide%d", f, R)
	function(name, "func(y *float32, ys int, w *byte, ws int, x *float32, xs int, terms, groups int)",
		fmt.Sprintf("%s: for groups of %d columns and %d rows: y[r][c] = fma(x[r][j], w[j][c], y[r][c]), j ascending.", name, 16*C, R))
	y := rows6{param("y"), GP64(), param("ys")}
	x := rows6{GP64(), GP64(), param("xs")}
	w, ws, row, n, groups := param("w"), param("ws"), GP64(), GP64(), param("groups")
	y.split(R)
	a := zmms(R * C)
	Label(name + "_group")
	for i, r := range a {
		VMOVUPS(y.at(i/C, i%C*64), r)
	}
	MOVQ(w, row)
	Load(Param("x"), x.lo)
	x.split(R)
	Load(Param("terms"), n)
	Label(name + "_term")
	v := zmms(C)
	for c := range C {
		m := Mem{Base: row, Disp: 16 * size * c}
		if f == "BF16" {
			VPMOVZXWD(m, v[c])
			VPSLLD(Imm(16), v[c], v[c])
		} else {
			VMOVUPS(m, v[c])
		}
	}
	for r := range R {
		b := ZMM()
		VBROADCASTSS(x.at(r, 0), b)
		for c := range C {
			VFMADD231PS(b, v[c], a[r*C+c])
		}
	}
	ADDQ(ws, row)
	x.move(Imm(4), R)
	DECQ(n)
	JNZ(LabelRef(name + "_term"))
	for i, r := range a {
		VMOVUPS(r, y.at(i/C, i%C*64))
	}
	ADDQ(I32(int32(16*C*size)), w)
	y.move(I32(int32(64*C)), R)
	DECQ(groups)
	JNZ(LabelRef(name + "_group"))
	end()
}

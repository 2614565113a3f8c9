package main

import (
	"fmt"

	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

const tileSignature = "func(w *byte, ws int, x *float32, xs int, acc *float32, as int, groups, blocks int)"

// tiles writes the register tiles of the formats whose lanes are plain running
// sums. R weight rows times T activation rows share their loads: with 3x4, seven
// loads feed twelve multiply-adds, and twelve accumulators, three weights and one
// activation are the sixteen registers.
func tiles() {
	spread := spreadWords()
	for _, f := range []string{"BF16", "Int8", "F32"} {
		for _, s := range [][2]int{{4, 1}, {4, 2}, {3, 3}, {3, 4}, {1, 1}, {1, 2}, {1, 3}, {1, 4}} {
			tile(f, s[0], s[1], spread)
		}
	}
}

// distance is how far ahead of its use a weight is fetched, in bytes of its row,
// from the width of a weight: the best of 1024 to 4096 on a Zen 5 under load.
func distance(size int) int32 {
	if size == 1 {
		return 1024
	}
	return 1536
}

// A prefetcher runs ahead of a walk over groups of rows that come from memory, and
// at the end of the rows turns to the next group's: a fixed distance would leave
// the start of every row to be waited for.
type prefetcher struct{ jump, p reg.GPVirtual }

// newPrefetcher makes jump the distance from the end of a group to the next: past
// the other rows, less the columns walked.
func newPrefetcher(ws reg.GPVirtual, R, size int) prefetcher {
	f := prefetcher{GP64(), GP64()}
	Load(Param("blocks"), f.p)
	IMUL3Q(I32(32*size), f.p, f.p)
	MOVQ(ws, f.jump)
	if R > 1 {
		IMUL3Q(I32(R), f.jump, f.jump)
	}
	SUBQ(f.p, f.jump)
	ADDQ(I32(distance(size)), f.jump)
	return f
}

// fetch is for block n from the end; it covers rows 0..R-1 of base, R at most 4, and
// of base + 4*ws if halves is 2.
func (f prefetcher) fetch(base, ws, ws3, n reg.GPVirtual, R, halves, size int) {
	MOVQ(I32(distance(size)), f.p)
	CMPQ(n, I32(distance(size)/32/int32(size)))
	CMOVQLE(f.jump, f.p)
	ADDQ(base, f.p)
	for h := range halves {
		if h > 0 {
			LEAQ(Mem{Base: f.p, Index: ws, Scale: 4}, f.p)
		}
		a := strided{f.p, ws, ws3}
		for r := range R {
			PREFETCHT0(a.at(r, 0))
		}
	}
}

var spreadData *Mem

// spreadWords is the shuffle that moves eight bf16 values to the upper halves of
// eight words.
func spreadWords() Mem {
	if spreadData == nil {
		m := words("spread",
			0x01008080, 0x03028080, 0x05048080, 0x07068080,
			0x09088080, 0x0b0a8080, 0x0d0c8080, 0x0f0e8080)
		spreadData = &m
	}
	return *spreadData
}

// widen leaves eight weights at m as float32 in v: one load and one shuffle for
// bf16 (the broadcast is free in the load port and saves the lane crossing of
// VPMOVZXWD), sign extension and conversion for int8.
func widen(f string, m Mem, v, spread Op) {
	switch f {
	case "BF16":
		VBROADCASTI128(m, v)
		VPSHUFB(spread, v, v)
	case "Int8":
		VPMOVSXBD(m, v)
		VCVTDQ2PS(v, v)
	default:
		VMOVUPS(m, v)
	}
}

func tile(f string, R, T int, spreadMem Mem) {
	size := map[string]int{"BF16": 2, "Int8": 1, "F32": 4}[f] // bytes of a weight
	name := fmt.Sprintf("tile%s%dx%d", f, R, T)
	function(name, tileSignature,
		fmt.Sprintf("%s: for groups of %d rows of w (ws bytes apart) and %d rows of x (xs bytes apart):", name, R, T),
		"	for each lane: acc[t][r][lane] = fma(w[r][8i+lane], x[t][8i+lane], acc[t][r][lane]), i = 0 .. 4*blocks-1",
		"Lanes of one r are 32 bytes apart, those of one t as bytes.")
	ws, xs, as := param("ws"), param("xs"), param("as")
	ws3, xs3, as3 := stride3(ws, R), stride3(xs, T), stride3(as, T)
	w := strided{param("w"), ws, ws3}
	x := strided{GP64(), xs, xs3}
	acc := strided{param("acc"), as, as3}
	groups := param("groups")
	var spread Op = spreadMem
	if f == "BF16" && R*T+R+1 < 16 {
		v := YMM()
		VMOVDQU(spreadMem, v)
		spread = v
	}
	a := ymms(R * T)
	n := GP64()
	var ahead prefetcher
	if T == 1 {
		ahead = newPrefetcher(ws, R, size)
	}
	Label(name + "_group")
	for t := range T {
		for r := range R {
			VMOVUPS(acc.at(t, r*32), a[t*R+r])
		}
	}
	Load(Param("blocks"), n)
	Load(Param("x"), x.base)
	Label(name + "_block")
	if T == 1 {
		ahead.fetch(w.base, ws, ws3, n, R, 1, size)
	} else {
		for r := range R {
			PREFETCHT0(w.at(r, 384*size)) // the next panel of the row
		}
	}
	for j := range 4 {
		v := ymms(R)
		for r := range R {
			widen(f, w.at(r, j*8*size), v[r], spread)
		}
		for t := range T {
			var xv Op = x.at(t, j*32)
			if R > 1 {
				xv = YMM()
				VMOVUPS(x.at(t, j*32), xv)
			}
			for r := range R {
				VFMADD231PS(xv, v[r], a[t*R+r])
			}
		}
	}
	ADDQ(I32(32*size), w.base)
	ADDQ(I32(128), x.base)
	DECQ(n)
	JNZ(LabelRef(name + "_block"))
	for t := range T {
		for r := range R {
			VMOVUPS(a[t*R+r], acc.at(t, r*32))
		}
	}
	// The next group: R rows on, from the start of the columns.
	Load(Param("blocks"), n)
	IMUL3Q(I32(32*size), n, n)
	SUBQ(n, w.base)
	if R == 3 {
		LEAQ(Mem{Base: ws, Index: ws, Scale: 2}, n)
		ADDQ(n, w.base)
	} else {
		LEAQ(Mem{Base: w.base, Index: ws, Scale: uint8(R)}, w.base)
	}
	ADDQ(I32(32*R), acc.base)
	DECQ(groups)
	JNZ(LabelRef(name + "_group"))
	end()
}

// reduce writes the tree over the eight lanes of each sum, four sums at a time.
func reduce() {
	function("reduce", "func(y, acc *float32, n int)",
		"reduce: y[i] = ((a[0]+a[4]) + (a[2]+a[6])) + ((a[1]+a[5]) + (a[3]+a[7])) of the lanes a = acc[8i:8i+8].")
	y, acc, n := param("y"), param("acc"), param("n")
	half := func(i int) reg.VecVirtual { // b[k] = a[k] + a[k+4]
		lo, b := XMM(), XMM()
		VMOVUPS(Mem{Base: acc, Disp: i * 32}, lo)
		VADDPS(Mem{Base: acc, Disp: i*32 + 16}, lo, b)
		return b
	}
	pair := func(a, b reg.VecVirtual) reg.VecVirtual { // c0 c1 of a, c0 c1 of b
		lo, hi := XMM(), XMM()
		VUNPCKLPD(b, a, lo)
		VUNPCKHPD(b, a, hi)
		VADDPS(hi, lo, lo)
		return lo
	}
	sum := func(a, b reg.VecVirtual) reg.VecVirtual {
		e, o := XMM(), XMM()
		VSHUFPS(Imm(0x88), b, a, e)
		VSHUFPS(Imm(0xdd), b, a, o)
		VADDPS(o, e, e)
		return e
	}
	Label("reduce4")
	CMPQ(n, Imm(4))
	JLT(LabelRef("reduce1"))
	VMOVUPS(sum(pair(half(0), half(1)), pair(half(2), half(3))), Mem{Base: y})
	ADDQ(I32(16), y)
	ADDQ(I32(128), acc)
	SUBQ(Imm(4), n)
	JMP(LabelRef("reduce4"))
	Label("reduce1")
	TESTQ(n, n)
	JZ(LabelRef("reduced"))
	b := half(0)
	c := pair(b, b)
	VMOVD(sum(c, c), y32(y))
	ADDQ(I32(4), y)
	ADDQ(I32(32), acc)
	DECQ(n)
	JMP(LabelRef("reduce1"))
	Label("reduced")
	end()
}

func y32(p reg.GPVirtual) Mem { return Mem{Base: p} }

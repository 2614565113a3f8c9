package main

import (
	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// base writes the base figures of the benchmark: how fast a core can read with
// AVX2 loads, and how many fused multiply-adds its registers allow.
func base() {
	function("readBytes", "func(p *byte, n int)", "readBytes reads n bytes, a multiple of 256.")
	p, n := param("p"), param("n")
	a := ymms(8)
	for _, v := range a {
		VPXOR(v, v, v)
	}
	SHRQ(Imm(8), n)
	Label("read")
	for i := range 4 {
		PREFETCHT0(Mem{Base: p, Disp: 4096 + 64*i})
	}
	for i, v := range a {
		VPXOR(Mem{Base: p, Disp: i * 32}, v, v)
	}
	ADDQ(I32(256), p)
	DECQ(n)
	JNZ(LabelRef("read"))
	end()

	peak := func(name string, v []reg.VecVirtual, b reg.VecVirtual) {
		function(name, "func(n int)", name+" does n rounds of 12 independent fused multiply-adds.")
		n := param("n")
		VPXOR(b.AsX(), b.AsX(), b.AsX())
		for _, r := range v {
			VPXOR(r.AsX(), r.AsX(), r.AsX())
		}
		Label(name + "_loop")
		for _, r := range v {
			VFMADD231PS(b, b, r)
		}
		DECQ(n)
		JNZ(LabelRef(name + "_loop"))
		end()
	}
	peak("peakFMA256", ymms(12), YMM())
	var z []reg.VecVirtual
	for range 12 {
		z = append(z, ZMM())
	}
	peak("peakFMA512", z, ZMM())
}

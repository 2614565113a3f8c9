// Command gen writes the assembly of package kernel. It decides the
// instructions; the order of operations is decided by the definitions in that
// package, and every function here must give their bits.
//
//	go run ./gen -what kernel -pkg kernel -out kernel_amd64.s -stubs kernel_stubs_amd64.go
//
// Rules that hold for every function written here: no call, no stack, no scalar
// floating-point instruction while the upper halves are dirty and VZEROUPPER
// before RET (one legacy-SSE instruction after that costs 115 ns on a Zen 3),
// no read or write outside the operands.
package main

import (
	"flag"
	"log"

	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

func main() {
	what := flag.String("what", "kernel", "kernel, or base for the base figures of the benchmark")
	flag.Parse()
	ConstraintExpr("amd64,!noasm")
	switch *what {
	case "kernel":
		tiles()
		d := newMXData()
		mx(d)
		reduce()
		elementwise()
		wide(d)
		wideTiles(d)
	case "base":
		base()
	default:
		log.Fatalf("-what %s: want kernel or base", *what)
	}
	Generate()
}

// function starts a NOSPLIT function whose pointers do not escape.
func function(name, signature string, doc ...string) {
	TEXT(name, NOSPLIT, signature)
	Doc(doc...)
	Pragma("noescape")
}

// end leaves the function with clean upper halves.
func end() {
	VZEROUPPER()
	RET()
}

func param(name string) reg.GPVirtual { return Load(Param(name), GP64()).(reg.GPVirtual) }

// at is the address of row i of three strides: base, base+s, base+2s, base+3s.
type strided struct{ base, s, s3 reg.GPVirtual }

func (a strided) at(i, disp int) Mem {
	switch i {
	case 0:
		return Mem{Base: a.base, Disp: disp}
	case 3:
		return Mem{Base: a.base, Index: a.s3, Scale: 1, Disp: disp}
	default:
		return Mem{Base: a.base, Index: a.s, Scale: uint8(i), Disp: disp}
	}
}

// stride3 returns 3*s if n rows need it.
func stride3(s reg.GPVirtual, n int) reg.GPVirtual {
	r := GP64()
	if n > 3 {
		LEAQ(Mem{Base: s, Index: s, Scale: 2}, r)
	}
	return r
}

func ymms(n int) []reg.VecVirtual {
	v := make([]reg.VecVirtual, n)
	for i := range v {
		v[i] = YMM()
	}
	return v
}

var written = map[string]Mem{}

// words makes read-only data of 32-bit values; a name stands for one content.
func words(name string, v ...uint32) Mem {
	if m, ok := written[name]; ok {
		return m
	}
	m := GLOBL(name, RODATA|NOPTR)
	for i, x := range v {
		DATA(i*4, U32(x))
	}
	written[name] = m
	return m
}

// repeat is words of n equal values.
func repeat(name string, x uint32, n int) Mem {
	v := make([]uint32, n)
	for i := range v {
		v[i] = x
	}
	return words(name, v...)
}

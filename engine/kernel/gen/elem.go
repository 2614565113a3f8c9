package main

import (
	"fmt"
	"math"

	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// The elementwise functions are the definitions of elem.go, eight values at a
// time; the numbers are those of its constants. Constants are memory operands:
// these functions are bound by their chains of dependent operations.

var constants = map[uint32]Mem{}

// bits is a vector of eight equal 32-bit words.
func bits(x uint32) Mem {
	m, ok := constants[x]
	if !ok {
		m = repeat(fmt.Sprintf("c%08x", x), x, 8)
		constants[x] = m
	}
	return m
}

func f32(x float32) Mem { return bits(math.Float32bits(x)) }

// vec is a register with the operations of the definitions: 8 values, or 16 of the
// AVX-512 form.
type vec = reg.VecVirtual

// sixteen chooses the AVX-512 form.
var sixteen bool

func vector() vec {
	if sixteen {
		return ZMM()
	}
	return YMM()
}

func size() int { return int(vector().Size()) }

// spread tells a constant that AVX-512 broadcasts from its first word.
func spread(b Op) bool {
	m, ok := b.(Mem)
	return ok && sixteen && m.Symbol.Name != ""
}

// choose is op, or its broadcasting form if b is a constant to be spread.
func choose(op, broadcasting func(...Op), b Op) func(...Op) {
	if spread(b) {
		return broadcasting
	}
	return op
}

func move(m Op) vec {
	v := vector()
	if spread(m) {
		VBROADCASTSS(m, v)
	} else {
		VMOVUPS(m, v)
	}
	return v
}

func add(a vec, b Op) vec { v := vector(); choose(VADDPS, VADDPS_BCST, b)(b, a, v); return v }
func sub(a vec, b Op) vec { v := vector(); choose(VSUBPS, VSUBPS_BCST, b)(b, a, v); return v }
func mul(a vec, b Op) vec { v := vector(); choose(VMULPS, VMULPS_BCST, b)(b, a, v); return v }
func div(a vec, b Op) vec { v := vector(); choose(VDIVPS, VDIVPS_BCST, b)(b, a, v); return v }
func and(a vec, b Op) vec { v := vector(); choose(VANDPS, VANDPS_BCST, b)(b, a, v); return v }
func or(a vec, b Op) vec  { v := vector(); choose(VORPS, VORPS_BCST, b)(b, a, v); return v }

// fma is a*b + c with c overwritten by the result.
func fma(a vec, b Op, c vec) vec { choose(VFMADD231PS, VFMADD231PS_BCST, b)(b, a, c); return c }

// horner is p*r + c with p overwritten by the result.
func horner(p, r vec, c float32) vec {
	m := f32(c)
	choose(VFMADD213PS, VFMADD213PS_BCST, m)(m, r, p)
	return p
}

func zero() vec { v := vector(); clearAll([]vec{v}); return v }

func clearAll(v []vec) {
	for _, r := range v {
		if sixteen {
			VPXORD(r, r, r)
		} else {
			VXORPS(r, r, r)
		}
	}
}

func vectors(n int) []vec {
	if sixteen {
		return zmms(n)
	}
	return ymms(n)
}

// where overwrites b with a where x is negative.
func where(x, a, b vec) {
	if sixteen {
		k := K()
		VPMOVD2M(x, k)
		VMOVAPS(a, k, b)
	} else {
		VBLENDVPS(x, a, b, b)
	}
}

// exp destroys x. The constant is the first operand of the maximum and minimum
// because these return the second one when either is a NaN.
func exp(x vec) vec {
	const magic = 12582912
	lo, hi := move(f32(-104)), move(f32(89))
	VMAXPS(x, lo, x)
	VMINPS(x, hi, x)
	t := fma(x, f32(1.44269504088896341), move(f32(magic)))
	n, m := vector(), f32(magic)
	choose(VPSUBD, VPSUBD_BCST, m)(m, t, n)
	f := sub(t, f32(magic))
	r := fma(f, f32(-0.693359375), x)
	r = fma(f, f32(2.12194440e-4), r)
	p := move(f32(1.9875691500e-4))
	for _, c := range []float32{1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1, 1, 1} {
		p = horner(p, r, c)
	}
	h := vector()
	VPSRAD(Imm(1), n, h)
	VPSUBD(h, n, n)
	for _, k := range []vec{h, n} {
		choose(VPADDD, VPADDD_BCST, bits(127))(bits(127), k, k)
		VPSLLD(Imm(23), k, k)
		VMULPS(k, p, p)
	}
	return p
}

// sigmoid keeps x.
func sigmoid(x vec) vec {
	e := exp(or(x, bits(1<<31)))
	// 1 for x >= 0, else e; for -0 e is 1.
	n := move(f32(1))
	where(x, e, n)
	one := move(f32(1))
	d := add(one, e)
	lo := sub(e, sub(d, one))
	c := div(one, d)
	y := mul(n, c)
	VFNMADD231PS(d, y, n)
	VFNMADD231PS(lo, y, n)
	return fma(n, c, y)
}

// tanh keeps x. Both branches are computed.
func tanh(x vec) vec {
	a := and(x, bits(1<<31-1))
	z := mul(a, a)
	p := move(f32(-5.70498872745e-3))
	for _, c := range []float32{2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1, -3.33332819422e-1} {
		p = horner(p, z, c)
	}
	p = mul(p, z)
	small := fma(p, a, move(a))
	e := exp(add(a, a))
	e = add(e, f32(1))
	large := sub(move(f32(1)), div(move(f32(2)), e))
	// a < 0.625, false for a NaN
	if sixteen {
		k := K()
		VCMPPS_BCST(Imm(0x11), f32(0.625), a, k)
		VMOVAPS(small, k, large)
	} else {
		mask := YMM()
		VCMPPS(Imm(0x11), f32(0.625), a, mask)
		VBLENDVPS(mask, small, large, large)
	}
	return or(and(x, bits(1<<31)), large)
}

// broadcast loads a scalar parameter; no scalar instruction touches it.
func broadcast(name string) vec {
	v := vector()
	m, err := Param(name).Resolve()
	if err != nil {
		panic(err)
	}
	VBROADCASTSS(m.Addr, v)
	return v
}

// each writes a loop over n vectors of dst and the sources.
func each(name string, scalars string, sources []string, doc string, f func(s map[string]vec, x []vec) vec, names ...string) {
	name += fmt.Sprint(size() / 4)
	sig := "func(dst"
	for _, s := range sources {
		sig += ", " + s
	}
	sig += " *float32, n int" + scalars + ")"
	function(name, sig, fmt.Sprintf("%s: %s, for n groups of %d.", name, doc, size()/4))
	dst, n := param("dst"), param("n")
	var ptr []reg.GPVirtual
	for _, s := range sources {
		ptr = append(ptr, param(s))
	}
	sc := map[string]vec{}
	for _, s := range names {
		sc[s] = broadcast(s)
	}
	Label(name + "_loop")
	var x []vec
	for _, p := range ptr {
		x = append(x, move(Mem{Base: p}))
		ADDQ(Imm(uint64(size())), p)
	}
	VMOVUPS(f(sc, x), Mem{Base: dst})
	ADDQ(Imm(uint64(size())), dst)
	DECQ(n)
	JNZ(LabelRef(name + "_loop"))
	end()
}

// functions writes the elementwise functions in the chosen form.
func functions() {
	type m = map[string]vec
	one, two := []string{"x"}, []string{"x", "y"}
	each("exp", "", one, "dst = e^x", func(_ m, x []vec) vec { return exp(x[0]) })
	each("sigmoid", "", one, "dst = sigmoid(x)", func(_ m, x []vec) vec { return sigmoid(x[0]) })
	each("tanh", "", one, "dst = tanh(x)", func(_ m, x []vec) vec { return tanh(x[0]) })
	each("situ", ", beta, linear float32", two, "dst = SiTU(x, y)", func(s m, x []vec) vec {
		a := mul(mul(tanh(div(x[0], s["beta"])), s["beta"]), sigmoid(x[0]))
		return mul(a, mul(tanh(div(x[1], s["linear"])), s["linear"]))
	}, "beta", "linear")
	each("scaleMul", ", a float32", two, "dst = (x * a) * y", func(s m, x []vec) vec { return mul(mul(x[0], s["a"]), x[1]) }, "a")
	each("gate", "", two, "dst = x * sigmoid(y)", func(_ m, x []vec) vec { return mul(x[0], sigmoid(x[1])) })
	each("add", "", two, "dst = x + y", func(_ m, x []vec) vec { return add(x[0], x[1]) })
	each("axpy", ", a float32", two, "dst = fma(x, a, y)", func(s m, x []vec) vec { return fma(x[0], s["a"], x[1]) }, "a")
	each("scale", ", a float32", one, "dst = x * a", func(s m, x []vec) vec { return mul(x[0], s["a"]) }, "a")
	each("div", ", a float32", one, "dst = x / a", func(s m, x []vec) vec { return div(x[0], s["a"]) }, "a")
	each("decay", ", a, lower float32", two, "dst = exp(lower * sigmoid(a * (x + y)))", func(s m, x []vec) vec {
		return exp(mul(sigmoid(mul(add(x[0], x[1]), s["a"])), s["lower"]))
	}, "a", "lower")
	each("conv", "", []string{"w0", "w1", "w2", "w3", "u0", "u1", "u2", "u3"}, "dst = silu(fma chain of w*u from +0)", func(_ m, x []vec) vec {
		a := zero()
		for i := range 4 {
			a = fma(x[i], x[4+i], a)
		}
		return mul(a, sigmoid(a))
	})
}

func elementwise() {
	functions()
	lanes("dotLanes", true)
	lanes("sumLanes", false)
	kda(4)
	kda(1)
	for _, f := range []string{"BF16", "F32"} {
		for _, s := range [][2]int{{4, 2}, {1, 8}, {4, 1}, {1, 1}} {
			chain(f, s[0], s[1])
		}
	}
}

// lanes adds to eight running lanes.
func lanes(name string, dot bool) {
	sig, doc := "func(acc *[8]float32, x *float32, n int)", "acc[lane] += x[8i+lane]"
	if dot {
		sig, doc = "func(acc *[8]float32, x, y *float32, n int)", "acc[lane] = fma(x[8i+lane], y[8i+lane], acc[lane])"
	}
	function(name, sig, fmt.Sprintf("%s: %s, for n groups of 32.", name, doc))
	acc, x, n := param("acc"), param("x"), param("n")
	a := move(Mem{Base: acc})
	var y reg.GPVirtual
	if dot {
		y = param("y")
	}
	Label(name + "_loop")
	for i := range 4 {
		m := Mem{Base: x, Disp: 32 * i}
		if dot {
			a = fma(move(m), Mem{Base: y, Disp: 32 * i}, a)
		} else {
			VADDPS(m, a, a)
		}
	}
	ADDQ(I32(128), x)
	if dot {
		ADDQ(I32(128), y)
	}
	DECQ(n)
	JNZ(LabelRef(name + "_loop"))
	VMOVUPS(a, Mem{Base: acc})
	end()
}

// kda writes one head's step for groups of V vectors of columns: a group's part of the
// state, at most 32 KB, stays in the first-level cache between the two passes.
func kda(V int) {
	step := size()
	name := fmt.Sprintf("kda%d", step/4*V)
	function(name, "func(s *float32, stride int, decay, k, q *float32, keys int, v, o *float32, groups int, beta float32)",
		fmt.Sprintf("%s: for groups of %d columns of the state [keys][stride bytes], per column:", name, step/4*V),
		"	s[i] = s[i]*decay[i]; u = fma(k[i], s[i], u), i ascending from u = +0; u = beta * (v - u)",
		"	s[i] = fma(k[i], u, s[i]); o = fma(q[i], s[i], o), i ascending from o = +0")
	s, stride := param("s"), param("stride")
	decay, k, q, keys := param("decay"), param("k"), param("q"), param("keys")
	v, o, groups := param("v"), param("o"), param("groups")
	row, i := GP64(), GP64()
	u, out := vectors(V), vectors(V)
	Label(name + "_group")
	clearAll(u)
	MOVQ(s, row)
	XORQ(i, i)
	Label(name + "_decay")
	d, kb := vector(), vector()
	VBROADCASTSS(Mem{Base: decay, Index: i, Scale: 4}, d)
	VBROADCASTSS(Mem{Base: k, Index: i, Scale: 4}, kb)
	for c := range V {
		x := vector()
		VMULPS(Mem{Base: row, Disp: step * c}, d, x)
		VMOVUPS(x, Mem{Base: row, Disp: step * c})
		VFMADD231PS(kb, x, u[c])
	}
	ADDQ(stride, row)
	INCQ(i)
	CMPQ(i, keys)
	JNE(LabelRef(name + "_decay"))
	beta := broadcast("beta")
	for c := range V {
		x := move(Mem{Base: v, Disp: step * c})
		VSUBPS(u[c], x, x)
		VMULPS(beta, x, u[c])
	}
	clearAll(out)
	MOVQ(s, row)
	XORQ(i, i)
	Label(name + "_update")
	kb2, qb := vector(), vector()
	VBROADCASTSS(Mem{Base: k, Index: i, Scale: 4}, kb2)
	VBROADCASTSS(Mem{Base: q, Index: i, Scale: 4}, qb)
	for c := range V {
		x := fma(kb2, u[c], move(Mem{Base: row, Disp: step * c}))
		VMOVUPS(x, Mem{Base: row, Disp: step * c})
		VFMADD231PS(qb, x, out[c])
	}
	ADDQ(stride, row)
	INCQ(i)
	CMPQ(i, keys)
	JNE(LabelRef(name + "_update"))
	for c := range V {
		VMOVUPS(out[c], Mem{Base: o, Disp: step * c})
	}
	ADDQ(I32(int32(step*V)), s)
	ADDQ(I32(int32(step*V)), v)
	ADDQ(I32(int32(step*V)), o)
	DECQ(groups)
	JNZ(LabelRef(name + "_group"))
	end()
}

// chain keeps R rows of C vectors of y in registers over all terms.
func chain(f string, R, C int) {
	size := map[string]int{"BF16": 2, "F32": 4}[f]
	name := fmt.Sprintf("chain%s%dx%d", f, R, C)
	function(name, "func(y *float32, ys int, w *byte, ws int, x *float32, xs int, terms, groups int)",
		fmt.Sprintf("%s: for groups of %d columns and %d rows: y[r][c] = fma(x[r][j], w[j][c], y[r][c]), j ascending.", name, 8*C, R))
	ys, ws, xs := param("ys"), param("ws"), param("xs")
	y := strided{param("y"), ys, stride3(ys, R)}
	x := strided{GP64(), xs, stride3(xs, R)}
	w, groups := param("w"), param("groups")
	var spread Op
	if f == "BF16" {
		v := YMM()
		VMOVDQU(spreadWords(), v)
		spread = v
	}
	a := ymms(R * C)
	row, n := GP64(), GP64()
	Label(name + "_group")
	for r := range R {
		for c := range C {
			VMOVUPS(y.at(r, 32*c), a[r*C+c])
		}
	}
	MOVQ(w, row)
	Load(Param("x"), x.base)
	Load(Param("terms"), n)
	Label(name + "_term")
	if R == 1 {
		b := YMM()
		VBROADCASTSS(x.at(0, 0), b)
		for c := range C {
			v := YMM()
			widen(f, Mem{Base: row, Disp: 8 * size * c}, v, spread)
			VFMADD231PS(b, v, a[c])
		}
	} else {
		v := ymms(C)
		for c := range C {
			widen(f, Mem{Base: row, Disp: 8 * size * c}, v[c], spread)
		}
		for r := range R {
			b := YMM()
			VBROADCASTSS(x.at(r, 0), b)
			for c := range C {
				VFMADD231PS(b, v[c], a[r*C+c])
			}
		}
	}
	ADDQ(ws, row)
	ADDQ(Imm(4), x.base)
	DECQ(n)
	JNZ(LabelRef(name + "_term"))
	for r := range R {
		for c := range C {
			VMOVUPS(a[r*C+c], y.at(r, 32*c))
		}
	}
	ADDQ(I32(int32(8*C*size)), w)
	ADDQ(I32(int32(32*C)), y.base)
	DECQ(groups)
	JNZ(LabelRef(name + "_group"))
	end()
}

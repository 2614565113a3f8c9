package kernel

import (
	"math"
	"math/big"
	"math/rand/v2"
	"testing"
)

// exactFMA is x*y + z by exact arithmetic and one rounding.
func exactFMA(x, y, z float32) float32 {
	f := func(v float32) *big.Float { return new(big.Float).SetPrec(1000).SetFloat64(float64(v)) }
	p := f(x)
	p.Mul(p, f(y))
	p.Add(p, f(z))
	r, _ := p.Float32()
	return r
}

func same(a, b float32) bool {
	return math.Float32bits(a) == math.Float32bits(b) || a != a && b != b
}

// TestFMARoundsOnce: against exact arithmetic, on plain triples, on sums that fall
// on or next to the midpoint of two binary32 values, and on subnormal results.
func TestFMARoundsOnce(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	bits := func() float32 {
		for {
			if v := math.Float32frombits(rng.Uint32()); v-v == 0 {
				return v
			}
		}
	}
	unit := func() float32 { return math.Float32frombits(rng.Uint32()&0x807fffff | 127<<23) }
	kinds := map[string]func() (x, y, z float32){
		"any bits": func() (x, y, z float32) { return bits(), bits(), bits() },
		"near one": func() (x, y, z float32) { return unit(), unit(), unit() },
		// z far below the last bit of a product that is itself a midpoint.
		"midpoint": func() (x, y, z float32) {
			x = float32(1<<12+1+2*rng.IntN(1<<11)) / (1 << 12)
			y = float32(1<<12+1) / (1 << 12)
			z = float32(math.Ldexp(float64(unit()), -30-rng.IntN(90)))
			return x, y, z
		},
		"subnormal": func() (x, y, z float32) {
			x = float32(math.Ldexp(float64(unit()), -60-rng.IntN(20)))
			y = float32(math.Ldexp(float64(unit()), -60-rng.IntN(20)))
			z = float32(math.Ldexp(float64(unit()), -120-rng.IntN(40)))
			return x, y, z
		},
	}
	for name, draw := range kinds {
		twice := 0
		for range 40_000 {
			x, y, z := draw()
			got, want := FMA(x, y, z), exactFMA(x, y, z)
			if !same(got, want) {
				t.Fatalf("%s: FMA(%x, %x, %x) = %x, exact %x", name, x, y, z, got, want)
			}
			if !same(float32(math.FMA(float64(x), float64(y), float64(z))), want) {
				twice++
			}
		}
		t.Logf("%s: rounding twice would be wrong in %d of 40000", name, twice)
		if name == "midpoint" && twice == 0 {
			t.Errorf("%s: no triple needs one rounding: the case tests nothing", name)
		}
	}
}

func FuzzFMA(f *testing.F) {
	f.Add(uint32(0x3f800001), uint32(0x3f800001), uint32(0x33800000))
	f.Add(uint32(1), uint32(0x3f000000), uint32(0))
	f.Add(uint32(0x80000000), uint32(0x3f000000), uint32(0))
	f.Fuzz(func(t *testing.T, a, b, c uint32) {
		x, y, z := math.Float32frombits(a), math.Float32frombits(b), math.Float32frombits(c)
		if x-x != 0 || y-y != 0 || z-z != 0 {
			return
		}
		if got, want := FMA(x, y, z), exactFMA(x, y, z); !same(got, want) {
			t.Fatalf("FMA(%x, %x, %x) = %x, exact %x", x, y, z, got, want)
		}
	})
}

package checkpoint

import (
	"math"
	"testing"
)

// A scale byte is bad exactly if the largest weight, 6, is not finite under it.
func badScale(b byte) bool {
	return b == 255 || math.IsInf(float64(float32(6*math.Ldexp(1, int(b)-127))), 0)
}

func TestCheckScalesFindsTheFirstByteThatMakesAWeightInfinite(t *testing.T) {
	for n := 0; n <= 25; n++ {
		for at := 0; at < n; at++ {
			for v := 0; v < 256; v++ {
				// Neighbours at both ends of the good range, so that a borrow between
				// bytes would show.
				for _, rest := range []byte{0, 252} {
					s := make([]byte, n)
					for i := range s {
						s[i] = rest
					}
					s[at] = byte(v)
					want := -1
					if badScale(byte(v)) {
						want = at
					}
					if got := CheckScales(s); got != want {
						t.Fatalf("byte %d at %d of %d: got %d, want %d", v, at, n, got, want)
					}
				}
			}
		}
	}
	if got := CheckScales([]byte{1, 253, 1, 1, 1, 1, 1, 1, 255}); got != 1 {
		t.Errorf("of two bad bytes the one at %d was found, want 1", got)
	}
}

func BenchmarkCheckScales(b *testing.B) {
	s := make([]byte, 344064) // one scale tensor of K3
	for i := range s {
		s[i] = 121
	}
	b.SetBytes(int64(len(s)))
	for b.Loop() {
		if CheckScales(s) != -1 {
			b.Fatal("a good scale was refused")
		}
	}
}

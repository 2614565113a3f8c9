package kernel

import "math"

// FMA returns x*y + z with one rounding, in binary32.
//
// float32(math.FMA(x, y, z)) rounds twice, which is wrong when the binary64
// result falls exactly between two binary32 values. The product of two binary32
// values is exact in binary64, so the sum is rounded once there; only when that
// sum looks like such a midpoint, or when the result is subnormal in binary32,
// does the slow path redo it with round-to-odd.
func FMA(x, y, z float32) float32 {
	s := float64(x)*float64(y) + float64(z)
	b := math.Float64bits(s)
	if b&0x1fffffff != 0x10000000 && (b>>52&0x7ff >= 1023-126 || s == 0) {
		return float32(s)
	}
	return fmaOdd(x, y, z)
}

// fmaOdd rounds the exact sum to odd in binary64, which makes the second
// rounding to binary32 correct (Boldo and Melquiond, "Emulation of a FMA and
// correctly rounded sums", IEEE Transactions on Computers, 2008).
func fmaOdd(x, y, z float32) float32 {
	p, c := float64(x)*float64(y), float64(z)
	s := p + c
	t := s - p
	err := (p - (s - t)) + (c - t)
	if err != 0 && math.Float64bits(s)&1 == 0 {
		if (err > 0) == (s > 0) {
			s = math.Float64frombits(math.Float64bits(s) + 1)
		} else {
			s = math.Float64frombits(math.Float64bits(s) - 1)
		}
	}
	return float32(s)
}

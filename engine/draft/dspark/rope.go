package dspark

import (
	"math"

	"deltafin/engine/checkpoint"
)

// frequencies are YaRN's, in radians per position, one for each pair of the rotated key part
// (spec E): long waves are stretched by factor, short ones are left alone, and a ramp lies between.
func frequencies(c *checkpoint.DraftConfig) []float64 {
	dim, theta := float64(c.Rope), float64(c.Theta)
	// pair whose wave turns so often within the original length
	pair := func(turns float32) float64 {
		return dim * math.Log(float64(c.Original)/(2*math.Pi*float64(turns))) / (2 * math.Log(theta))
	}
	lo := max(math.Floor(pair(c.BetaFast)), 0)
	hi := min(math.Ceil(pair(c.BetaSlow)), dim-1)
	f := make([]float64, c.Rope/2)
	for i := range f {
		base := math.Pow(theta, -2*float64(i)/dim)
		t := min(max((float64(i)-lo)/max(hi-lo, 1e-3), 0), 1)
		f[i] = base*(1-t) + base/float64(c.Factor)*t
	}
	return f
}

// scale multiplies the scores: that of the width, times YaRN's temperature.
func scale(c *checkpoint.DraftConfig) float32 {
	m := 0.1*math.Log(float64(c.Factor)) + 1
	return float32(m * m / math.Sqrt(float64(c.Nope+c.Rope)))
}

// turn is the cosine and sine of each pair at one position.
type turn [][2]float32

func turnAt(freq []float64, position int) turn {
	t := make(turn, len(freq))
	for i, f := range freq {
		s, c := math.Sincos(float64(position) * f)
		t[i] = [2]float32{float32(c), float32(s)}
	}
	return t
}

// rotate turns the pairs of x, whose two halves lie side by side.
func (t turn) rotate(x []float32) {
	for i, cs := range t {
		a, b := x[2*i], x[2*i+1]
		x[2*i], x[2*i+1] = a*cs[0]-b*cs[1], a*cs[1]+b*cs[0]
	}
}

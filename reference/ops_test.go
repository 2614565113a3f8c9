package reference

import (
	"math"
	"slices"
	"testing"
)

func near(a, b float64) bool { return math.Abs(a-b) <= 1e-14*max(1, math.Abs(b)) }

func TestSigmoidAndSoftmaxSurviveTheExtremes(t *testing.T) {
	for x, want := range map[float32]float32{0: 0.5, 1e30: 1, -1e30: 0, 200: 1, -200: 0} {
		if got := Sigmoid(x); got != want {
			t.Errorf("Sigmoid(%g) = %g, want %g", x, got, want)
		}
	}
	if p := Softmax([]float32{1e30, -1e30, 1e30}); !slices.Equal(p, []float32{0.5, 0, 0.5}) {
		t.Errorf("got %v", p)
	}
}

func TestNormsPlaceTheirEpsilons(t *testing.T) {
	// RMSNorm adds it to the mean, L2Norm to the sum.
	x := []float64{3e-3, 4e-3}
	r := RMSNorm(x, []float64{2, 1}, 1e-5)
	if want := 2 * 3e-3 / math.Sqrt(12.5e-6+1e-5); !near(r[0], want) {
		t.Errorf("RMSNorm %g, want %g", r[0], want)
	}
	if want := 3e-3 / math.Sqrt(25e-6+1e-6); !near(L2Norm(x)[0], want) {
		t.Errorf("L2Norm %g, want %g", L2Norm(x)[0], want)
	}
}

func TestSiTUGLUCapsBothSidesButNotTheSigmoid(t *testing.T) {
	got := SiTUGLU([]float64{1, 1e3, -1e3}, []float64{2, 1e6, 5}, 4, 25)
	want := []float64{4 * math.Tanh(0.25) / (1 + math.Exp(-1)) * 25 * math.Tanh(0.08), 100, 0}
	for i := range got {
		if !near(got[i], want[i]) {
			t.Errorf("element %d: %g, want %g", i, got[i], want[i])
		}
	}
}

func TestAttnResMixScoresNormalisedAndSumsRaw(t *testing.T) {
	norm, proj := []float64{2, 1}, []float64{0.5, 3}
	a, b := []float64{100, 0}, []float64{0, 1}
	out, p := AttnResMix([][]float64{a, b}, norm, proj, 1e-5)
	// Normalised, a is (sqrt 2, 0) and b (0, sqrt 2): scores 1 sqrt 2 and 3 sqrt 2.
	w := 1 / (1 + math.Exp(2*math.Sqrt2))
	if math.Abs(p[0]-w) > 1e-5 || !near(out[0], 100*p[0]) || !near(out[1], p[1]) {
		t.Errorf("weights %v, want %g first; out %v", p, w, out)
	}
	if out, p := AttnResMix([][]float64{a}, norm, proj, 1e-5); p[0] != 1 || !slices.Equal(out, a) {
		t.Errorf("one source alone must come through unchanged, got %v with weight %v", out, p)
	}
}

func TestShortConvReadsTheCurrentTokenWithItsLastTap(t *testing.T) {
	w := Matrix[float64]{1, 4, []float64{0, 0, 1, 10}}
	got := ShortConv([][]float64{{7}, {7}, {2}, {0.3}}, w)
	if want := 5 / (1 + math.Exp(-5)); !near(got[0], want) {
		t.Errorf("got %g, want %g", got[0], want)
	}
}

func TestDecayGateHasOneScaleAHeadAndStaysInBounds(t *testing.T) {
	y := DecayGate([]float64{0.5, -0.5, 1e9, -1e9}, math.Log(3), -5)
	for i, want := range []float64{math.Exp(-5 / (1 + math.Exp(-1.5))), math.Exp(-5 / (1 + math.Exp(1.5))), math.Exp(-5), 1} {
		if !near(y[i], want) {
			t.Errorf("channel %d: %g, want %g", i, y[i], want)
		}
	}
}

func TestKDAStepDecaysThenWritesThenReads(t *testing.T) {
	s := Matrix[float64]{2, 1, []float64{4, 8}}
	o := KDAStep(s, []float64{1, 10}, []float64{0.5, 1}, []float64{9}, []float64{0.5, 0.25}, 0.5)
	// Decayed (2, 2); seen 0.5*2 + 2 = 3; u = 0.5 (9-3) = 3; state (3.5, 5); read 3.5 + 50.
	if !slices.Equal(s.Data, []float64{3.5, 5}) || o[0] != 53.5 {
		t.Errorf("state %v, read %v", s.Data, o)
	}
}

func TestMLAAttendScalesByTheWholeQueryWidth(t *testing.T) {
	out, p := MLAAttend([]float64{2, 0, 0, 0}, [][]float64{{1, 0, 0, 0}, {0, 1, 1, 1}}, [][]float64{{10}, {20}})
	w := 1 / (1 + math.Exp(-1))
	if !near(p[0], w) || !near(out[0], 10*w+20*(1-w)) {
		t.Errorf("weights %v, want %g first; out %v", p, w, out)
	}
}

func TestRouterChoosesBiasedAndWeighsUnbiased(t *testing.T) {
	c := Config{NumExpertsPerToken: 2, RoutedScaling: 2}
	w := &MoEWeights[float64]{Router: Matrix[float64]{4, 1, []float64{0, 1, 0, 3}}, RouterBias: []float64{1, 0, 1, -1}}
	r := Router(w, []float64{1}, c)
	// Experts 0 and 2 tie at 1.5 and come before 1 and 3 (0.73, -0.05); both score 0.5.
	if !slices.Equal(r.IDs, []int{0, 2}) || !near(r.Weights[0], 1) || !near(r.Weights[1], 1) {
		t.Errorf("ids %v, weights %v", r.IDs, r.Weights)
	}
	if want := 1.5 - 1/(1+math.Exp(-1)); !near(r.Margin, want) {
		t.Errorf("margin %g, want %g", r.Margin, want)
	}
	c.NumExpertsPerToken = 4
	if r := Router(w, []float64{1}, c); !math.IsInf(r.Margin, 1) {
		t.Errorf("with every expert chosen the margin is %g, want +Inf", r.Margin)
	}
}

func TestArgmaxTakesTheLowestOfEquals(t *testing.T) {
	if got := Argmax([]float32{1, 3, 3, 2}); got != 1 {
		t.Errorf("got %d", got)
	}
}

func TestMXFP4DecodesEveryCodeOfEveryScale(t *testing.T) {
	values := []float64{0, 0.5, 1, 1.5, 2, 3, 4, 6}
	packed := make([]byte, 16)
	for i := range packed {
		packed[i] = byte(i) | byte(15-i)<<4 // low nibble i is column 2i, high nibble 15-i column 2i+1
	}
	for scale := range 253 {
		m, err := MXFP4Decode[float32](packed, []byte{byte(scale)}, 1, 32)
		if err != nil {
			t.Fatalf("scale %d: %v", scale, err)
		}
		for i := range 32 {
			code := i / 2
			if i%2 == 1 {
				code = 15 - code
			}
			want := values[code%8] * math.Pow(2, float64(scale-127))
			if code >= 8 {
				want = -want
			}
			if float64(m.Data[i]) != want || math.Signbit(float64(m.Data[i])) != (code >= 8) {
				t.Fatalf("scale %d code %d: %g, want %g", scale, code, m.Data[i], want)
			}
		}
	}
}

func TestMXFP4RefusesWhatIsNoWeight(t *testing.T) {
	six := make([]byte, 16)
	six[3] = 0x70
	for _, c := range []struct {
		name          string
		packed, scale []byte
		rows, cols    int
	}{
		{"scale 255", make([]byte, 16), []byte{255}, 1, 32},
		{"overflow", six, []byte{254}, 1, 32},
		{"short packed", make([]byte, 15), []byte{127}, 1, 32},
		{"short scale", make([]byte, 16), nil, 1, 32},
		{"columns no multiple of 32", make([]byte, 8), []byte{}, 1, 16},
	} {
		if _, err := MXFP4Decode[float32](c.packed, c.scale, c.rows, c.cols); err == nil {
			t.Errorf("%s: no error", c.name)
		}
	}
}

func FuzzMXFP4Decode(f *testing.F) {
	f.Add(make([]byte, 16), []byte{127}, 1, 32)
	f.Add([]byte{}, []byte{}, 1<<62, 32)
	f.Add(make([]byte, 32), []byte{1, 254}, 2, 32)
	f.Fuzz(func(t *testing.T, packed, scale []byte, rows, cols int) {
		m, err := MXFP4Decode[float32](packed, scale, rows, cols)
		if err != nil {
			return
		}
		for i, v := range m.Data {
			if math.IsInf(float64(v), 0) || math.IsNaN(float64(v)) {
				t.Fatalf("element %d is %g without an error", i, v)
			}
		}
	})
}

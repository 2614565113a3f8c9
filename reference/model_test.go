package reference

import (
	"encoding/json"
	"fmt"
	"math"
	"slices"
	"sync"
	"testing"

	"deltafin/golden"
)

// Bounds on the logits against the float64 oracle, on every row that chooses a token. In
// float64 only the order of additions differs, and the frozen numbers are cut at 7e-12.
// In float32 the random tiny models amplify rounding from layer to layer: the float32
// oracle itself reaches 6.4e-4 on tiny-a, 3.0e-4 on tiny-b and 2.0e-5 on nano.
const bound64 = 1e-10

var bound32 = map[string]float64{"tiny-a": 1e-3, "tiny-b": 5e-4, "nano": 5e-5}

var (
	loads   = map[string]func() (*Model[float64], error){}
	loads32 = map[string]func() (*Model[float32], error){}
)

func init() {
	for _, set := range golden.Sets {
		loads[set] = sync.OnceValues(func() (*Model[float64], error) { return Load[float64](golden.ModelDir(set)) })
		loads32[set] = sync.OnceValues(func() (*Model[float32], error) { return Load[float32](golden.ModelDir(set)) })
	}
}

func model64(t *testing.T, set string) *Model[float64] {
	t.Helper()
	m, err := loads[set]()
	if err != nil {
		t.Fatal(err)
	}
	return m
}

func model32(t *testing.T, set string) *Model[float32] {
	t.Helper()
	m, err := loads32[set]()
	if err != nil {
		t.Fatal(err)
	}
	return m
}

func cases(t *testing.T, set string) []golden.Case {
	t.Helper()
	c, err := golden.Cases(set)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func TestFloat64ModelEqualsTheOracle(t *testing.T) {
	for _, set := range golden.Sets {
		m := model64(t, set)
		for _, c := range cases(t, set) {
			t.Run(c.Key(), func(t *testing.T) {
				t.Parallel()
				tokens, rows, routes := greedy(t, m, c)
				if !slices.Equal(tokens, c.Greedy) {
					t.Errorf("greedy tokens %v, oracle %v", tokens, c.Greedy)
				}
				worst := 0.0
				for j, row := range rows {
					worst = max(worst, maxAbs(row, c.Rows64[j]))
				}
				if worst > bound64 {
					t.Errorf("logits are off by %.1e, bound %.0e", worst, bound64)
				}
				t.Logf("float64 error %.1e", worst)
				checkRoutes(t, routes, c, 1e-9)
			})
		}
	}
}

// Float64 over every case has shown the tokens right; float32 is about rounding, which
// the short prompts show as well as the long ones.
func TestFloat32ModelErrsLikeTheFloat32Oracle(t *testing.T) {
	for _, set := range golden.Sets {
		m := model32(t, set)
		for _, c := range cases(t, set) {
			if len(c.PromptIDs) > 150 {
				continue
			}
			t.Run(c.Key(), func(t *testing.T) {
				t.Parallel()
				tokens, rows, routes := greedy(t, m, c)
				if !slices.Equal(tokens, c.Greedy) {
					t.Errorf("greedy tokens %v, oracle %v", tokens, c.Greedy)
				}
				worst := 0.0
				for j, row := range rows {
					worst = max(worst, maxAbs(row, c.Rows64[j]))
				}
				if worst > bound32[set] {
					t.Errorf("logits are off by %.1e, bound %.0e", worst, bound32[set])
				}
				t.Logf("float32 error %.1e here, %.1e the float32 oracle", worst, slices.Max(c.Err32))
				checkRoutes(t, routes, c, 1e-5)
			})
		}
	}
}

// greedy runs a case and returns tokens, the rows that chose them and every position's
// routes by layer.
func greedy[F Float](t *testing.T, m *Model[F], c golden.Case) (tokens []int, rows [][]F, routes map[int][]Route[F]) {
	t.Helper()
	st, next := m.NewState(), c.PromptIDs
	routes = map[int][]Route[F]{}
	for range c.Greedy {
		logits, tr, err := m.Forward(next, st)
		if err != nil {
			t.Fatal(err)
		}
		for i, l := range tr.Layers {
			routes[i] = append(routes[i], l.Routes...)
		}
		row := logits[len(logits)-1]
		next = []int{Argmax(row)}
		tokens, rows = append(tokens, next[0]), append(rows, row)
	}
	return tokens, rows, routes
}

// checkRoutes compares the chosen experts wherever the oracle's margin exceeds margin.
func checkRoutes[F Float](t *testing.T, routes map[int][]Route[F], c golden.Case, margin float64) {
	t.Helper()
	for _, want := range c.Routes {
		if len(routes[want.Layer]) != len(want.IDs) {
			t.Fatalf("layer %d: %d routed positions, oracle %d", want.Layer, len(routes[want.Layer]), len(want.IDs))
		}
		for p, got := range routes[want.Layer] {
			if want.Margin[p] > margin && !sameSet(got.IDs, want.IDs[p]) {
				t.Errorf("layer %d position %d: experts %v, oracle %v with margin %g", want.Layer, p, got.IDs, want.IDs[p], want.Margin[p])
			}
		}
	}
}

func TestEveryLayerTensorEqualsTheOracle(t *testing.T) {
	const bound = 1e-9
	for _, k := range [][2]string{{"tiny-a", "len17"}, {"tiny-b", "len17"}, {"nano", "france"}} {
		c, err := golden.Find(k[0], k[1])
		if err != nil {
			t.Fatal(err)
		}
		m := model64(t, c.Set)
		_, tr, err := m.Forward(c.PromptIDs, m.NewState())
		if err != nil {
			t.Fatal(err)
		}
		for i, want := range c.Streams.Layers {
			got := tr.Layers[i]
			for _, x := range []struct {
				name      string
				got, want [][]float64
			}{
				{"attention mix", got.AttnResProbs, want.AttnResProbs},
				{"attention input", got.AttnIn, want.AttnIn},
				{"attention output", got.AttnOut, want.AttnOut},
				{"feed-forward mix", got.MLPResProbs, want.MLPResProbs},
				{"feed-forward input", got.MLPIn, want.MLPIn},
				{"feed-forward output", got.MLPOut, want.MLPOut},
				{"stream", got.Stream, want.Stream},
			} {
				if i == 0 && x.want == nil {
					continue // nothing to mix in front of layer 0
				}
				if e := maxAbsRows(x.got, x.want); e > bound {
					t.Errorf("%s layer %d: %s is off by %.1e", c.Key(), i, x.name, e)
				}
			}
			for p, ids := range want.RouterIDs {
				r := got.Routes[p]
				if !slices.Equal(r.IDs, ids) {
					t.Errorf("%s layer %d position %d: experts %v, oracle %v", c.Key(), i, p, r.IDs, ids)
				}
				if e := maxAbs(r.Weights, want.RouterWeights[p]); e > bound {
					t.Errorf("%s layer %d position %d: router weights are off by %.1e", c.Key(), i, p, e)
				}
			}
		}
		if e := max(maxAbsRows(tr.OutResProbs, c.Streams.OutResProbs), maxAbsRows(tr.Final, c.Streams.Final)); e > bound {
			t.Errorf("%s: output mix or final norm is off by %.1e", c.Key(), e)
		}
	}
}

// The first golden run also froze a fingerprint of each layer's state: first values and
// Euclidean norm of convolution tails, recurrent matrices and latents.
func TestStateAfterThePromptEqualsTheOracle(t *testing.T) {
	type fingerprint struct {
		First []float64
		L2    float64
	}
	same := func(t *testing.T, what string, got []float64, want fingerprint) {
		t.Helper()
		if e := maxAbs(got[:len(want.First)], want.First); e > 1e-9 {
			t.Errorf("%s: first values are off by %.1e", what, e)
		}
		if e := math.Abs(math.Sqrt(Dot(got, got)) - want.L2); e > 1e-8 {
			t.Errorf("%s: norm is off by %.1e", what, e)
		}
	}
	for _, set := range []string{"tiny-a", "tiny-b"} {
		var g struct {
			Prompts []struct {
				Len   int
				IDs   []int `json:"ids"`
				State []struct {
					ConvQ      fingerprint `json:"conv_q"`
					ConvK      fingerprint `json:"conv_k"`
					ConvV      fingerprint `json:"conv_v"`
					S          fingerprint
					Len        int
					LatentLast fingerprint `json:"latent_last"`
					KPELast    fingerprint `json:"kpe_last"`
					LatentL2   float64     `json:"latent_all_l2"`
				} `json:"state_after_prompt"`
			}
		}
		b, err := golden.ReadFile(set, "golden_f64.json")
		if err != nil {
			t.Fatal(err)
		}
		if err := json.Unmarshal(b, &g); err != nil {
			t.Fatal(err)
		}
		m := model64(t, set)
		for _, p := range g.Prompts {
			st := m.NewState()
			if _, _, err := m.Forward(p.IDs, st); err != nil {
				t.Fatal(err)
			}
			for i, want := range p.State {
				at := fmt.Sprintf("%s len%d layer %d ", set, p.Len, i)
				if s := st.KDA[i]; s != nil {
					same(t, at+"conv q", slices.Concat(s.QConv...), want.ConvQ)
					same(t, at+"conv k", slices.Concat(s.KConv...), want.ConvK)
					same(t, at+"conv v", slices.Concat(s.VConv...), want.ConvV)
					var all []float64
					for _, h := range s.S {
						all = append(all, h.Data...)
					}
					same(t, at+"S", all, want.S)
					continue
				}
				s := st.MLA[i]
				if len(s.Latent) != want.Len {
					t.Fatalf("%s: %d cached positions, oracle %d", at, len(s.Latent), want.Len)
				}
				same(t, at+"latent", s.Latent[want.Len-1], want.LatentLast)
				same(t, at+"rope slot", s.KRope[want.Len-1], want.KPELast)
				same(t, at+"all latents", slices.Concat(s.Latent...), fingerprint{L2: want.LatentL2})
			}
		}
	}
}

func TestSplittingTheSequenceChangesNothing(t *testing.T) {
	m := model64(t, "tiny-b")
	c, err := golden.Find("tiny-b", "len64")
	if err != nil {
		t.Fatal(err)
	}
	whole, _, err := m.Forward(c.PromptIDs, m.NewState())
	if err != nil {
		t.Fatal(err)
	}
	var parts [][]float64
	st := m.NewState()
	for i := 0; i < len(c.PromptIDs); {
		n := min(1+i%7, len(c.PromptIDs)-i)
		l, _, err := m.Forward(c.PromptIDs[i:i+n], st)
		if err != nil {
			t.Fatal(err)
		}
		parts, i = append(parts, l...), i+n
	}
	if st.Len != len(c.PromptIDs) || maxAbsRows(whole, parts) != 0 {
		t.Errorf("logits differ by %g after %d positions", maxAbsRows(whole, parts), st.Len)
	}
}

// A golden that a wrong model also passes proves nothing: each mistake below has been
// made by some engine and must move the logits of the 17-token prompt far beyond rounding.
func TestGoldensNoticeMistakes(t *testing.T) {
	mistakes := map[string]func(m *Model[float64]){
		"A_log of the wrong head": func(m *Model[float64]) {
			eachKDA(m, func(w *KDAWeights[float64]) { slices.Reverse(w.ALog) })
		},
		"convolution taps reversed": func(m *Model[float64]) {
			eachKDA(m, func(w *KDAWeights[float64]) {
				for _, c := range []Matrix[float64]{w.QConv, w.KConv, w.VConv} {
					for r := range c.Rows {
						slices.Reverse(c.Row(r))
					}
				}
			})
		},
		"dt_bias left out": func(m *Model[float64]) {
			eachKDA(m, func(w *KDAWeights[float64]) { clear(w.DtBias) })
		},
		"rope slot dropped from the keys": func(m *Model[float64]) {
			eachMLA(m, func(w *MLAWeights[float64]) { clear(w.KVA.Data[m.Config.KVLoraRank*w.KVA.Cols:]) })
		},
		"router bias left out": func(m *Model[float64]) {
			eachMoE(m, func(w *MoEWeights[float64]) { clear(w.RouterBias) })
		},
		"latent norm weight left out": func(m *Model[float64]) {
			eachMoE(m, func(w *MoEWeights[float64]) {
				for i := range w.Norm {
					w.Norm[i] = 1
				}
			})
		},
		"nibbles swapped": func(m *Model[float64]) {
			eachMoE(m, func(w *MoEWeights[float64]) {
				for _, e := range w.Experts {
					for _, x := range []Matrix[float64]{e.Gate, e.Up, e.Down} {
						for i := 0; i < len(x.Data); i += 2 {
							x.Data[i], x.Data[i+1] = x.Data[i+1], x.Data[i]
						}
					}
				}
			})
		},
		"gate and up swapped": func(m *Model[float64]) {
			eachMoE(m, func(w *MoEWeights[float64]) {
				for i := range w.Experts {
					w.Experts[i].Gate, w.Experts[i].Up = w.Experts[i].Up, w.Experts[i].Gate
				}
			})
		},
		"residual block one longer":  func(m *Model[float64]) { m.Config.AttnResBlockSize++ },
		"tanh cap of the gate wrong": func(m *Model[float64]) { m.Config.SituBeta = 25 },
		"gate bound wrong":           func(m *Model[float64]) { m.Config.Linear.GateLowerBound = -8 },
		"output mix is the stream alone": func(m *Model[float64]) {
			for i := range m.OutRes.Norm {
				m.OutRes.Proj[i] = 0
			}
		},
	}
	c, err := golden.Find("tiny-a", "len17")
	if err != nil {
		t.Fatal(err)
	}
	for name, mistake := range mistakes {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			m, err := Load[float64](golden.ModelDir("tiny-a"))
			if err != nil {
				t.Fatal(err)
			}
			mistake(m)
			logits, _, err := m.Forward(c.PromptIDs, m.NewState())
			if err != nil {
				t.Fatal(err)
			}
			if e := maxAbs(logits[16], c.Logits64); e < 0.5 {
				t.Errorf("moves the logits by only %.1e", e)
			} else {
				t.Logf("moves the logits by %.1f", e)
			}
		})
	}
}

func eachKDA(m *Model[float64], f func(*KDAWeights[float64])) {
	for _, l := range m.Layers {
		if l.KDA != nil {
			f(l.KDA)
		}
	}
}

func eachMLA(m *Model[float64], f func(*MLAWeights[float64])) {
	for _, l := range m.Layers {
		if l.MLA != nil {
			f(l.MLA)
		}
	}
}

func eachMoE(m *Model[float64], f func(*MoEWeights[float64])) {
	for _, l := range m.Layers {
		if l.MoE != nil {
			f(l.MoE)
		}
	}
}

func TestForwardRefusesBadIDs(t *testing.T) {
	m := model64(t, "tiny-b")
	st := m.NewState()
	for _, ids := range [][]int{nil, {}, {-1}, {515}, {1, 2, 1 << 40}} {
		if _, _, err := m.Forward(ids, st); err == nil || st.Len != 0 {
			t.Errorf("%v: error %v, state moved to %d", ids, err, st.Len)
		}
	}
}

func maxAbs[F Float](a []F, b []float64) float64 {
	if len(a) != len(b) {
		return math.Inf(1)
	}
	var m float64
	for i := range a {
		d := math.Abs(float64(a[i]) - b[i])
		if math.IsNaN(d) {
			return math.Inf(1)
		}
		m = max(m, d)
	}
	return m
}

func maxAbsRows[F Float](a [][]F, b [][]float64) float64 {
	if len(a) != len(b) {
		return math.Inf(1)
	}
	var m float64
	for i := range a {
		m = max(m, maxAbs(a[i], b[i]))
	}
	return m
}

func sameSet(a, b []int) bool {
	return slices.Equal(slices.Sorted(slices.Values(a)), slices.Sorted(slices.Values(b)))
}

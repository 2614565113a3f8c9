package engine

import (
	"context"
	"math"
	"slices"
	"testing"

	"deltafin/engine/k3"
	"deltafin/engine/kernel"
	"deltafin/golden"
	"deltafin/reference"
)

// relative is the L2 distance of got from want, relative to want.
func relative[F float32 | float64](got []float32, want []F) float64 {
	var d, n float64
	for i, w := range want {
		e := float64(got[i]) - float64(w)
		d, n = d+e*e, n+float64(w)*float64(w)
	}
	return math.Sqrt(d / max(n, 1e-300))
}

func widened(x []float32) []float64 {
	y := make([]float64, len(x))
	for i, v := range x {
		y[i] = float64(v)
	}
	return y
}

// recording is what a pass showed: per layer and name, [positions][...].
type recording struct {
	values  []map[string][][]float32
	ids     [][]int32
	weights [][]float32
}

func record(t *testing.T, e *Engine, ids []int) recording {
	t.Helper()
	m := e.Model()
	rec := recording{make([]map[string][][]float32, e.Config().Layers+1), make([][]int32, e.Config().Layers), make([][]float32, e.Config().Layers)}
	for l := range rec.values {
		rec.values[l] = map[string][][]float32{}
	}
	m.Observe = func(l int, name string, v kernel.Mat) {
		for r := range v.Rows {
			rec.values[l][name] = append(rec.values[l][name], slices.Clone(v.Row(r)))
		}
	}
	m.ObserveRoutes = func(l int, ids []int32, weights []float32) {
		rec.ids[l], rec.weights[l] = slices.Clone(ids), slices.Clone(weights)
	}
	defer func() { m.Observe, m.ObserveRoutes = nil, nil }()
	if _, err := m.Forward(context.Background(), k3.NewState(e.Config()), ids, k3.Pass{Logits: len(ids)}); err != nil {
		t.Fatal(err)
	}
	return rec
}

// TestEachOperationIsTheReferences feeds every operation of the float64 reference
// with the engine's own inputs, so that an error stays where it is made.
func TestEachOperationIsTheReferences(t *testing.T) {
	const bound = 1e-5 // relative; float32 sums over at most a few hundred terms
	for _, set := range golden.Sets {
		ref, err := reference.Load[float64](golden.ModelDir(set))
		if err != nil {
			t.Fatal(err)
		}
		e := openSet(t, set, Options{})
		cases, err := golden.Cases(set)
		if err != nil {
			t.Fatal(err)
		}
		i := slices.IndexFunc(cases, func(c golden.Case) bool { return c.Streams != nil })
		c := &cases[i]
		t.Run(c.Key(), func(t *testing.T) {
			rec, st, worst := record(t, e, c.PromptIDs), ref.NewState(), map[string]float64{}
			near := func(op string, l, pos int, got []float32, want []float64) {
				t.Helper()
				d := relative(got, want)
				worst[op] = max(worst[op], d)
				if !(d <= bound) {
					t.Errorf("layer %d position %d: %s is off by %.1e", l, pos, op, d)
				}
			}
			for pos := range c.PromptIDs {
				stream := ref.Embed.Row(c.PromptIDs[pos])
				var banked [][]float64
				for l, w := range ref.Layers {
					at := func(name string) []float32 { return rec.values[l][name][pos] }
					mix := func(op string, r reference.ResWeights[float64], norm []float64, got []float32) {
						h, _ := reference.AttnResMix(append(slices.Clone(banked), stream), r.Norm, r.Proj, ref.Config.RMSNormEps)
						near(op, l, pos, got, reference.RMSNorm(h, norm, ref.Config.RMSNormEps))
					}
					mix("mix before attention", w.AttnRes, w.AttnNorm, at("attn_in"))
					x := widened(at("attn_in"))
					if l%ref.Config.AttnResBlockSize == 0 {
						banked = append(banked, stream)
						stream = make([]float64, len(stream))
					}
					if w.KDA != nil {
						a, _ := reference.KDALayer(w.KDA, x, st.KDA[l], ref.Config)
						near("kda", l, pos, at("attn_out"), a)
					} else {
						a, _ := reference.MLALayer(w.MLA, x, st.MLA[l], ref.Config)
						near("mla", l, pos, at("attn_out"), a)
					}
					stream = reference.Add(stream, widened(at("attn_out")))
					mix("mix before mlp", w.MLPRes, w.MLPNorm, at("mlp_in"))
					x = widened(at("mlp_in"))
					if w.Dense != nil {
						near("dense mlp", l, pos, at("mlp_out"), reference.GLU(w.Dense, x, ref.Config))
					} else {
						f, route := reference.LatentMoE(w.MoE, x, ref.Config)
						near("moe", l, pos, at("mlp_out"), f)
						k := ref.Config.NumExpertsPerToken
						checkRoute(t, l, pos, route, rec.ids[l][pos*k:][:k], rec.weights[l][pos*k:][:k])
					}
					near("stream", l, pos, at("stream"), reference.Add(stream, widened(at("mlp_out"))))
					stream = widened(at("stream"))
				}
			}
			for _, op := range []string{"mix before attention", "kda", "mla", "mix before mlp", "dense mlp", "moe", "stream"} {
				t.Logf("%-12s %-22s max relative error %.1e", c.Key(), op, worst[op])
			}
		})
	}
}

func checkRoute(t *testing.T, l, pos int, want reference.Route[float64], ids []int32, weights []float32) {
	t.Helper()
	if want.Margin <= 1e-5 {
		return // a near tie may fall either way
	}
	for i, e := range want.IDs {
		j := slices.Index(ids, int32(e))
		if j < 0 {
			t.Errorf("layer %d position %d: routed to %v, the reference to %v (margin %g)", l, pos, ids, want.IDs, want.Margin)
			return
		}
		if math.Abs(float64(weights[j])-want.Weights[i]) > 1e-6 {
			t.Errorf("layer %d position %d: weight of expert %d is %g, the reference's %g", l, pos, e, weights[j], want.Weights[i])
		}
	}
}

// TestLayersFollowTheFrozenOracle compares whole passes: errors accumulate here.
func TestLayersFollowTheFrozenOracle(t *testing.T) {
	for _, set := range golden.Sets {
		e := openSet(t, set, Options{})
		cases, err := golden.Cases(set)
		if err != nil {
			t.Fatal(err)
		}
		for _, c := range cases {
			if c.Streams == nil {
				continue
			}
			rec := record(t, e, c.PromptIDs)
			for l, want := range c.Streams.Layers {
				for name, rows := range map[string][][]float64{
					"attn_in": want.AttnIn, "attn_out": want.AttnOut, "mlp_in": want.MLPIn, "mlp_out": want.MLPOut, "stream": want.Stream,
				} {
					for pos, row := range rows {
						if d := relative(rec.values[l][name][pos], row); !(d <= 1e-4) {
							t.Errorf("%s layer %d position %d: %s is off by %.1e", c.Key(), l, pos, name, d)
						}
					}
				}
			}
		}
	}
}

// TestRoutesAreTheOracles checks every position of every golden prompt and its
// continuation.
func TestRoutesAreTheOracles(t *testing.T) {
	for _, set := range golden.Sets {
		e := openSet(t, set, Options{})
		cases, err := golden.Cases(set)
		if err != nil {
			t.Fatal(err)
		}
		compared, close := 0, 0
		for _, c := range cases {
			rec := record(t, e, append(slices.Clone(c.PromptIDs), c.Greedy[:len(c.Greedy)-1]...))
			k := e.Config().TopK
			for _, want := range c.Routes {
				for pos, ids := range want.IDs {
					if want.Margin[pos] <= 1e-5 {
						close++
						continue
					}
					compared++
					got := rec.ids[want.Layer][pos*k:][:k]
					want := slices.Clone(ids)
					slices.Sort(want)
					if !slices.EqualFunc(got, want, func(a int32, b int) bool { return int(a) == b }) {
						t.Errorf("%s layer %d position %d: routed to %v, the oracle to %v", c.Key(), want, pos, got, want)
					}
				}
			}
		}
		t.Logf("%-8s %d routes equal the oracle's, %d too close to call", set, compared, close)
		if compared == 0 {
			t.Errorf("%s: no route was compared", set)
		}
	}
}

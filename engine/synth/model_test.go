package synth

import (
	"context"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"deltafin/engine"
	"deltafin/engine/kernel"
)

func opened(t *testing.T, p Params) *engine.Engine {
	t.Helper()
	e, err := engine.Open(context.Background(), written(t, p), engine.Options{})
	must(t, err)
	t.Cleanup(func() { e.Close() })
	return e
}

// prompt is n token ids without order.
func prompt(n, vocab int) []int {
	r := rand.New(rand.NewPCG(1, 2))
	ids := make([]int, n)
	for i := range ids {
		ids[i] = r.IntN(vocab)
	}
	return ids
}

func rms(v kernel.Mat) float64 {
	var sum float64
	for i := range v.Rows {
		for _, x := range v.Row(i) {
			sum += float64(x) * float64(x)
		}
	}
	return math.Sqrt(sum / float64(v.Rows*v.Cols))
}

func TestNothingVanishesOrExplodesOver93LayersAndTokensVary(t *testing.T) {
	p, err := Preset("tiny")
	must(t, err)
	p.Layers, p.ResBlock, p.Vocab = 93, 12, 4096
	e := opened(t, p)
	bounds := map[string][2]float64{
		"attn_in": {0.9, 1.1}, "attn_out": {0.5, 2},
		"mlp_in": {0.9, 1.1}, "mlp_out": {0.7, 3},
		"stream": {1, 10},
	}
	seen := 0
	e.Model().Observe = func(l int, name string, v kernel.Mat) {
		b, ok := bounds[name]
		if !ok {
			return
		}
		seen++
		if x := rms(v); !(x >= b[0] && x <= b[1]) {
			t.Errorf("layer %d: %s has root mean square %g, want %g to %g", l, name, x, b[0], b[1])
		}
	}
	s := e.NewSession()
	logits, err := s.Feed(context.Background(), prompt(32, p.Vocab), nil)
	must(t, err)
	if seen != p.Layers*len(bounds) {
		t.Fatalf("%d values were seen, want %d", seen, p.Layers*len(bounds))
	}
	e.Model().Observe = nil

	const tokens = 24
	ids := map[int]bool{}
	var margins []float64
	for range tokens {
		id := kernel.ArgMax(logits)
		ids[id] = true
		second := math.Inf(-1)
		for i, x := range logits {
			if i != id {
				second = max(second, float64(x))
			}
		}
		margins = append(margins, float64(logits[id])-second)
		logits, err = s.Feed(context.Background(), []int{id}, nil)
		must(t, err)
	}
	slices.Sort(margins)
	t.Logf("%d different ids in %d greedy tokens; margin of the best logit: least %.3f, median %.3f, most %.3f",
		len(ids), tokens, margins[0], margins[tokens/2], margins[tokens-1])
	if len(ids) < tokens/2 || margins[tokens/2] < 0.1 {
		t.Error("the continuation is degenerate")
	}
}

// The widths do not matter to the routes: K3's experts and router over a narrow model.
func TestRoutesLeanButDoNotCollapse(t *testing.T) {
	p, err := Preset("k3-slice")
	must(t, err)
	p.Hidden, p.Intermediate, p.MoEInter, p.Latent = 256, 256, 32, 32
	p.KDAHeads, p.KDADim, p.Heads, p.QLora, p.KVLora, p.Nope, p.Rope, p.VDim = 4, 32, 4, 64, 32, 32, 16, 32
	e := opened(t, p)
	const rows = 512
	bounds := map[int][2]float64{17: {0.18, 0.30}, 128: {0.50, 0.70}, 512: {0.65, 0.85}}
	layers := 0
	e.Model().ObserveRoutes = func(l int, ids []int32, _ []float32) {
		layers++
		uses := map[int32]int{}
		for i, id := range ids {
			uses[id]++
			b, ok := bounds[(i+1)/p.TopK]
			if !ok || (i+1)%p.TopK != 0 {
				continue
			}
			share := float64(len(uses)) / float64(p.Experts)
			t.Logf("layer %d: %d tokens use %d of %d experts, %.1f%%", l, (i+1)/p.TopK, len(uses), p.Experts, 100*share)
			if share < b[0] || share > b[1] {
				t.Errorf("layer %d: %d tokens use %.3f of the experts, want %g to %g", l, (i+1)/p.TopK, share, b[0], b[1])
			}
		}
		most := 0
		for _, n := range uses {
			most = max(most, n)
		}
		if most > rows/2 {
			t.Errorf("layer %d: an expert is used by %d of %d tokens", l, most, rows)
		}
	}
	_, err = e.NewSession().Feed(context.Background(), prompt(rows, p.Vocab), nil)
	must(t, err)
	if layers != 2 {
		t.Errorf("%d layers with experts were seen", layers)
	}
}

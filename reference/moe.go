package reference

import (
	"cmp"
	"math"
	"slices"
)

// GLUWeights are one gated feed-forward part: the dense MLP, the shared experts, or one
// routed expert (w1, w3, w2).
type GLUWeights[F Float] struct {
	Gate, Up Matrix[F] // [inner][in]
	Down     Matrix[F] // [out][inner]
}

// MoEWeights are one latent mixture-of-experts part (spec C.11).
type MoEWeights[F Float] struct {
	Router     Matrix[F]       // [experts][hidden]
	RouterBias []F             // [experts], for the choice only
	Down       Matrix[F]       // [latent][hidden] routed_expert_down_proj
	Norm       []F             // [latent] routed_expert_norm
	Up         Matrix[F]       // [hidden][latent] routed_expert_up_proj
	Shared     GLUWeights[F]   // on hidden
	Experts    []GLUWeights[F] // on latent
}

// Route is the choice for one position.
type Route[F Float] struct {
	IDs     []int // [top-k] best biased score first, the lower id first among equals
	Weights []F   // [top-k] in the order of IDs
	Margin  F     // biased score of the last chosen minus the first left out; +Inf if none is
}

// GLU is W_down situ(W_gate x, W_up x) (spec C.10).
func GLU[F Float](w *GLUWeights[F], x []F, c Config) []F {
	return w.Down.Mul(SiTUGLU(w.Gate.Mul(x), w.Up.Mul(x), c.SituBeta, c.SituLinearBeta))
}

// Router is spec C.11 steps 1 to 3: x [hidden] is the full normalised input. The bias
// chooses; the weights come from the unbiased scores.
func Router[F Float](w *MoEWeights[F], x []F, c Config) Route[F] {
	score := w.Router.Mul(x)
	biased := make([]F, len(score))
	order := make([]int, len(score))
	for e := range score {
		score[e] = Sigmoid(score[e])
		biased[e] = score[e] + w.RouterBias[e]
		order[e] = e
	}
	slices.SortStableFunc(order, func(a, b int) int { return cmp.Compare(biased[b], biased[a]) })
	k := c.NumExpertsPerToken
	r := Route[F]{IDs: order[:k:k], Margin: F(math.Inf(1))}
	if k < len(order) {
		r.Margin = biased[order[k-1]] - biased[order[k]]
	}
	var sum F
	for _, e := range r.IDs {
		sum += score[e]
	}
	const tiny = 1e-20 // keeps a row of zero scores finite; fixed in the official code
	for _, e := range r.IDs {
		r.Weights = append(r.Weights, score[e]/(sum+F(tiny))*F(c.RoutedScaling))
	}
	return r
}

// LatentMoE is spec C.11 for one position: x [hidden] gives [hidden]. The experts' outputs
// are added in ascending expert id.
func LatentMoE[F Float](w *MoEWeights[F], x []F, c Config) ([]F, Route[F]) {
	r := Router(w, x, c)
	z := w.Down.Mul(x)
	u := make([]F, len(z))
	slots := make([]int, len(r.IDs))
	for i := range slots {
		slots[i] = i
	}
	slices.SortFunc(slots, func(a, b int) int { return cmp.Compare(r.IDs[a], r.IDs[b]) })
	for _, s := range slots {
		for d, y := range GLU(&w.Experts[r.IDs[s]], z, c) {
			u[d] += r.Weights[s] * y
		}
	}
	routed := w.Up.Mul(RMSNorm(u, w.Norm, c.RMSNormEps)) // the norm comes after the weighted sum
	return Add(routed, GLU(&w.Shared, x, c)), r
}

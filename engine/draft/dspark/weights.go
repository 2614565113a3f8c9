package dspark

import (
	"context"
	"fmt"
	"maps"
	"slices"

	"deltafin/engine/checkpoint"
	"deltafin/engine/draft/weights"
	"deltafin/engine/kernel"
)

// network is a draft's weights, as stored; vectors are widened (spec E).
type network struct {
	set *weights.Set // what the others lie in

	contextProj            *kernel.Matrix // [hidden][layers watched * hidden]
	contextNorm, finalNorm []float32      // [hidden]
	markov1, markov2       *kernel.Matrix // [vocab][markov]
	confidence, bias       []float32      // [hidden+markov], [1]
	layers                 []layer
}

type layer struct {
	inputNorm, postNorm []float32      // [hidden]
	qa, qb              *kernel.Matrix // [q_lora][hidden], [heads*(nope+rope)][q_lora]
	qaNorm              []float32      // [q_lora]
	kva, kvb            *kernel.Matrix // [kv_lora+rope][hidden], [heads*(nope+v)][kv_lora]
	kvNorm              []float32      // [kv_lora]
	o                   *kernel.Matrix // [hidden][heads*v]
	gate, up, down      *kernel.Matrix // [intermediate][hidden], [hidden][intermediate]
}

// embedding is the one tensor that is not read: the target has the same rows.
const embedding = "embed_tokens.weight"

// owned are the tensors that are read.
func (p *proposer) owned() []checkpoint.Tensor {
	list := slices.Collect(maps.Values(p.draft.Tensor))
	return slices.DeleteFunc(list, func(t checkpoint.Tensor) bool { return t.Name == embedding })
}

// read reads all weights and puts them in their places.
func (p *proposer) read(ctx context.Context) (*network, error) {
	set, err := weights.Read(ctx, p.drives, []string{p.draft.Path}, p.owned())
	if err != nil {
		return nil, err
	}
	m, v := set.Matrix, set.Vector
	w := &network{
		set:         set,
		contextProj: m["context_proj.weight"], contextNorm: v["context_norm.weight"], finalNorm: v["final_norm.weight"],
		markov1: m["markov_head.markov_w1.weight"], markov2: m["markov_head.markov_w2.weight"],
		confidence: v["confidence_head.proj.weight"], bias: v["confidence_head.proj.bias"],
	}
	for i := range p.c.Layers {
		at := fmt.Sprintf("layers.%d.", i)
		attn, mlp := at+"self_attn.", at+"mlp."
		w.layers = append(w.layers, layer{
			inputNorm: v[at+"input_layernorm.weight"], postNorm: v[at+"post_attention_layernorm.weight"],
			qa: m[attn+"q_a_proj.weight"], qaNorm: v[attn+"q_a_layernorm.weight"], qb: m[attn+"q_b_proj.weight"],
			kva: m[attn+"kv_a_proj_with_mqa.weight"], kvNorm: v[attn+"kv_a_layernorm.weight"], kvb: m[attn+"kv_b_proj.weight"],
			o: m[attn+"o_proj.weight"], gate: m[mlp+"gate_proj.weight"], up: m[mlp+"up_proj.weight"], down: m[mlp+"down_proj.weight"],
		})
	}
	return w, nil
}

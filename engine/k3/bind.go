package k3

import (
	"fmt"

	"deltafin/engine/checkpoint"
	"deltafin/engine/kernel"
)

// Tensors gives dense tensors by their name in the checkpoint (spec B.2), without
// its common prefix.
type Tensors interface {
	// Matrix returns a projection [rows][cols].
	Matrix(name string, rows, cols int) (*kernel.Matrix, error)
	// Vector returns all n elements of a tensor, widened to float32.
	Vector(name string, n int) ([]float32, error)
}

// binder collects the tensors of one part and remembers the first error.
type binder struct {
	src    Tensors
	prefix string
	err    error
}

func (b *binder) matrix(name string, rows, cols int) *kernel.Matrix {
	if b.err != nil {
		return nil
	}
	var m *kernel.Matrix
	m, b.err = b.src.Matrix(b.prefix+name, rows, cols)
	return m
}

func (b *binder) vector(name string, n int) []float32 {
	if b.err != nil {
		return make([]float32, n)
	}
	var v []float32
	if v, b.err = b.src.Vector(b.prefix+name, n); b.err != nil {
		return make([]float32, n)
	}
	return v
}

// folded is the product of a residual mix's norm and query vectors (spec C.3).
func (b *binder) folded(name string, n int) []float32 {
	norm, q := b.vector(name+"_norm.weight", n), b.vector(name+"_proj.weight", n)
	for i := range norm {
		norm[i] *= q[i]
	}
	return norm
}

// BindAttention takes the first half of layer l from src.
func BindAttention(c *checkpoint.Config, l int, src Tensors) (*Attention, error) {
	b := layerBinder(l, src)
	w := &Attention{Res: b.folded("self_attention_res", c.Hidden), Norm: b.vector("input_layernorm.weight", c.Hidden)}
	if c.MLA[l] {
		w.MLA = bindMLA(c, b)
	} else {
		w.KDA = bindKDA(c, b)
	}
	return w, b.err
}

// BindFeedForward takes the second half of layer l from src.
func BindFeedForward(c *checkpoint.Config, l int, src Tensors) (*FeedForward, error) {
	b := layerBinder(l, src)
	w := &FeedForward{Res: b.folded("mlp_res", c.Hidden), Norm: b.vector("post_attention_layernorm.weight", c.Hidden)}
	if c.IsMoE(l) {
		w.MoE = bindMoE(c, b)
	} else {
		w.Dense = bindMLP(b, "mlp.", c.Hidden, c.Intermediate)
	}
	return w, b.err
}

func layerBinder(l int, src Tensors) *binder {
	return &binder{src: src, prefix: fmt.Sprintf("model.layers.%d.", l)}
}

func bindKDA(c *checkpoint.Config, b *binder) *KDA {
	p, at := c.KDAHeads*c.KDADim, "self_attn."
	w := &KDA{
		Q:      b.matrix(at+"q_proj.weight", p, c.Hidden),
		K:      b.matrix(at+"k_proj.weight", p, c.Hidden),
		V:      b.matrix(at+"v_proj.weight", p, c.Hidden),
		G:      b.matrix(at+"g_proj.weight", p, c.Hidden),
		FA:     b.matrix(at+"f_a_proj.weight", c.KDADim, c.Hidden),
		FB:     b.matrix(at+"f_b_proj.weight", p, c.KDADim),
		B:      b.matrix(at+"b_proj.weight", c.KDAHeads, c.Hidden),
		O:      b.matrix(at+"o_proj.weight", c.Hidden, p),
		A:      make([]float32, c.KDAHeads),
		DtBias: b.vector(at+"dt_bias", p),
		Norm:   b.vector(at+"o_norm.weight", c.KDADim),
	}
	// A_log has one value per head; longer ones are padded with zeros (spec F.1, F.10).
	kernel.Exp(w.A, b.vector(at+"A_log", c.KDAHeads))
	for i, n := range []string{"q", "k", "v"} {
		byChannel := b.vector(at+n+"_conv1d.weight", p*c.ConvKernel)
		for j := range c.ConvKernel {
			tap := kernel.Floats(p)
			for ch := range tap {
				tap[ch] = byChannel[ch*c.ConvKernel+j]
			}
			w.Conv[i] = append(w.Conv[i], tap)
		}
	}
	return w
}

func bindMLA(c *checkpoint.Config, b *binder) *MLA {
	at := "self_attn."
	return &MLA{
		QA:     b.matrix(at+"q_a_proj.weight", c.QLora, c.Hidden),
		QANorm: b.vector(at+"q_a_layernorm.weight", c.QLora),
		QB:     b.matrix(at+"q_b_proj.weight", c.Heads*(c.Nope+c.Rope), c.QLora),
		KVA:    b.matrix(at+"kv_a_proj_with_mqa.weight", c.KVLora+c.Rope, c.Hidden),
		KVNorm: b.vector(at+"kv_a_layernorm.weight", c.KVLora),
		KVB:    b.matrix(at+"kv_b_proj.weight", c.Heads*(c.Nope+c.VDim), c.KVLora),
		G:      b.matrix(at+"g_proj.weight", c.Heads*c.VDim, c.Hidden),
		O:      b.matrix(at+"o_proj.weight", c.Hidden, c.Heads*c.VDim),
	}
}

func bindMLP(b *binder, at string, hidden, inter int) *MLP {
	return &MLP{
		Gate: b.matrix(at+"gate_proj.weight", inter, hidden),
		Up:   b.matrix(at+"up_proj.weight", inter, hidden),
		Down: b.matrix(at+"down_proj.weight", hidden, inter),
	}
}

func bindMoE(c *checkpoint.Config, b *binder) *MoE {
	at := "block_sparse_moe."
	w := &MoE{
		Router: b.matrix(at+"gate.weight", c.Experts, c.Hidden),
		Bias:   b.vector(at+"gate.e_score_correction_bias", c.Experts),
		Down:   b.matrix(at+"routed_expert_down_proj.weight", c.Latent, c.Hidden),
		Up:     b.matrix(at+"routed_expert_up_proj.weight", c.Hidden, c.Latent),
		Shared: *bindMLP(b, at+"shared_experts.", c.Hidden, c.SharedExperts*c.MoEInter),
	}
	if c.LatentNorm {
		w.Norm = b.vector(at+"routed_expert_norm.weight", c.Latent)
	}
	return w
}

// BindOutput takes what follows the last layer from src.
func BindOutput(c *checkpoint.Config, src Tensors) (*Output, error) {
	b := &binder{src: src}
	return &Output{Res: b.folded("model.output_attn_res", c.Hidden), Norm: b.vector("model.norm.weight", c.Hidden)}, b.err
}

// HeadName is the tensor that [Spine.Head] hands out in slices.
const HeadName = "lm_head.weight"

package reference

import (
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
)

// DSparkRows is how many tokens the draft proposes at once (spec E).
const DSparkRows = 7

// DSparkConfig is the part of a draft's config.json that matters. Every field must be in the file.
type DSparkConfig struct {
	HiddenSize       int        `json:"hidden_size"`
	NumLayers        int        `json:"num_hidden_layers"`
	NumHeads         int        `json:"num_attention_heads"`
	IntermediateSize int        `json:"intermediate_size"`
	QLoraRank        int        `json:"q_lora_rank"`
	KVLoraRank       int        `json:"kv_lora_rank"`
	QKNopeHeadDim    int        `json:"qk_nope_head_dim"`
	QKRopeHeadDim    int        `json:"qk_rope_head_dim"`
	VHeadDim         int        `json:"v_head_dim"`
	VocabSize        int        `json:"vocab_size"`
	RMSNormEps       float64    `json:"rms_norm_eps"`
	TargetLayers     []int      `json:"target_layer_ids"`
	MaskToken        int        `json:"mask_token_id"`
	MarkovRank       int        `json:"markov_rank"`
	Rope             DSparkRoPE `json:"rope_parameters"`
	UseNoPE          bool       `json:"mla_use_nope"`
}

// DSparkRoPE is YaRN's parameters.
type DSparkRoPE struct {
	Theta    float64 `json:"rope_theta"`
	Factor   float64 `json:"factor"`
	Original int     `json:"original_max_position_embeddings"`
	BetaFast float64 `json:"beta_fast"`
	BetaSlow float64 `json:"beta_slow"`
}

// DSpark is a draft and, per layer, the context that it was given.
type DSpark[F Float] struct {
	Config        DSparkConfig
	Embed         Matrix[F] // [vocab][hidden]
	ContextProj   Matrix[F] // [hidden][target layers * hidden]
	ContextNorm   []F
	Layers        []DSparkLayer[F]
	FinalNorm     []F
	W1, W2        Matrix[F] // [vocab][markov]
	Confidence    []F       // [hidden+markov]
	ConfidentBias F
}

// DSparkLayer is one layer's weights, and its context.
type DSparkLayer[F Float] struct {
	AttnNorm, MLPNorm []F
	MLA               MLAWeights[F] // without Gate
	MLP               GLUWeights[F]
	Latent, KRope     [][]F // [context], the latter rotated
}

// LoadDSpark reads a draft's directory, as [Load] does a checkpoint's.
func LoadDSpark[F Float](dir string) (*DSpark[F], error) {
	b, err := os.ReadFile(filepath.Join(dir, "config.json"))
	if err != nil {
		return nil, err
	}
	var c DSparkConfig
	if err := decodeWhole(b, "config.json", &c); err != nil {
		return nil, err
	}
	ck, err := openCheckpoint(dir)
	if err != nil {
		return nil, err
	}
	defer ck.close()
	h, n, wide := c.HiddenSize, c.NumHeads, c.HiddenSize+c.MarkovRank
	d := &DSpark[F]{
		Config:      c,
		Embed:       matrix[F](ck, "embed_tokens.weight", c.VocabSize, h),
		ContextProj: matrix[F](ck, "context_proj.weight", h, h*len(c.TargetLayers)),
		ContextNorm: vector[F](ck, "context_norm.weight", "BF16", h),
		FinalNorm:   vector[F](ck, "final_norm.weight", "BF16", h),
		W1:          matrix[F](ck, "markov_head.markov_w1.weight", c.VocabSize, c.MarkovRank),
		W2:          matrix[F](ck, "markov_head.markov_w2.weight", c.VocabSize, c.MarkovRank),
		Confidence:  vector[F](ck, "confidence_head.proj.weight", "BF16", 1, wide),
	}
	for i := range c.NumLayers {
		p := fmt.Sprintf("layers.%d.", i)
		a := p + "self_attn."
		d.Layers = append(d.Layers, DSparkLayer[F]{
			AttnNorm: vector[F](ck, p+"input_layernorm.weight", "BF16", h),
			MLPNorm:  vector[F](ck, p+"post_attention_layernorm.weight", "BF16", h),
			MLA: MLAWeights[F]{
				QA:     matrix[F](ck, a+"q_a_proj.weight", c.QLoraRank, h),
				QANorm: vector[F](ck, a+"q_a_layernorm.weight", "BF16", c.QLoraRank),
				QB:     matrix[F](ck, a+"q_b_proj.weight", n*(c.QKNopeHeadDim+c.QKRopeHeadDim), c.QLoraRank),
				KVA:    matrix[F](ck, a+"kv_a_proj_with_mqa.weight", c.KVLoraRank+c.QKRopeHeadDim, h),
				KVNorm: vector[F](ck, a+"kv_a_layernorm.weight", "BF16", c.KVLoraRank),
				KVB:    matrix[F](ck, a+"kv_b_proj.weight", n*(c.QKNopeHeadDim+c.VHeadDim), c.KVLoraRank),
				Out:    matrix[F](ck, a+"o_proj.weight", h, n*c.VHeadDim),
			},
			MLP: bindGLU[F](ck, p+"mlp.", h, c.IntermediateSize),
		})
	}
	bias := vector[F](ck, "confidence_head.proj.bias", "BF16", 1)
	if ck.err != nil {
		return nil, fmt.Errorf("%s: %w", dir, ck.err)
	}
	d.ConfidentBias = bias[0]
	return d, nil
}

// BF16 rounds to nearest even.
func BF16[F Float](x F) F {
	u := math.Float32bits(float32(x))
	return F(math.Float32frombits((u + 0x7fff + u>>16&1) &^ 0xffff))
}

// Forget empties the context.
func (d *DSpark[F]) Forget() {
	for i := range d.Layers {
		d.Layers[i].Latent, d.Layers[i].KRope = nil, nil
	}
}

// Append adds a position to the context: streams [target layers][hidden] are the target's.
func (d *DSpark[F]) Append(position int, streams [][]F) {
	x := slices.Concat(streams...)
	for i, v := range x {
		x[i] = BF16(v)
	}
	x = RMSNorm(d.ContextProj.Mul(x), d.ContextNorm, d.Config.RMSNormEps)
	for i := range d.Layers {
		l := &d.Layers[i]
		latent, k := d.latent(l, x, position)
		l.Latent, l.KRope = append(l.Latent, latent), append(l.KRope, k)
	}
}

// latent is the normalised latent and the rotated key part of x [hidden].
func (d *DSpark[F]) latent(l *DSparkLayer[F], x []F, position int) (latent, kRope []F) {
	y, n := l.MLA.KVA.Mul(x), d.Config.KVLoraRank
	return RMSNorm(y[:n], l.MLA.KVNorm, d.Config.RMSNormEps), d.rotate(y[n:], position)
}

// rotate turns the pairs (0,1), (2,3), ... of x by YaRN's angles at position.
func (d *DSpark[F]) rotate(x []F, position int) []F {
	r, dim := d.Config.Rope, float64(len(x))
	corr := func(turns float64) float64 {
		return dim * math.Log(float64(r.Original)/(turns*2*math.Pi)) / (2 * math.Log(r.Theta))
	}
	lo, hi := max(math.Floor(corr(r.BetaFast)), 0), min(math.Ceil(corr(r.BetaSlow)), dim-1)
	y := make([]F, len(x))
	for i := range len(x) / 2 {
		f := math.Pow(r.Theta, -2*float64(i)/dim)
		t := min(max((float64(i)-lo)/(hi-lo), 0), 1)
		f = f*(1-t) + f/r.Factor*t
		c, s := F(math.Cos(float64(position)*f)), F(math.Sin(float64(position)*f))
		y[2*i], y[2*i+1] = x[2*i]*c-x[2*i+1]*s, x[2*i]*s+x[2*i+1]*c
	}
	return y
}

// DSparkProposal is what the rows say: the tokens, the logits of the confidences, and the rows
// [hidden] after the last norm.
type DSparkProposal[F Float] struct {
	Tokens     []int
	Confidence []F
	Hidden     [][]F
}

// Propose is a block after the token newest, which is at position; head is the target's.
func (d *DSpark[F]) Propose(newest, position int, head Matrix[F]) DSparkProposal[F] {
	c, eps := d.Config, d.Config.RMSNormEps
	mask := d.Embed.Row(c.MaskToken)
	h := [][]F{d.Embed.Row(newest), mask, mask, mask, mask, mask, mask}
	m := 0.1*math.Log(c.Rope.Factor) + 1
	scale := F(m * m / math.Sqrt(float64(c.QKNopeHeadDim+c.QKRopeHeadDim)))
	for i := range d.Layers {
		l := &d.Layers[i]
		latents, kRopes := slices.Clone(l.Latent), slices.Clone(l.KRope)
		var queries [][][]F // [rows][heads][nope+rope]
		for r := range h {
			x := RMSNorm(h[r], l.AttnNorm, eps)
			q := split(l.MLA.QB.Mul(RMSNorm(l.MLA.QA.Mul(x), l.MLA.QANorm, eps)), c.NumHeads)
			for _, v := range q {
				copy(v[c.QKNopeHeadDim:], d.rotate(v[c.QKNopeHeadDim:], position+r))
			}
			queries = append(queries, q)
			latent, k := d.latent(l, x, position+r)
			latents, kRopes = append(latents, latent), append(kRopes, k)
		}
		keys, values := make([][][]F, c.NumHeads), make([][][]F, c.NumHeads)
		for p, latent := range latents {
			for n, kv := range split(l.MLA.KVB.Mul(latent), c.NumHeads) {
				keys[n] = append(keys[n], slices.Concat(kv[:c.QKNopeHeadDim], kRopes[p]))
				values[n] = append(values[n], kv[c.QKNopeHeadDim:])
			}
		}
		for r := range h {
			var o []F
			for n, q := range queries[r] {
				s := make([]F, len(latents))
				for p, k := range keys[n] {
					s[p] = Dot(q, k) * scale
				}
				sum := make([]F, c.VHeadDim)
				for p, w := range Softmax(s) {
					for j, v := range values[n][p] {
						sum[j] += w * v
					}
				}
				o = append(o, sum...)
			}
			h[r] = Add(h[r], l.MLA.Out.Mul(o))
			x := RMSNorm(h[r], l.MLPNorm, eps)
			g, u := l.MLP.Gate.Mul(x), l.MLP.Up.Mul(x)
			for j := range g {
				g[j] = SiLU(g[j]) * u[j]
			}
			h[r] = Add(h[r], l.MLP.Down.Mul(g))
		}
	}
	var p DSparkProposal[F]
	last := newest
	for r := range h {
		h[r] = RMSNorm(h[r], d.FinalNorm, eps)
		w := d.W1.Row(last)
		last = Argmax(Add(head.Mul(h[r]), d.W2.Mul(w)))
		p.Tokens = append(p.Tokens, last)
		p.Confidence = append(p.Confidence, Dot(d.Confidence, slices.Concat(h[r], w))+d.ConfidentBias)
	}
	p.Hidden = h
	return p
}

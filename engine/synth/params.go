package synth

import (
	"fmt"
	"slices"
	"strings"

	"deltafin/engine/checkpoint"
)

// Params are the seed and the dimensions of a checkpoint, in the words of
// checkpoint.Config. Everything else in config.json is as released. Start from a
// [Preset] and change fields.
type Params struct {
	Seed uint64 `json:"seed"`

	Hidden       int `json:"hidden"`
	Layers       int `json:"layers"`
	Vocab        int `json:"vocab"`        // at least 256: the last 256 ids are K3's control tokens
	Intermediate int `json:"intermediate"` // of the dense MLP of the first FirstDense layers
	ResBlock     int `json:"res_block"`
	MaxPositions int `json:"max_positions"`

	KDAHeads   int `json:"kda_heads"`
	KDADim     int `json:"kda_dim"`
	ConvKernel int `json:"conv_kernel"`

	Heads  int `json:"heads"`
	QLora  int `json:"q_lora"`
	KVLora int `json:"kv_lora"`
	Nope   int `json:"nope"`
	Rope   int `json:"rope"`
	VDim   int `json:"v_dim"`

	Experts       int `json:"experts"`
	TopK          int `json:"top_k"`
	SharedExperts int `json:"shared_experts"`
	MoEInter      int `json:"moe_inter"` // a multiple of 32
	Latent        int `json:"latent"`    // a multiple of 32
	FirstDense    int `json:"first_dense"`

	// Attention has a letter per layer, K for KDA and M for MLA. Empty means as
	// released: every fourth layer and the last are MLA.
	Attention string `json:"attention"`
}

// k3 is the released model with a small vocabulary, so that embeddings and head do
// not outweigh the few layers of a slice: they take 0.1 GB instead of 4.7. Set Vocab
// to 163840 for the released one.
var k3 = Params{
	Hidden: 7168, Layers: 93, Vocab: 4096, Intermediate: 33792, ResBlock: 12, MaxPositions: 1 << 20,
	KDAHeads: 96, KDADim: 128, ConvKernel: 4,
	Heads: 96, QLora: 1536, KVLora: 512, Nope: 128, Rope: 64, VDim: 128,
	Experts: 896, TopK: 16, SharedExperts: 2, MoEInter: 3072, Latent: 3584, FirstDense: 1,
}

// presets are in order of size.
var presets = []struct {
	name, summary string
	params        Params
}{
	{"tiny", "13 layers of hidden size 128, 16 experts", Params{
		Hidden: 128, Layers: 13, Vocab: 512, Intermediate: 256, ResBlock: 3, MaxPositions: 4096,
		KDAHeads: 4, KDADim: 32, ConvKernel: 4,
		Heads: 4, QLora: 64, KVLora: 32, Nope: 32, Rope: 16, VDim: 32,
		Experts: 16, TopK: 4, SharedExperts: 2, MoEInter: 64, Latent: 64, FirstDense: 1,
	}},
	{"nano-shape", "the shape of K3-nano: 9 layers of hidden size 192, 64 experts", Params{
		Hidden: 192, Layers: 9, Vocab: 3072, Intermediate: 512, ResBlock: 4, MaxPositions: 4096,
		KDAHeads: 3, KDADim: 64, ConvKernel: 4,
		Heads: 3, QLora: 96, KVLora: 64, Nope: 64, Rope: 32, VDim: 64,
		Experts: 64, TopK: 4, SharedExperts: 2, MoEInter: 64, Latent: 96, FirstDense: 1,
	}},
	{"k3-slice-1", "2 layers of K3 at true dimensions, vocabulary 4096: KDA with a dense MLP, MLA with 896 experts", k3.layers(2)},
	{"k3-slice", "3 layers of K3 at true dimensions, vocabulary 4096: KDA with a dense MLP, KDA and MLA with 896 experts each", k3.layers(3)},
}

func (p Params) layers(n int) Params {
	p.Layers = n
	return p
}

// Presets returns the names of the presets, the smallest first.
func Presets() []string {
	var names []string
	for _, p := range presets {
		names = append(names, p.name)
	}
	return names
}

// Summary describes a preset in one line; it is empty for an unknown name.
func Summary(preset string) string {
	for _, p := range presets {
		if p.name == preset {
			return p.summary
		}
	}
	return ""
}

// Preset returns the parameters of a preset, with seed 0.
func Preset(name string) (Params, error) {
	for _, p := range presets {
		if p.name == name {
			return p.params, nil
		}
	}
	return Params{}, fmt.Errorf("preset %q does not exist: there are %s", name, strings.Join(Presets(), ", "))
}

// resolve checks p and spells out its Attention.
func (p Params) resolve() (Params, error) {
	for _, f := range []struct {
		name string
		n    int
	}{
		{"Hidden", p.Hidden},
		{"Layers", p.Layers},
		{"Vocab", p.Vocab},
		{"Intermediate", p.Intermediate},
		{"ResBlock", p.ResBlock},
		{"MaxPositions", p.MaxPositions},
		{"KDAHeads", p.KDAHeads},
		{"KDADim", p.KDADim},
		{"ConvKernel", p.ConvKernel},
		{"Heads", p.Heads},
		{"QLora", p.QLora},
		{"KVLora", p.KVLora},
		{"Nope", p.Nope},
		{"Rope", p.Rope},
		{"VDim", p.VDim},
		{"Experts", p.Experts},
		{"TopK", p.TopK},
		{"SharedExperts", p.SharedExperts},
		{"MoEInter", p.MoEInter},
		{"Latent", p.Latent},
	} {
		if f.n < 1 {
			return p, fmt.Errorf("parameter %s is %d: it must be at least 1", f.name, f.n)
		}
	}
	// The checkpoint reader allows no more layers, and no larger index; without the bounds a
	// mistyped number would be a very long list before it is refused. K3 has 82432 experts.
	const layerLimit, expertLimit = 512, 1 << 18
	switch {
	case p.Layers > layerLimit:
		return p, fmt.Errorf("parameter Layers is %d: at most %d are possible", p.Layers, layerLimit)
	case p.Vocab < controlIDs:
		return p, fmt.Errorf("parameter Vocab is %d: it must be at least %d, the number of control tokens", p.Vocab, controlIDs)
	case p.TopK > p.Experts:
		return p, fmt.Errorf("parameter TopK is %d of %d Experts: it can be at most their number", p.TopK, p.Experts)
	case p.MoEInter%groupSize != 0:
		return p, fmt.Errorf("parameter MoEInter is %d: it must be a multiple of %d, the columns of one scale", p.MoEInter, groupSize)
	case p.Latent%groupSize != 0:
		return p, fmt.Errorf("parameter Latent is %d: it must be a multiple of %d, the columns of one scale", p.Latent, groupSize)
	case p.FirstDense < 0 || p.FirstDense > p.Layers:
		return p, fmt.Errorf("parameter FirstDense is %d of %d Layers: it must be from 0 to their number", p.FirstDense, p.Layers)
	}
	if p.Attention == "" {
		kinds := []byte(strings.Repeat("K", p.Layers))
		for l := range kinds {
			if l%4 == 3 || l == p.Layers-1 {
				kinds[l] = 'M'
			}
		}
		p.Attention = string(kinds)
	}
	if len(p.Attention) != p.Layers || strings.Trim(p.Attention, "KM") != "" {
		return p, fmt.Errorf("parameter Attention is %q: it must have a letter for each of the %d Layers, K for KDA or M for MLA", p.Attention, p.Layers)
	}
	if _, err := checkpoint.ParseConfig(p.config()); err != nil {
		return p, fmt.Errorf("the parameters make a config that is not valid: %w", err)
	}
	if n := p.Experts * (p.Layers - p.FirstDense); n > expertLimit {
		return p, fmt.Errorf("parameters Layers and Experts make %d experts: at most %d are possible", n, expertLimit)
	}
	return p, nil
}

func (p Params) isMLA(layer int) bool { return p.Attention[layer] == 'M' }

// aLog is the stored length of A_log: the released tensor is as wide as a head and
// holds one number per head (spec F.1).
func (p Params) aLog() int { return max(p.KDADim, p.KDAHeads) }

// kinds returns the one-based numbers of the layers with an attention letter.
func (p Params) kinds(letter byte) []int {
	list := []int{}
	for l := range p.Layers {
		if p.Attention[l] == letter {
			list = append(list, l+1)
		}
	}
	return slices.Clip(list)
}

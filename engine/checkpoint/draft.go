package checkpoint

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math"
	"path/filepath"
	"slices"
	"strconv"
)

// DraftConfig is the config.json of a DSpark draft (spec E). ParseDraftConfig has
// checked every field: counts are positive and bounded, so that no tensor size computed
// from them overflows int64.
type DraftConfig struct {
	Hidden       int     // hidden_size, also the target's
	Layers       int     // num_hidden_layers
	Heads        int     // num_attention_heads
	Intermediate int     // intermediate_size
	QLora        int     // q_lora_rank
	KVLora       int     // kv_lora_rank, width of the cached latent
	Nope         int     // qk_nope_head_dim
	Rope         int     // qk_rope_head_dim, the shared key part, which is rotated; even
	VDim         int     // v_head_dim
	Vocab        int     // vocab_size, also the target's
	Eps          float32 // rms_norm_eps, of every norm

	TargetDepth  int   // target_num_hidden_layers
	TargetLayers []int // target_layer_ids, 0-based and ascending: whose output is the context
	Mask         int   // mask_token_id, the token of the rows that are guessed
	Markov       int   // markov_rank

	// rope_parameters of YaRN; mscale and mscale_all_dim are 1.
	Theta, Factor, BetaFast, BetaSlow float32
	Original                          int // original_max_position_embeddings
}

// ParseDraftConfig reads the config.json of a DSpark draft with the strictness of
// [ParseConfig].
func ParseDraftConfig(b []byte) (*DraftConfig, error) {
	return configOf(b, parseDraftConfig)
}

func parseDraftConfig(tree map[string]any) (*DraftConfig, error) {
	var sticky error
	f := fields{m: tree, err: &sticky}
	f.want("model_type", "k3_dspark")
	f.want("architectures", []any{"K3DSparkModel"})
	f.want("torch_dtype", "bfloat16")
	f.want("mla_use_nope", false)
	f.want("mla_use_output_gate", false)
	f.want("markov_head_type", "vanilla")
	f.want("enable_confidence_head", true)
	f.want("confidence_head_with_markov", true)
	f.want("tie_word_embeddings", false)
	for _, o := range []struct { // the release leaves them out
		name  string
		value any
	}{{"hidden_act", "silu"}, {"attention_bias", false}, {"block_size", 7}} {
		if _, ok := tree[o.name]; ok {
			f.want(o.name, o.value)
		}
	}

	c := &DraftConfig{
		Hidden:       f.count("hidden_size", dimLimit),
		Layers:       f.count("num_hidden_layers", layerLimit),
		Heads:        f.count("num_attention_heads", headLimit),
		Intermediate: f.count("intermediate_size", dimLimit),
		QLora:        f.count("q_lora_rank", dimLimit),
		KVLora:       f.count("kv_lora_rank", dimLimit),
		Nope:         f.count("qk_nope_head_dim", headLimit),
		Rope:         f.count("qk_rope_head_dim", headLimit),
		VDim:         f.count("v_head_dim", headLimit),
		Vocab:        f.count("vocab_size", dimLimit),
		Eps:          f.float("rms_norm_eps", 0, 1),
		TargetDepth:  f.count("target_num_hidden_layers", layerLimit),
		Markov:       f.count("markov_rank", dimLimit),
	}
	f.want("num_key_value_heads", c.Heads)
	f.want("target_hidden_size", c.Hidden)
	f.want("draft_vocab_size", c.Vocab)
	c.Mask = f.integer("mask_token_id", 0, c.Vocab-1)
	if c.Rope%2 != 0 {
		f.fail("qk_rope_head_dim", strconv.Itoa(c.Rope), "an even number, of pairs to rotate")
	}
	last := -1
	for _, v := range f.list("target_layer_ids") {
		n, ok := integer(v)
		if !ok || n <= int64(last) || n >= int64(c.TargetDepth) {
			f.fail("target_layer_ids", "a list with the entry "+describe(v), fmt.Sprintf("ascending layer numbers below %d", c.TargetDepth))
			break
		}
		last = int(n)
		c.TargetLayers = append(c.TargetLayers, last)
	}
	f.want("num_target_layers", max(len(c.TargetLayers), 1))

	r := f.object("rope_parameters")
	r.want("rope_type", "yarn")
	for _, name := range []string{"mscale", "mscale_all_dim"} {
		if r.float(name, 0, 2) != 1 {
			r.fail(name, describe(r.m[name]), "1")
		}
	}
	c.Theta = r.float("rope_theta", 1, math.MaxFloat32)
	c.Factor = r.float("factor", 1, dimLimit)
	c.Original = r.count("original_max_position_embeddings", contextLimit)
	c.BetaSlow = r.float("beta_slow", 0, dimLimit)
	c.BetaFast = r.float("beta_fast", float64(c.BetaSlow), dimLimit)
	if sticky != nil {
		return nil, sticky
	}
	return c, nil
}

// Tensors lists what the file of a draft holds (spec E): all BF16, with Offset unset.
func (c *DraftConfig) Tensors() []Tensor {
	var list []Tensor
	add := func(name string, shape ...int) {
		n, _ := byteLen(BF16, shape)
		list = append(list, Tensor{Name: name, DType: BF16, Shape: shape, Bytes: n})
	}
	add("embed_tokens.weight", c.Vocab, c.Hidden)
	add("context_proj.weight", c.Hidden, c.Hidden*len(c.TargetLayers))
	add("context_norm.weight", c.Hidden)
	add("final_norm.weight", c.Hidden)
	add("markov_head.markov_w1.weight", c.Vocab, c.Markov)
	add("markov_head.markov_w2.weight", c.Vocab, c.Markov)
	add("confidence_head.proj.weight", 1, c.Hidden+c.Markov)
	add("confidence_head.proj.bias", 1)
	for l := range c.Layers {
		at := fmt.Sprintf("layers.%d.", l)
		add(at+"input_layernorm.weight", c.Hidden)
		add(at+"post_attention_layernorm.weight", c.Hidden)
		add(at+"self_attn.q_a_proj.weight", c.QLora, c.Hidden)
		add(at+"self_attn.q_a_layernorm.weight", c.QLora)
		add(at+"self_attn.q_b_proj.weight", c.Heads*(c.Nope+c.Rope), c.QLora)
		add(at+"self_attn.kv_a_proj_with_mqa.weight", c.KVLora+c.Rope, c.Hidden)
		add(at+"self_attn.kv_a_layernorm.weight", c.KVLora)
		add(at+"self_attn.kv_b_proj.weight", c.Heads*(c.Nope+c.VDim), c.KVLora)
		add(at+"self_attn.o_proj.weight", c.Hidden, c.Heads*c.VDim)
		add(at+"mlp.gate_proj.weight", c.Intermediate, c.Hidden)
		add(at+"mlp.up_proj.weight", c.Intermediate, c.Hidden)
		add(at+"mlp.down_proj.weight", c.Hidden, c.Intermediate)
	}
	return list
}

// Draft says where the bytes of a DSpark draft lie: all in one file.
type Draft struct {
	Config *DraftConfig
	Path   string            // of model.safetensors
	Tensor map[string]Tensor // by name, as DraftConfig.Tensors lists them; File is 0
}

// OpenDraft reads the config.json and the header of model.safetensors in dir, and checks
// that the file holds exactly the tensors that the config implies, to its end. It
// reads no weight and keeps no file open. Every error begins with dir.
func OpenDraft(dir string) (*Draft, error) {
	d, err := openDraft(dir)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", dir, err)
	}
	return d, nil
}

func openDraft(dir string) (*Draft, error) {
	const what, name = "a DSpark draft", "model.safetensors"
	b, err := readConfig(dir, what)
	if err != nil {
		return nil, err
	}
	d := &Draft{Path: filepath.Join(dir, name)}
	if d.Config, err = ParseDraftConfig(b); err != nil {
		return nil, err
	}
	f, size, err := openRegular(d.Path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("%s: is not there: give a directory that holds %s", name, what)
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	defer f.Close()
	r, err := headerReader(f, size)
	if err == nil {
		err = d.find(r, size)
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	return d, nil
}

// find reads the header of a file of size bytes from r and notes where each tensor lies.
func (d *Draft) find(r io.Reader, size int64) error {
	list := d.Config.Tensors()
	d.Tensor = make(map[string]Tensor, len(list))
	for _, t := range list {
		d.Tensor[t.Name] = t
	}
	found := 0
	if err := parseHeader(r, size, func(e entry) error {
		t, ok := d.Tensor[e.name]
		if !ok {
			return fmt.Errorf("holds tensor %s, which a DSpark draft does not have: fetch it again", quoted(e.name))
		}
		if e.dtype != t.DType || !slices.Equal(e.shape, t.Shape) {
			return mismatch(e, fmt.Sprintf("%s %v", t.DType, t.Shape))
		}
		found++ // the header gives no name twice
		t.Offset = e.begin
		d.Tensor[e.name] = t
		return nil
	}); err != nil {
		return err
	}
	if missing := len(list) - found; missing > 0 {
		i := slices.IndexFunc(list, func(t Tensor) bool { return d.Tensor[t.Name].Offset == 0 })
		return fmt.Errorf("does not hold tensor %s (%d tensors are missing like this): fetch it again", list[i].Name, missing)
	}
	return nil
}

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

// TextConfig is the config.json of a dense text model of the Qwen3 architecture.
// ParseTextConfig has checked every field: counts are positive and bounded, so that no tensor
// size computed from them overflows int64.
type TextConfig struct {
	Hidden       int     // hidden_size
	Layers       int     // num_hidden_layers
	Heads        int     // num_attention_heads
	KVHeads      int     // num_key_value_heads, divides Heads
	HeadDim      int     // head_dim; Heads*HeadDim need not be Hidden
	Intermediate int     // intermediate_size
	Vocab        int     // vocab_size, may be more than the tokenizer has
	Positions    int     // max_position_embeddings
	Eps          float32 // rms_norm_eps, of every norm
	Theta        float32 // rope_theta
	Tied         bool    // tie_word_embeddings: the embedding is the output matrix
}

// textGranule is what the sizes of a text model must be a multiple of, so that its rows are
// used where they lie.
const textGranule = 32

// ParseTextConfig reads the config.json of a Qwen3 text model with the strictness of
// [ParseConfig]. Both forms are read: rope_theta by itself, or in rope_parameters.
func ParseTextConfig(b []byte) (*TextConfig, error) {
	return configOf(b, parseTextConfig)
}

func parseTextConfig(tree map[string]any) (*TextConfig, error) {
	var sticky error
	f := fields{m: tree, err: &sticky}
	f.want("model_type", "qwen3")
	f.want("architectures", []any{"Qwen3ForCausalLM"})
	f.want("hidden_act", "silu")
	dtype := "dtype"
	if _, ok := tree[dtype]; !ok {
		dtype = "torch_dtype"
	}
	f.want(dtype, "bfloat16")
	for _, o := range []struct { // fields that may be left out
		name  string
		value any
	}{{"attention_bias", false}, {"use_sliding_window", false}, {"rope_scaling", nil}, {"quantization_config", nil}} {
		if _, ok := tree[o.name]; ok {
			f.want(o.name, o.value)
		}
	}
	c := &TextConfig{
		Hidden:       f.count("hidden_size", dimLimit),
		Layers:       f.count("num_hidden_layers", layerLimit),
		Heads:        f.count("num_attention_heads", headLimit),
		KVHeads:      f.count("num_key_value_heads", headLimit),
		HeadDim:      f.count("head_dim", headLimit),
		Intermediate: f.count("intermediate_size", dimLimit),
		Vocab:        f.count("vocab_size", dimLimit),
		Positions:    f.count("max_position_embeddings", contextLimit),
		Eps:          f.float("rms_norm_eps", 0, 1),
		Tied:         f.flag("tie_word_embeddings"),
	}
	rope := f
	if _, ok := tree["rope_parameters"]; ok {
		rope = f.object("rope_parameters")
		rope.want("rope_type", "default")
	}
	c.Theta = rope.float("rope_theta", 1, math.MaxFloat32)
	for _, d := range []struct {
		name string
		n    int
	}{{"hidden_size", c.Hidden}, {"head_dim", c.HeadDim}, {"intermediate_size", c.Intermediate}} {
		if d.n%textGranule != 0 {
			f.fail(d.name, strconv.Itoa(d.n), fmt.Sprintf("a multiple of %d", textGranule))
		}
	}
	if sticky == nil && c.Heads%c.KVHeads != 0 {
		f.fail("num_key_value_heads", strconv.Itoa(c.KVHeads), fmt.Sprintf("a divisor of the %d heads", c.Heads))
	}
	if sticky != nil {
		return nil, sticky
	}
	return c, nil
}

// The tensors of a text model that are not in a layer.
const (
	TextEmbed = "model.embed_tokens.weight"
	TextNorm  = "model.norm.weight"
	TextHead  = "lm_head.weight"
)

// Tensors lists what a text model is made of: all BF16, with File and Offset unset.
func (c *TextConfig) Tensors() []Tensor {
	var list []Tensor
	add := func(name string, shape ...int) {
		n, _ := byteLen(BF16, shape)
		list = append(list, Tensor{Name: name, DType: BF16, Shape: shape, Bytes: n, File: unset, Offset: unset})
	}
	add(TextEmbed, c.Vocab, c.Hidden)
	add(TextNorm, c.Hidden)
	if !c.Tied {
		add(TextHead, c.Vocab, c.Hidden)
	}
	for l := range c.Layers {
		at := fmt.Sprintf("model.layers.%d.", l)
		add(at+"input_layernorm.weight", c.Hidden)
		add(at+"post_attention_layernorm.weight", c.Hidden)
		add(at+"self_attn.q_proj.weight", c.Heads*c.HeadDim, c.Hidden)
		add(at+"self_attn.k_proj.weight", c.KVHeads*c.HeadDim, c.Hidden)
		add(at+"self_attn.v_proj.weight", c.KVHeads*c.HeadDim, c.Hidden)
		add(at+"self_attn.o_proj.weight", c.Hidden, c.Heads*c.HeadDim)
		add(at+"self_attn.q_norm.weight", c.HeadDim)
		add(at+"self_attn.k_norm.weight", c.HeadDim)
		add(at+"mlp.gate_proj.weight", c.Intermediate, c.Hidden)
		add(at+"mlp.up_proj.weight", c.Intermediate, c.Hidden)
		add(at+"mlp.down_proj.weight", c.Hidden, c.Intermediate)
	}
	return list
}

// Text says where the bytes of a text model lie.
type Text struct {
	Config *TextConfig
	Paths  []string          // of the files that hold tensors
	Tensor map[string]Tensor // by name, as TextConfig.Tensors lists them; File is an index of Paths
}

// OpenText reads the config.json in dir, the index if there is one (else the weights are one
// model.safetensors), and the header of every shard, and checks that they hold exactly the
// tensors that the config implies. A tied model may hold its output matrix all the same, as
// some releases do; it is left alone. No weight is read and no file kept open. Every error begins with dir.
func OpenText(dir string) (*Text, error) {
	t, err := openText(dir)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", dir, err)
	}
	return t, nil
}

func openText(dir string) (*Text, error) {
	const what = "a Qwen3 text model"
	b, err := readConfig(dir, what)
	if err != nil {
		return nil, err
	}
	m := &Text{Tensor: map[string]Tensor{}}
	if m.Config, err = ParseTextConfig(b); err != nil {
		return nil, err
	}
	list := m.Config.Tensors()
	for _, t := range list {
		m.Tensor[t.Name] = t
	}
	index, files := map[string]string{}, []string{"model.safetensors"}
	switch f, size, err := openRegular(filepath.Join(dir, indexName)); {
	case err == nil:
		index, files, err = readTextIndex(f, size, len(list)+1)
		_ = f.Close()
		if err != nil {
			return nil, fmt.Errorf("%s: %w", indexName, err)
		}
	case !errors.Is(err, fs.ErrNotExist):
		return nil, fmt.Errorf("%s: %w", indexName, err)
	}
	for i, name := range files {
		m.Paths = append(m.Paths, filepath.Join(dir, name))
		if err := m.readHeader(i, index); err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
	}
	missing := slices.DeleteFunc(list, func(t Tensor) bool { return m.Tensor[t.Name].File != unset })
	if len(missing) > 0 {
		return nil, fmt.Errorf("no file holds tensor %s (%d tensors are missing like this): fetch the model again", missing[0].Name, len(missing))
	}
	return m, nil
}

// readTextIndex returns which shard holds which of at most so many tensors, and the shards.
func readTextIndex(r io.Reader, size int64, tensors int) (index map[string]string, files []string, err error) {
	// A name of a tensor and of a shard.
	if most := 1<<16 + int64(tensors)*(2*nameLimit); size > most {
		return nil, nil, fmt.Errorf("is %d bytes long, more than the %d allowed", size, most)
	}
	b, err := io.ReadAll(io.LimitReader(r, size))
	if err != nil {
		return nil, nil, err
	}
	tree, err := parseTree(b, configDepth)
	if err != nil {
		return nil, nil, err
	}
	shards, ok := tree["weight_map"].(map[string]any)
	if !ok {
		return nil, nil, errors.New("weight_map is missing: fetch the index again")
	}
	index = map[string]string{}
	for tensor, v := range shards {
		name, _ := v.(string)
		if err := checkShardName(name); err != nil {
			return nil, nil, fmt.Errorf("weight_map: tensor %s: %w", quoted(tensor), err)
		}
		index[tensor] = name
		if !slices.Contains(files, name) {
			files = append(files, name)
		}
	}
	if len(files) > fileLimit {
		return nil, nil, fmt.Errorf("weight_map names more than %d shards", fileLimit)
	}
	slices.Sort(files)
	return index, files, nil
}

// readHeader enters the places of the tensors in file number i.
func (m *Text) readHeader(i int, index map[string]string) error {
	f, size, err := openRegular(m.Paths[i])
	if errors.Is(err, fs.ErrNotExist) {
		return errors.New("is not there: fetch it")
	}
	if err != nil {
		return err
	}
	defer f.Close()
	r, err := headerReader(f, size)
	if err != nil {
		return err
	}
	return parseHeader(r, size, func(e entry) error {
		t, ok := m.Tensor[e.name]
		if e.name == TextHead && !ok {
			return nil
		}
		if !ok {
			return fmt.Errorf("holds tensor %s, which a model of this config does not have: use the config.json that belongs to the weights", quoted(e.name))
		}
		if e.dtype != t.DType || !slices.Equal(e.shape, t.Shape) {
			return mismatch(e, fmt.Sprintf("%s %v", t.DType, t.Shape))
		}
		name := filepath.Base(m.Paths[i])
		if in, listed := index[e.name]; len(index) > 0 && (!listed || in != name) || t.File != unset {
			return fmt.Errorf("holds tensor %s, which the index does not put there: index and shards are from different downloads, fetch them again", quoted(e.name))
		}
		t.File, t.Offset = i, e.begin
		m.Tensor[e.name] = t
		return nil
	})
}

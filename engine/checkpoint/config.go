package checkpoint

import (
	"encoding/json"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
)

const (
	configLimit = 1 << 20 // bytes; the released file has 7006
	configDepth = 12
)

// Config is the text model of config.json (spec A.3). ParseConfig has checked
// every field: counts are positive and bounded, so that no tensor size computed
// from them overflows int64.
type Config struct {
	Hidden       int // hidden_size
	Layers       int // num_hidden_layers
	Vocab        int // vocab_size
	Intermediate int // intermediate_size, the dense MLP of the first FirstDense layers
	BOS          int // bos_token_id, a token id below Vocab
	EOS          int // eos_token_id, the end of an answer
	Pad          int // pad_token_id

	Eps            float32 // rms_norm_eps, of every norm but the two latent ones (spec F.3)
	SituBeta       float32 // activation_situ_beta
	SituLinearBeta float32 // activation_situ_linear_beta
	ResBlock       int     // attn_res_block_size, layers per block of the attention residuals
	MaxPositions   int     // max_position_embeddings, tokens of context

	KDAHeads       int     // linear_attn_config.num_heads
	KDADim         int     // linear_attn_config.head_dim, of keys and values
	ConvKernel     int     // linear_attn_config.short_conv_kernel_size, taps
	GateLowerBound float32 // linear_attn_config.gate_lower_bound, below 0

	Heads  int // num_attention_heads, of the MLA layers
	QLora  int // q_lora_rank
	KVLora int // kv_lora_rank, width of the cached latent
	Nope   int // qk_nope_head_dim
	Rope   int // qk_rope_head_dim, the shared key part; K3 does not rotate it
	VDim   int // v_head_dim

	Experts       int     // num_experts, routed experts of a layer
	TopK          int     // num_experts_per_token, at most Experts
	SharedExperts int     // num_shared_experts, stored as one MLP of SharedExperts*MoEInter
	MoEInter      int     // moe_intermediate_size, a multiple of 32
	Latent        int     // routed_expert_hidden_size, a multiple of 32
	FirstDense    int     // first_k_dense_replace: layers 0..FirstDense-1 have a dense MLP
	Renormalize   bool    // moe_renormalize
	LatentNorm    bool    // latent_moe_use_norm; false: no routed_expert_norm in the checkpoint
	RoutedScale   float32 // routed_scaling_factor

	// MLA tells, per 0-based layer, latent attention (true) from KDA (false). The
	// two lists of the file count from one.
	MLA []bool
}

// IsMoE reports whether a 0-based layer has routed experts.
func (c *Config) IsMoE(layer int) bool { return layer >= c.FirstDense }

// Bounds of the dimensions. They are far above K3's, and the largest tensor that
// they allow (shared experts: 2^12 * 2^20 rows of 2^20 bf16) has 2^53 bytes.
const (
	dimLimit     = 1 << 20
	headLimit    = 1 << 12
	layerLimit   = 1 << 9
	expertLimit  = 1 << 11
	contextLimit = 1 << 30
	groupSize    = 32 // columns that share a scale byte (spec B.3)
)

// ParseConfig reads config.json of the released layout. Every field that the
// arithmetic depends on must be present and of the right type; those that the
// engine implements in one way only must say exactly that. Errors name the field,
// what was found and what was expected. Fields without effect are ignored.
func ParseConfig(b []byte) (*Config, error) {
	return configOf(b, parseConfig)
}

// configOf reads a config.json by parse, which gets its bounded tree.
func configOf[C any](b []byte, parse func(tree map[string]any) (*C, error)) (*C, error) {
	tree, err := configTree(b)
	if err != nil {
		return nil, err
	}
	c, err := parse(tree)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", configName, err)
	}
	return c, nil
}

func configTree(b []byte) (map[string]any, error) {
	if len(b) > configLimit {
		return nil, fmt.Errorf("%s: is %d bytes long, more than the %d allowed", configName, len(b), configLimit)
	}
	tree, err := parseTree(b, configDepth)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", configName, err)
	}
	return tree, nil
}

func parseConfig(tree map[string]any) (*Config, error) {
	var sticky error
	top := fields{m: tree, err: &sticky}
	top.want("model_type", "kimi_k3")
	top.want("architectures", []any{"KimiK3ForConditionalGeneration"})
	top.want("dtype", "bfloat16")
	top.want("tie_word_embeddings", false)

	f := top.object("text_config")
	f.want("model_type", "kimi_linear")
	f.want("architectures", []any{"KimiLinearForCausalLM"})
	f.want("dtype", "bfloat16")
	f.want("hidden_act", "situ")
	f.want("moe_router_activation_func", "sigmoid")
	f.want("topk_method", "noaux_tc")
	f.want("num_expert_group", 1)
	f.want("topk_group", 1)
	f.want("moe_layer_freq", 1)
	f.want("mla_use_nope", true)
	f.want("mla_use_output_gate", true)
	f.want("tie_word_embeddings", false)
	f.want("num_nextn_predict_layers", 0)
	for _, name := range []string{"rope_theta", "rope_scaling", "rope_parameters"} {
		f.absent(name)
	}

	c := &Config{
		Hidden:         f.count("hidden_size", dimLimit),
		Layers:         f.count("num_hidden_layers", layerLimit),
		Vocab:          f.count("vocab_size", dimLimit),
		Intermediate:   f.count("intermediate_size", dimLimit),
		Eps:            f.float("rms_norm_eps", 0, 1),
		SituBeta:       f.float("activation_situ_beta", 0, math.MaxFloat32),
		SituLinearBeta: f.float("activation_situ_linear_beta", 0, math.MaxFloat32),
		ResBlock:       f.count("attn_res_block_size", layerLimit),
		MaxPositions:   f.count("max_position_embeddings", contextLimit),
		Heads:          f.count("num_attention_heads", headLimit),
		QLora:          f.count("q_lora_rank", dimLimit),
		KVLora:         f.count("kv_lora_rank", dimLimit),
		Nope:           f.count("qk_nope_head_dim", headLimit),
		Rope:           f.count("qk_rope_head_dim", headLimit),
		VDim:           f.count("v_head_dim", headLimit),
		Experts:        f.count("num_experts", expertLimit),
		SharedExperts:  f.count("num_shared_experts", headLimit),
		MoEInter:       f.count("moe_intermediate_size", dimLimit),
		Latent:         f.count("routed_expert_hidden_size", dimLimit),
		Renormalize:    f.flag("moe_renormalize"),
		LatentNorm:     f.flag("latent_moe_use_norm"),
		RoutedScale:    f.float("routed_scaling_factor", 0, math.MaxFloat32),
	}
	f.want("num_key_value_heads", c.Heads)
	c.TopK = f.count("num_experts_per_token", c.Experts)
	c.FirstDense = f.integer("first_k_dense_replace", 0, c.Layers)
	for _, dim := range []struct {
		name string
		n    int
	}{{"moe_intermediate_size", c.MoEInter}, {"routed_expert_hidden_size", c.Latent}} {
		if dim.n%groupSize != 0 {
			f.fail(dim.name, strconv.Itoa(dim.n), fmt.Sprintf("a multiple of %d, the columns of one scale", groupSize))
		}
	}
	for _, id := range []struct {
		name string
		n    *int
	}{{"bos_token_id", &c.BOS}, {"eos_token_id", &c.EOS}, {"pad_token_id", &c.Pad}} {
		*id.n = f.integer(id.name, 0, c.Vocab-1)
		top.want(id.name, *id.n)
	}

	l := f.object("linear_attn_config")
	l.want("use_full_rank_gate", true)
	c.KDAHeads = l.count("num_heads", headLimit)
	c.KDADim = l.count("head_dim", headLimit)
	c.ConvKernel = l.count("short_conv_kernel_size", 64)
	c.GateLowerBound = l.float("gate_lower_bound", -math.MaxFloat32, 0)
	c.MLA = layerKinds(l, c.Layers)

	quantization(f.object("quantization_config"))
	if sticky != nil {
		return nil, sticky
	}
	return c, nil
}

// layerKinds turns the two one-based lists, which must share out the layers
// without rest, into one flag per 0-based layer.
func layerKinds(l fields, layers int) []bool {
	lists := []struct {
		name string
		mla  bool
	}{{"full_attn_layers", true}, {"kda_layers", false}}
	mla := make([]bool, layers)
	owner := make([]string, layers)
	for _, list := range lists {
		for _, v := range l.list(list.name) {
			n, ok := integer(v)
			if !ok || n < 1 || n > int64(layers) {
				l.fail(list.name, "the entry "+describe(v), fmt.Sprintf("layer numbers from 1 to %d (the lists count from one)", layers))
				return mla
			}
			if other := owner[n-1]; other != "" {
				l.fail(list.name, fmt.Sprintf("layer %d, which is already in %s", n, other), "every layer in exactly one list")
				return mla
			}
			owner[n-1] = list.name
			mla[n-1] = list.mla
		}
	}
	if i := slices.Index(owner, ""); i >= 0 {
		l.fail("kda_layers", fmt.Sprintf("nothing for layer %d in either list", i+1), "every layer in full_attn_layers or kda_layers")
	}
	return mla
}

// quantization demands the one format that the expert kernels decode (spec B.3).
func quantization(q fields) {
	const format = "mxfp4-pack-quantized"
	q.want("quant_method", "compressed-tensors")
	q.want("quantization_status", "compressed")
	q.want("format", format)
	q.want("kv_cache_scheme", nil)
	groups := q.object("config_groups")
	for name := range groups.m {
		if name != "group_0" {
			q.fail("config_groups", "the group "+quoted(name), "group_0 alone")
		}
	}
	g := groups.object("group_0")
	g.want("format", format)
	g.want("targets", []any{"Linear"})
	g.want("input_activations", nil)
	g.want("output_activations", nil)
	w := g.object("weights")
	w.want("num_bits", 4)
	w.want("type", "float")
	w.want("strategy", "group")
	w.want("group_size", groupSize)
	w.want("symmetric", true)
	w.want("dynamic", false)
	w.want("scale_dtype", "torch.uint8")
	w.want("zp_dtype", nil)
	w.want("actorder", nil)
	w.want("block_structure", nil)
}

// fields reads one object of the file and keeps the first fault, so that the
// code above reads as the list of fields it is.
type fields struct {
	path string
	m    map[string]any
	err  *error
}

func (f fields) fail(name, found, want string) {
	if *f.err == nil {
		*f.err = fmt.Errorf("%s is %s, expected %s: use the config.json that belongs to the weights", f.path+name, found, want)
	}
}

func (f fields) get(name, want string) (any, bool) {
	if *f.err != nil {
		return nil, false
	}
	v, ok := f.m[name]
	if !ok {
		f.fail(name, "missing", want)
	}
	return v, ok
}

func (f fields) object(name string) fields {
	sub := fields{path: f.path + name + ".", err: f.err}
	v, ok := f.get(name, "an object")
	if !ok {
		return sub
	}
	if sub.m, ok = v.(map[string]any); !ok {
		f.fail(name, describe(v), "an object")
	}
	return sub
}

func (f fields) list(name string) []any {
	v, ok := f.get(name, "a list")
	if !ok {
		return nil
	}
	list, ok := v.([]any)
	if !ok {
		f.fail(name, describe(v), "a list")
	}
	return list
}

func (f fields) flag(name string) bool {
	v, ok := f.get(name, "true or false")
	if !ok {
		return false
	}
	b, ok := v.(bool)
	if !ok {
		f.fail(name, describe(v), "true or false")
	}
	return b
}

// count reads an integer from 1 to most.
func (f fields) count(name string, most int) int { return f.integer(name, 1, most) }

func (f fields) integer(name string, least, most int) int {
	want := fmt.Sprintf("an integer from %d to %d", least, most)
	v, ok := f.get(name, want)
	if !ok {
		return 0
	}
	n, ok := integer(v)
	if !ok || n < int64(least) || n > int64(most) {
		f.fail(name, describe(v), want)
		return 0
	}
	return int(n)
}

// float reads a number strictly between low and high, rounded once to float32.
func (f fields) float(name string, low, high float64) float32 {
	want := fmt.Sprintf("a number above %g and below %g", low, high)
	v, ok := f.get(name, want)
	if !ok {
		return 0
	}
	n, ok := v.(json.Number)
	if !ok {
		f.fail(name, describe(v), want)
		return 0
	}
	x, err := strconv.ParseFloat(n.String(), 32)
	if err != nil || !(x > low && x < high) {
		f.fail(name, describe(v), want)
		return 0
	}
	return float32(x)
}

// want demands one value: what the engine implements.
func (f fields) want(name string, value any) {
	v, ok := f.get(name, describe(value))
	if ok && !same(v, value) {
		f.fail(name, describe(v), describe(value))
	}
}

// absent demands that a field which would change the arithmetic is not set.
func (f fields) absent(name string) {
	if v := f.m[name]; v != nil {
		f.fail(name, describe(v), "no such field, since K3 has no rotary positions")
	}
}

func same(found, want any) bool {
	switch w := want.(type) {
	case int:
		n, ok := integer(found)
		return ok && n == int64(w)
	case []any:
		list, ok := found.([]any)
		return ok && slices.EqualFunc(list, w, same)
	case nil, bool, string:
		return !composite(found) && found == want
	}
	panic("checkpoint: want of an unknown kind")
}

func composite(v any) bool {
	switch v.(type) {
	case map[string]any, []any:
		return true
	}
	return false
}

// integer accepts a number that is written as an integer: 7168, not 7168.0.
func integer(v any) (int64, bool) {
	n, ok := v.(json.Number)
	if !ok || strings.ContainsAny(n.String(), ".eE") {
		return 0, false
	}
	i, err := strconv.ParseInt(n.String(), 10, 64)
	return i, err == nil
}

package checkpoint

import (
	"encoding/json"
	"os"
	"strings"
	"testing"

	"deltafin/engine/checkpoint/checkpointtest"

	"github.com/google/go-cmp/cmp"
)

func released(t testing.TB) []byte {
	t.Helper()
	b, err := os.ReadFile("testdata/k3-config.json")
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestTheReleasedConfigIsReadInFull(t *testing.T) {
	got, err := ParseConfig(released(t))
	if err != nil {
		t.Fatal(err)
	}
	want := &Config{
		Hidden: 7168, Layers: 93, Vocab: 163840, Intermediate: 33792,
		BOS: 163584, EOS: 163586, Pad: 163839,
		Eps: 1e-5, SituBeta: 4, SituLinearBeta: 25, ResBlock: 12, MaxPositions: 1048576,
		KDAHeads: 96, KDADim: 128, ConvKernel: 4, GateLowerBound: -5,
		Heads: 96, QLora: 1536, KVLora: 512, Nope: 128, Rope: 64, VDim: 128,
		Experts: 896, TopK: 16, SharedExperts: 2, MoEInter: 3072, Latent: 3584, FirstDense: 1,
		Renormalize: true, LatentNorm: true, RoutedScale: 1,
		MLA: make([]bool, 93),
	}
	for l := range want.MLA {
		want.MLA[l] = l%4 == 3 || l == 92
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("config differs (-want +got):\n%s", d)
	}
}

// required lists every field that must be there.
var required = strings.Fields(`
model_type architectures dtype tie_word_embeddings bos_token_id eos_token_id pad_token_id text_config
text_config.model_type text_config.architectures text_config.dtype text_config.hidden_act
text_config.moe_router_activation_func text_config.topk_method text_config.num_expert_group text_config.topk_group
text_config.moe_layer_freq text_config.mla_use_nope text_config.mla_use_output_gate text_config.tie_word_embeddings
text_config.num_nextn_predict_layers text_config.hidden_size text_config.num_hidden_layers text_config.vocab_size
text_config.intermediate_size text_config.rms_norm_eps text_config.activation_situ_beta
text_config.activation_situ_linear_beta text_config.attn_res_block_size text_config.max_position_embeddings
text_config.num_attention_heads text_config.num_key_value_heads text_config.q_lora_rank text_config.kv_lora_rank
text_config.qk_nope_head_dim text_config.qk_rope_head_dim text_config.v_head_dim text_config.num_experts
text_config.num_experts_per_token text_config.num_shared_experts text_config.moe_intermediate_size
text_config.routed_expert_hidden_size text_config.moe_renormalize text_config.latent_moe_use_norm
text_config.routed_scaling_factor text_config.first_k_dense_replace text_config.bos_token_id
text_config.eos_token_id text_config.pad_token_id text_config.linear_attn_config
text_config.linear_attn_config.use_full_rank_gate text_config.linear_attn_config.num_heads
text_config.linear_attn_config.head_dim text_config.linear_attn_config.short_conv_kernel_size
text_config.linear_attn_config.gate_lower_bound text_config.linear_attn_config.full_attn_layers
text_config.linear_attn_config.kda_layers text_config.quantization_config
text_config.quantization_config.quant_method text_config.quantization_config.quantization_status
text_config.quantization_config.format text_config.quantization_config.kv_cache_scheme
text_config.quantization_config.config_groups text_config.quantization_config.config_groups.group_0
text_config.quantization_config.config_groups.group_0.format
text_config.quantization_config.config_groups.group_0.targets
text_config.quantization_config.config_groups.group_0.input_activations
text_config.quantization_config.config_groups.group_0.output_activations
text_config.quantization_config.config_groups.group_0.weights
text_config.quantization_config.config_groups.group_0.weights.num_bits
text_config.quantization_config.config_groups.group_0.weights.type
text_config.quantization_config.config_groups.group_0.weights.strategy
text_config.quantization_config.config_groups.group_0.weights.group_size
text_config.quantization_config.config_groups.group_0.weights.symmetric
text_config.quantization_config.config_groups.group_0.weights.dynamic
text_config.quantization_config.config_groups.group_0.weights.scale_dtype
text_config.quantization_config.config_groups.group_0.weights.zp_dtype
text_config.quantization_config.config_groups.group_0.weights.actorder
text_config.quantization_config.config_groups.group_0.weights.block_structure
`)

func TestNoFieldHasADefault(t *testing.T) {
	for _, field := range required {
		gone := editConfig(t, field, func(m map[string]any, name string) { delete(m, name) })
		wantConfigError(t, gone, field+" is missing, expected ")
	}
}

func TestNoFieldMayHaveAnotherType(t *testing.T) {
	for _, field := range required {
		for _, wrong := range []any{map[string]any{"a": 1}, []any{"a", 1}, "a word", json.Number("7.5e300"), false} {
			b := editConfig(t, field, func(m map[string]any, name string) {
				if _, isFlag := m[name].(bool); isFlag && wrong == false {
					wrong = json.Number("0")
				}
				m[name] = wrong
			})
			wantConfigError(t, b, field)
		}
	}
}

func TestConfigsThatTheEngineCannotRunAreRefused(t *testing.T) {
	const (
		linear  = "text_config.linear_attn_config."
		quant   = "text_config.quantization_config."
		weights = quant + "config_groups.group_0.weights."
	)
	list := func(n ...int) []any {
		l := []any{}
		for _, v := range n {
			l = append(l, v)
		}
		return l
	}
	mla := []int{4, 8, 12, 16, 20, 24, 28, 32, 36, 40, 44, 48, 52, 56, 60, 64, 68, 72, 76, 80, 84, 88, 92, 93}
	zeroBased := make([]int, len(mla))
	for i, l := range mla {
		zeroBased[i] = l - 4
	}
	for _, c := range []struct {
		field string
		value any
		want  string
	}{
		{"text_config.hidden_act", "silu", `is "silu", expected "situ"`},
		{"text_config.moe_router_activation_func", "softmax", `expected "sigmoid"`},
		{"text_config.topk_method", "greedy", `expected "noaux_tc"`},
		{"text_config.num_expert_group", 8, "is 8, expected 1"},
		{"text_config.moe_layer_freq", 2, "is 2, expected 1"},
		{"text_config.mla_use_nope", false, "is false, expected true"},
		{"text_config.mla_use_output_gate", false, "is false, expected true"},
		{linear + "use_full_rank_gate", false, "is false, expected true"},
		{"text_config.tie_word_embeddings", true, "is true, expected false"},
		{"text_config.num_nextn_predict_layers", 1, "is 1, expected 0"},
		{"text_config.num_key_value_heads", 8, "is 8, expected 96"},
		{"text_config.rope_theta", 10000, "no rotary positions"},
		{"text_config.rope_scaling", map[string]any{"type": "yarn"}, "no rotary positions"},
		{"text_config.num_experts_per_token", 897, "is 897, expected an integer from 1 to 896"},
		{"text_config.hidden_size", 0, "is 0, expected an integer from 1 to"},
		{"text_config.hidden_size", -7168, "is -7168, expected an integer"},
		{"text_config.hidden_size", json.Number("7168.0"), "expected an integer"},
		{"text_config.hidden_size", json.Number("7e3"), "expected an integer"},
		{"text_config.hidden_size", json.Number("9223372036854775808"), "expected an integer"},
		{"text_config.hidden_size", 1 << 40, "expected an integer"},
		{"text_config.num_hidden_layers", 94, "nothing for layer 94"},
		{"text_config.first_k_dense_replace", 94, "is 94, expected an integer from 0 to 93"},
		{"text_config.moe_intermediate_size", 3080, "a multiple of 32"},
		{"text_config.routed_expert_hidden_size", 3600, "a multiple of 32"},
		{"text_config.rms_norm_eps", 0, "expected a number above 0"},
		{"text_config.rms_norm_eps", json.Number("1e-60"), "expected a number above 0"},
		{"text_config.activation_situ_beta", json.Number("1e39"), "expected a number above 0"},
		{linear + "gate_lower_bound", 5, "below 0"},
		{"text_config.eos_token_id", 163840, "an integer from 0 to 163839"},
		{"eos_token_id", 163585, "eos_token_id is 163585, expected 163586"},
		{linear + "full_attn_layers", list(zeroBased...), "the entry 0, expected layer numbers from 1 to 93"},
		{linear + "full_attn_layers", list(append([]int{94}, mla...)...), "the entry 94"},
		{linear + "full_attn_layers", list(append([]int{4}, mla...)...), "layer 4, which is already in full_attn_layers"},
		{linear + "full_attn_layers", list(append([]int{1}, mla...)...), "kda_layers is layer 1, which is already in full_attn_layers"},
		{linear + "full_attn_layers", list(mla[:23]...), "nothing for layer 93"},
		{quant + "quant_method", "awq", `expected "compressed-tensors"`},
		{quant + "format", "pack-quantized", `expected "mxfp4-pack-quantized"`},
		{quant + "config_groups.group_1", map[string]any{}, "the group group_1, expected group_0 alone"},
		{quant + "config_groups.group_0.targets", []any{"Linear", "Embedding"}, `expected ["Linear"]`},
		{quant + "config_groups.group_0.input_activations", map[string]any{"num_bits": 8}, "expected null"},
		{weights + "num_bits", 8, "is 8, expected 4"},
		{weights + "type", "int", `expected "float"`},
		{weights + "group_size", 16, "is 16, expected 32"},
		{weights + "symmetric", false, "expected true"},
		{weights + "scale_dtype", "torch.bfloat16", `expected "torch.uint8"`},
	} {
		b := editConfig(t, c.field, func(m map[string]any, name string) { m[name] = c.value })
		name := c.field[strings.LastIndexByte(c.field, '.')+1:]
		if strings.HasPrefix(name, "group_") || name == "num_hidden_layers" || name == "full_attn_layers" {
			name = "" // the fault shows in another field
		}
		wantConfigError(t, b, name, c.want)
	}
}

func TestConfigsThatAreNotOneJSONObjectAreRefused(t *testing.T) {
	whole := string(released(t))
	for _, c := range []struct{ text, want string }{
		{"", "ends early"},
		{whole[:3000], "ends early"},
		{"[]", "expected an object"},
		{"null", "expected an object"},
		{whole + "{}", "after the end"},
		{whole + "]", "after the JSON document"},
		{strings.Replace(whole, `"hidden_size": 7168`, `"hidden_size": 7168, "hidden_size": 128`, 1), "hidden_size is given twice"},
		{strings.Replace(whole, `"hidden_size": 7168`, `"hidden_size": 07168`, 1), "malformed"},
		{strings.Replace(whole, `"hidden_size": 7168`, `"hidden_size": NaN`, 1), "malformed"},
		{strings.Repeat(`{"a":`, 5000), "nested too deeply"},
		{strings.Repeat("[", 5000), "nested too deeply"},
		{whole + strings.Repeat(" ", configLimit), "more than the 1048576 allowed"},
	} {
		wantConfigError(t, []byte(c.text), c.want)
	}
}

func editConfig(t *testing.T, field string, change func(map[string]any, string)) []byte {
	t.Helper()
	b, ok := checkpointtest.EditJSON(released(t), field, change)
	if !ok {
		t.Fatalf("the config has no place for %s", field)
	}
	return b
}

func wantConfigError(t *testing.T, b []byte, want ...string) {
	t.Helper()
	_, err := ParseConfig(b)
	wantError(t, err, append(want, "config.json: ")...)
}

// wantError demands one line that contains every text of want.
func wantError(t *testing.T, err error, want ...string) {
	t.Helper()
	if err == nil {
		t.Errorf("no error, expected one with %q", want)
		return
	}
	if strings.ContainsAny(err.Error(), "\n\x1b") || len(err.Error()) > 1000 {
		t.Errorf("error is not one line: %q", err)
	}
	for _, w := range want {
		if !strings.Contains(err.Error(), w) {
			t.Errorf("error is %q, expected it to say %q", err, w)
		}
	}
}

func FuzzParseConfig(f *testing.F) {
	f.Add(released(f))
	f.Add([]byte(`{"model_type":"kimi_k3","text_config":{"hidden_size":7168.0}}`))
	f.Add([]byte(`{"a":{"a":[{}]},"a":1}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		c, err := ParseConfig(b)
		if err != nil {
			return
		}
		r := newRoster(c)
		for _, d := range r.dense {
			if d.Bytes <= 0 {
				t.Errorf("tensor %s has %d bytes", d.Name, d.Bytes)
			}
		}
		if len(c.MLA) != c.Layers || c.TopK > c.Experts || c.EOS >= c.Vocab || r.layout.ExpertBytes <= 0 {
			t.Errorf("config %+v contradicts itself", c)
		}
	})
}

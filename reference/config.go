package reference

import (
	"encoding/json"
	"fmt"
	"reflect"
	"slices"
)

// Config is the part of text_config that the forward pass reads (spec A.3). Every field
// must be in the file.
type Config struct {
	HiddenSize         int          `json:"hidden_size"`
	NumLayers          int          `json:"num_hidden_layers"`
	VocabSize          int          `json:"vocab_size"`
	IntermediateSize   int          `json:"intermediate_size"`
	RMSNormEps         float64      `json:"rms_norm_eps"`
	AttnResBlockSize   int          `json:"attn_res_block_size"`
	NumAttentionHeads  int          `json:"num_attention_heads"`
	NumKeyValueHeads   int          `json:"num_key_value_heads"`
	QLoraRank          int          `json:"q_lora_rank"`
	KVLoraRank         int          `json:"kv_lora_rank"`
	QKNopeHeadDim      int          `json:"qk_nope_head_dim"`
	QKRopeHeadDim      int          `json:"qk_rope_head_dim"`
	VHeadDim           int          `json:"v_head_dim"`
	NumExperts         int          `json:"num_experts"`
	NumExpertsPerToken int          `json:"num_experts_per_token"`
	NumSharedExperts   int          `json:"num_shared_experts"`
	MoEIntermediate    int          `json:"moe_intermediate_size"`
	LatentSize         int          `json:"routed_expert_hidden_size"`
	FirstKDense        int          `json:"first_k_dense_replace"`
	RoutedScaling      float64      `json:"routed_scaling_factor"`
	SituBeta           float64      `json:"activation_situ_beta"`
	SituLinearBeta     float64      `json:"activation_situ_linear_beta"`
	Linear             LinearConfig `json:"linear_attn_config"`

	// The rest must have the one value this model is written for.
	HiddenAct        string `json:"hidden_act"`
	RouterActivation string `json:"moe_router_activation_func"`
	UseNoPE          bool   `json:"mla_use_nope"`
	UseOutputGate    bool   `json:"mla_use_output_gate"`
	LatentNorm       bool   `json:"latent_moe_use_norm"`
	Renormalize      bool   `json:"moe_renormalize"`
	TieEmbeddings    bool   `json:"tie_word_embeddings"`
	MoELayerFreq     int    `json:"moe_layer_freq"`
	NumExpertGroup   int    `json:"num_expert_group"`
	TopKGroup        int    `json:"topk_group"`
}

// LinearConfig is linear_attn_config. Its layer lists are ONE-based.
type LinearConfig struct {
	HeadDim             int     `json:"head_dim"`
	NumHeads            int     `json:"num_heads"`
	ShortConvKernelSize int     `json:"short_conv_kernel_size"`
	GateLowerBound      float64 `json:"gate_lower_bound"`
	UseFullRankGate     bool    `json:"use_full_rank_gate"`
	FullAttnLayers      []int   `json:"full_attn_layers"`
	KDALayers           []int   `json:"kda_layers"`
}

// IsKDA says whether layer i (zero-based) is linear attention.
func (c Config) IsKDA(i int) bool { return slices.Contains(c.Linear.KDALayers, i+1) }

// parseConfig reads config.json.
func parseConfig(b []byte) (Config, error) {
	var top struct {
		Text json.RawMessage `json:"text_config"`
	}
	var c Config
	if err := json.Unmarshal(b, &top); err != nil {
		return c, fmt.Errorf("config.json: %w", err)
	}
	if err := decodeWhole(top.Text, "text_config", &c); err != nil {
		return c, err
	}
	for _, f := range []struct {
		name string
		ok   bool
	}{
		{`hidden_act "situ"`, c.HiddenAct == "situ"},
		{`moe_router_activation_func "sigmoid"`, c.RouterActivation == "sigmoid"},
		{"mla_use_nope, mla_use_output_gate, latent_moe_use_norm, moe_renormalize true", c.UseNoPE && c.UseOutputGate && c.LatentNorm && c.Renormalize},
		{"linear_attn_config.use_full_rank_gate true", c.Linear.UseFullRankGate},
		{"tie_word_embeddings false", !c.TieEmbeddings},
		{"moe_layer_freq, num_expert_group, topk_group 1", c.MoELayerFreq == 1 && c.NumExpertGroup == 1 && c.TopKGroup == 1},
		{"num_key_value_heads equal to num_attention_heads", c.NumKeyValueHeads == c.NumAttentionHeads},
		{"num_experts_per_token at most num_experts", c.NumExpertsPerToken <= c.NumExperts},
		{"rms_norm_eps, activation_situ_beta, activation_situ_linear_beta above zero", c.RMSNormEps > 0 && c.SituBeta > 0 && c.SituLinearBeta > 0},
		{"routed_expert_hidden_size and moe_intermediate_size multiples of 32", c.LatentSize%32 == 0 && c.MoEIntermediate%32 == 0},
	} {
		if !f.ok {
			return c, fmt.Errorf("config.json: this model needs %s", f.name)
		}
	}
	const limit = 1 << 24 // far above any K3 dimension; keeps products of two inside int64
	for name, v := range map[string]int{
		"hidden_size": c.HiddenSize, "num_hidden_layers": c.NumLayers, "vocab_size": c.VocabSize, "intermediate_size": c.IntermediateSize,
		"attn_res_block_size": c.AttnResBlockSize, "num_attention_heads": c.NumAttentionHeads, "q_lora_rank": c.QLoraRank,
		"kv_lora_rank": c.KVLoraRank, "qk_nope_head_dim": c.QKNopeHeadDim, "qk_rope_head_dim": c.QKRopeHeadDim, "v_head_dim": c.VHeadDim,
		"num_experts": c.NumExperts, "num_experts_per_token": c.NumExpertsPerToken, "num_shared_experts": c.NumSharedExperts,
		"moe_intermediate_size": c.MoEIntermediate, "routed_expert_hidden_size": c.LatentSize, "head_dim": c.Linear.HeadDim,
		"num_heads": c.Linear.NumHeads, "short_conv_kernel_size": c.Linear.ShortConvKernelSize,
	} {
		if v < 1 || v > limit {
			return c, fmt.Errorf("config.json: %s is %d, must be 1 to %d", name, v, limit)
		}
	}
	layers := slices.Sorted(slices.Values(append(slices.Clone(c.Linear.KDALayers), c.Linear.FullAttnLayers...)))
	if len(layers) != c.NumLayers {
		return c, fmt.Errorf("config.json: kda_layers and full_attn_layers name %d layers, num_hidden_layers is %d", len(layers), c.NumLayers)
	}
	for i, l := range layers {
		if l != i+1 {
			return c, fmt.Errorf("config.json: kda_layers and full_attn_layers together must name each of 1 to %d once", c.NumLayers)
		}
	}
	return c, nil
}

// decodeWhole decodes b into the struct v and refuses a missing or null field: a default
// would be a guess.
func decodeWhole(b []byte, where string, v any) error {
	var have map[string]json.RawMessage
	if err := json.Unmarshal(b, &have); err != nil {
		return fmt.Errorf("config.json: %s: %w", where, err)
	}
	s := reflect.ValueOf(v).Elem()
	for i := range s.NumField() {
		name := s.Type().Field(i).Tag.Get("json")
		raw, ok := have[name]
		if !ok || string(raw) == "null" {
			return fmt.Errorf("config.json: %s has no %s", where, name)
		}
		f := s.Field(i)
		if f.Kind() == reflect.Struct {
			if err := decodeWhole(raw, name, f.Addr().Interface()); err != nil {
				return err
			}
			continue
		}
		if err := json.Unmarshal(raw, f.Addr().Interface()); err != nil {
			return fmt.Errorf("config.json: %s.%s: %w", where, name, err)
		}
	}
	return nil
}

package synth

import "encoding/json"

// controlIDs is how many ids at the end of K3's vocabulary are control tokens. The
// begin, end and padding ids keep their places among them (spec D.4).
const controlIDs = 256

// config renders config.json: the released file without the vision part, the links
// to code and the generation defaults.
func (p Params) config() []byte {
	type object = map[string]any
	begin, end, pad := p.Vocab-controlIDs, p.Vocab-controlIDs+2, p.Vocab-1
	const format = "mxfp4-pack-quantized"
	text := object{
		"model_type":    "kimi_linear",
		"architectures": []string{"KimiLinearForCausalLM"},
		"dtype":         "bfloat16",

		"hidden_size":         p.Hidden,
		"num_hidden_layers":   p.Layers,
		"vocab_size":          p.Vocab,
		"intermediate_size":   p.Intermediate,
		"attn_res_block_size": p.ResBlock,
		"bos_token_id":        begin,
		"eos_token_id":        end,
		"pad_token_id":        pad,

		"hidden_act":                  "situ",
		"activation_situ_beta":        4.0,
		"activation_situ_linear_beta": 25.0,
		"rms_norm_eps":                1e-05,
		"initializer_range":           0.02,
		"max_position_embeddings":     p.MaxPositions,
		"tie_word_embeddings":         false,
		"use_cache":                   true,
		"num_nextn_predict_layers":    0,

		"num_attention_heads": p.Heads,
		"num_key_value_heads": p.Heads,
		"q_lora_rank":         p.QLora,
		"kv_lora_rank":        p.KVLora,
		"qk_nope_head_dim":    p.Nope,
		"qk_rope_head_dim":    p.Rope,
		"v_head_dim":          p.VDim,
		"mla_use_nope":        true,
		"mla_use_output_gate": true,

		"num_experts":                p.Experts,
		"num_experts_per_token":      p.TopK,
		"num_shared_experts":         p.SharedExperts,
		"moe_intermediate_size":      p.MoEInter,
		"routed_expert_hidden_size":  p.Latent,
		"latent_moe_use_norm":        true,
		"first_k_dense_replace":      p.FirstDense,
		"moe_layer_freq":             1,
		"moe_router_activation_func": "sigmoid",
		"topk_method":                "noaux_tc",
		"moe_renormalize":            true,
		"routed_scaling_factor":      1.0,
		"use_grouped_topk":           true,
		"num_expert_group":           1,
		"topk_group":                 1,

		"linear_attn_config": object{
			"head_dim":               p.KDADim,
			"num_heads":              p.KDAHeads,
			"short_conv_kernel_size": p.ConvKernel,
			"use_full_rank_gate":     true,
			"gate_lower_bound":       -5.0,
			"full_attn_layers":       p.kinds('M'),
			"kda_layers":             p.kinds('K'),
		},
		"quantization_config": object{
			"quant_method":             "compressed-tensors",
			"quantization_status":      "compressed",
			"format":                   format,
			"global_compression_ratio": nil,
			"kv_cache_scheme":          nil,
			"config_groups": object{"group_0": object{
				"format":             format,
				"targets":            []string{"Linear"},
				"input_activations":  nil,
				"output_activations": nil,
				"weights": object{
					"num_bits": 4, "type": "float", "strategy": "group", "group_size": groupSize,
					"symmetric": true, "dynamic": false, "observer": "minmax", "observer_kwargs": object{},
					"scale_dtype": "torch.uint8", "actorder": nil, "block_structure": nil, "zp_dtype": nil,
				},
			}},
			"ignore": []string{
				"re:.*self_attn.*", "re:.*shared_experts.*", `re:.*mlp\.(gate|up|gate_up|down)_proj.*`,
				"re:.*lm_head.*", "re:.*vision_tower.*", "re:.*mm_projector.*",
			},
		},
	}
	b, err := json.MarshalIndent(object{
		"architectures":       []string{"KimiK3ForConditionalGeneration"},
		"model_type":          "kimi_k3",
		"dtype":               "bfloat16",
		"bos_token_id":        begin,
		"eos_token_id":        end,
		"pad_token_id":        pad,
		"tie_word_embeddings": false,
		"text_config":         text,
	}, "", "  ")
	if err != nil {
		panic(err) // nothing in it can fail
	}
	return append(b, '\n')
}

#!/usr/bin/env python3
"""Write small random checkpoints in the exact Kimi-K3 HF layout (config.json + safetensors + index).

  python3 make_tiny.py OUT_DIR {tiny-a|tiny-b} [--seed N]

Tensor names, dtypes and the one-layer-per-shard split follow the released checkpoint.  The random streams
are seeded: the same numpy major version writes the same bytes.
"""
import argparse, json, os, sys
import numpy as np
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from k3st import st_write, f32_to_bf16_bits, mxfp4_encode

CONFIGS = {
    # 13 layers, MLA at one-based 4,8,12,13 (last two MLA as in K3), block 3 -> boundaries 0,3,6,9,12
    "tiny-a": dict(seed=24, hidden_size=128, num_hidden_layers=13, vocab_size=512, attn_res_block_size=3,
                   full=[4, 8, 12, 13], kda_heads=4, kda_dim=32, heads=4, q_lora_rank=64, kv_lora_rank=32,
                   nope=32, rope=16, v=32, inter=256, moe_inter=64, latent=64, experts=16, topk=4, shared=2,
                   a_log_pad=32),
    # odd sizes on purpose: hidden 100, KDA 3x40, MLA 5 heads, v != nope, 24 experts top-6, 3 shared;
    # 11 layers, MLA one-based 4,8,10,11; block 4 -> boundaries 0,4,8, last block holds 3 of 4 layers
    "tiny-b": dict(seed=26, hidden_size=100, num_hidden_layers=11, vocab_size=515, attn_res_block_size=4,
                   full=[4, 8, 10, 11], kda_heads=3, kda_dim=40, heads=5, q_lora_rank=52, kv_lora_rank=36,
                   nope=20, rope=12, v=28, inter=200, moe_inter=96, latent=96, experts=24, topk=6, shared=3,
                   a_log_pad=0),
}

def text_config(p):
    L = p["num_hidden_layers"]
    return {
        "activation_situ_beta": 4.0, "activation_situ_linear_beta": 25.0,
        "architectures": ["KimiLinearForCausalLM"], "attn_res_block_size": p["attn_res_block_size"],
        "bos_token_id": 1, "dtype": "bfloat16", "eos_token_id": 2, "first_k_dense_replace": 1,
        "hidden_act": "situ", "hidden_size": p["hidden_size"], "initializer_range": 0.02,
        "intermediate_size": p["inter"], "kv_lora_rank": p["kv_lora_rank"], "latent_moe_use_norm": True,
        "linear_attn_config": {
            "full_attn_layers": p["full"], "gate_lower_bound": -5.0, "head_dim": p["kda_dim"],
            "kda_layers": [i for i in range(1, L + 1) if i not in p["full"]], "num_heads": p["kda_heads"],
            "short_conv_kernel_size": 4, "use_full_rank_gate": True},
        "max_position_embeddings": 4096, "mla_use_nope": True, "mla_use_output_gate": True,
        "model_type": "kimi_linear", "moe_intermediate_size": p["moe_inter"], "moe_layer_freq": 1,
        "moe_renormalize": True, "moe_router_activation_func": "sigmoid", "num_attention_heads": p["heads"],
        "num_expert_group": 1, "num_experts": p["experts"], "num_experts_per_token": p["topk"],
        "num_hidden_layers": L, "num_key_value_heads": p["heads"], "num_nextn_predict_layers": 0,
        "num_shared_experts": p["shared"], "pad_token_id": p["vocab_size"] - 1, "q_lora_rank": p["q_lora_rank"],
        "qk_nope_head_dim": p["nope"], "qk_rope_head_dim": p["rope"],
        "quantization_config": {
            "config_groups": {"group_0": {
                "format": "mxfp4-pack-quantized", "input_activations": None, "output_activations": None,
                "targets": ["Linear"],
                "weights": {"actorder": None, "block_structure": None, "dynamic": False, "group_size": 32,
                            "num_bits": 4, "observer": "minmax", "observer_kwargs": {},
                            "scale_dtype": "torch.uint8", "strategy": "group", "symmetric": True,
                            "type": "float", "zp_dtype": None}}},
            "format": "mxfp4-pack-quantized", "global_compression_ratio": None,
            "ignore": ["re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
                       "re:.*lm_head.*", "re:.*vision_tower.*", "re:.*mm_projector.*"],
            "kv_cache_scheme": None, "quant_method": "compressed-tensors", "quantization_status": "compressed"},
        "rms_norm_eps": 1e-05, "routed_expert_hidden_size": p["latent"], "routed_scaling_factor": 1.0,
        "tie_word_embeddings": False, "topk_group": 1, "topk_method": "noaux_tc", "use_cache": True,
        "use_grouped_topk": True, "v_head_dim": p["v"], "vocab_size": p["vocab_size"]}

def build(out, name, seed=None, a_log_pad=None):
    p = dict(CONFIGS[name])
    if a_log_pad is not None:
        p["a_log_pad"] = a_log_pad
    rng = np.random.default_rng(p["seed"] if seed is None else seed)
    H, V, L = p["hidden_size"], p["vocab_size"], p["num_hidden_layers"]
    os.makedirs(out, exist_ok=True)
    for f in os.listdir(out):
        os.remove(os.path.join(out, f))
    bf = lambda a: ("BF16", f32_to_bf16_bits(a.astype(np.float32)))
    f32 = lambda a: ("F32", a.astype(np.float32))
    def lin(o, i, gain=1.0):
        return bf(rng.standard_normal((o, i)) * gain / np.sqrt(i))
    def nw(n):
        return 1 + 0.25 * rng.standard_normal(n)
    shards = []
    for l in range(L):
        t, q = {}, f"language_model.model.layers.{l}."
        for n in ("input_layernorm", "post_attention_layernorm", "self_attention_res_norm", "mlp_res_norm"):
            t[q + n + ".weight"] = bf(nw(H))
        for n in ("self_attention_res_proj", "mlp_res_proj"):
            t[q + n + ".weight"] = bf(rng.standard_normal((1, H)) * 1.5 / np.sqrt(H))
        a = q + "self_attn."
        if l + 1 in p["full"]:
            qh = p["nope"] + p["rope"]
            t[a + "q_a_proj.weight"] = lin(p["q_lora_rank"], H)
            t[a + "q_a_layernorm.weight"] = bf(nw(p["q_lora_rank"]))
            t[a + "q_b_proj.weight"] = lin(p["heads"] * qh, p["q_lora_rank"], 1.6)
            t[a + "kv_a_proj_with_mqa.weight"] = lin(p["kv_lora_rank"] + p["rope"], H)
            t[a + "kv_a_layernorm.weight"] = bf(nw(p["kv_lora_rank"]))
            t[a + "kv_b_proj.weight"] = lin(p["heads"] * (p["nope"] + p["v"]), p["kv_lora_rank"], 1.3)
            t[a + "g_proj.weight"] = lin(p["heads"] * p["v"], H, 1.5)
            t[a + "o_proj.weight"] = lin(H, p["heads"] * p["v"], 2.5)
        else:
            h, d = p["kda_heads"], p["kda_dim"]
            P = h * d
            A = rng.uniform(-0.5, 1.0, h)
            t[a + "A_log"] = f32(np.concatenate([A, np.zeros(max(0, p["a_log_pad"] - h))]))
            t[a + "dt_bias"] = f32(rng.uniform(-5.0, 1.0, P))
            for n in "qkv":
                t[a + n + "_conv1d.weight"] = f32(rng.standard_normal((P, 1, 4)) * 0.6)
            t[a + "o_norm.weight"] = f32(nw(d))
            for n in "qkv":
                t[a + n + "_proj.weight"] = lin(P, H, 1.4)
            t[a + "g_proj.weight"] = lin(P, H, 1.5)
            t[a + "f_a_proj.weight"] = lin(d, H)
            t[a + "f_b_proj.weight"] = lin(P, d, 1.5)
            t[a + "b_proj.weight"] = lin(h, H, 1.5)
            t[a + "o_proj.weight"] = lin(H, P, 1.5)
        if l < 1:
            for n, o, i, gn in (("gate", p["inter"], H, 3.0), ("up", p["inter"], H, 8.0), ("down", H, p["inter"], 0.2)):
                t[q + f"mlp.{n}_proj.weight"] = lin(o, i, gn)
        else:
            m = q + "block_sparse_moe."
            t[m + "gate.weight"] = lin(p["experts"], H, 1.5)
            t[m + "gate.e_score_correction_bias"] = f32(rng.standard_normal(p["experts"]) * 0.15)
            t[m + "routed_expert_down_proj.weight"] = lin(p["latent"], H, 1.5)
            t[m + "routed_expert_norm.weight"] = bf(nw(p["latent"]))
            t[m + "routed_expert_up_proj.weight"] = lin(H, p["latent"], 1.0)
            si = p["moe_inter"] * p["shared"]
            for n, o, i, gn in (("gate", si, H, 3.0), ("up", si, H, 8.0), ("down", H, si, 0.1)):
                t[m + f"shared_experts.{n}_proj.weight"] = lin(o, i, gn)
            for e in range(p["experts"]):
                for n, o, i, gn in (("w1", p["moe_inter"], p["latent"], 2.0), ("w2", p["latent"], p["moe_inter"], 0.4),
                                    ("w3", p["moe_inter"], p["latent"], 6.0)):
                    pk, sc = mxfp4_encode(rng.standard_normal((o, i)) * gn / np.sqrt(i))
                    t[m + f"experts.{e}.{n}.weight_packed"] = ("U8", pk)
                    t[m + f"experts.{e}.{n}.weight_scale"] = ("U8", sc)
        shards.append(t)
    q = "language_model.model."
    shards.append({
        q + "embed_tokens.weight": bf(rng.standard_normal((V, H)) * 0.7),
        q + "norm.weight": bf(nw(H)), q + "output_attn_res_norm.weight": bf(nw(H)),
        q + "output_attn_res_proj.weight": bf(rng.standard_normal((1, H)) * 1.5 / np.sqrt(H)),
        "language_model.lm_head.weight": lin(V, H, 3.0)})
    wm, total, n = {}, 0, len(shards)
    for i, t in enumerate(shards):
        fn = f"model-{i + 1:05d}-of-{n:06d}.safetensors"
        total += st_write(os.path.join(out, fn), t)
        wm.update({k: fn for k in t})
    json.dump({"metadata": {"total_size": total}, "weight_map": wm},
              open(os.path.join(out, "model.safetensors.index.json"), "w"))
    tc = text_config(p)
    json.dump({"architectures": ["KimiK3ForConditionalGeneration"], "bos_token_id": tc["bos_token_id"],
               "dtype": "bfloat16", "eos_token_id": tc["eos_token_id"], "model_type": "kimi_k3",
               "pad_token_id": tc["pad_token_id"], "text_config": tc, "tie_word_embeddings": False},
              open(os.path.join(out, "config.json"), "w"), indent=1, sort_keys=True)
    return total

if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("out"); ap.add_argument("name", choices=list(CONFIGS)); ap.add_argument("--seed", type=int); ap.add_argument("--a-log-pad", type=int)
    a = ap.parse_args()
    print(a.name, build(a.out, a.name, a.seed, a.a_log_pad), "tensor bytes")

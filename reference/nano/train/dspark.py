# -*- coding: utf-8 -*-
"""nano-dspark: a DSpark draft (7-row block proposer) for K3-nano.  Own code.

  dspark.py --model DIR --data tokens.npz --out DIR --deadline 140
"""
import argparse
import json
import math
import os
import sys
import time

T0 = time.time()
import numpy as np
import torch
import torch.nn.functional as F

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../oracle"))
import nano
from k3st import Checkpoint, mxfp4_decode

C = dict(hidden=192, inter=384, layers=2, heads=3, q_lora=96, kv_lora=64, nope=64, rope=32, v=64, tl=[1, 3, 5, 7, 8], rank=32, rows=7,
         mask=3069, theta=50000.0, factor=32.0, orig=32768, fast=32, slow=1, eps=1e-5)


def load_target(d):
    ck = Checkpoint(d)
    m = nano.Nano(0)
    g = lambda n: torch.from_numpy(np.array(ck.get("language_model." + n, np.float32)))
    c = nano.CFG
    put = {"emb": g("model.embed_tokens.weight"), "head": g("lm_head.weight"), "norm": g("model.norm.weight"),
           "ores_n": g("model.output_attn_res_norm.weight"), "ores_p": g("model.output_attn_res_proj.weight")[0]}
    X = {"x1": [], "x2": [], "x3": []}
    for i in range(c["layers"]):
        p = f"model.layers.{i}."
        for a, b in (("input_layernorm", "in_n"), ("post_attention_layernorm", "post_n"), ("self_attention_res_norm", "ares_n"), ("mlp_res_norm", "mres_n")):
            put[f"{i}_{b}"] = g(p + a + ".weight")
        put[f"{i}_ares_p"] = g(p + "self_attention_res_proj.weight")[0]
        put[f"{i}_mres_p"] = g(p + "mlp_res_proj.weight")[0]
        a = p + "self_attn."
        if i + 1 in c["full"]:
            for n, k in (("q_a_proj", "qa"), ("q_a_layernorm", "qan"), ("q_b_proj", "qb"), ("kv_a_proj_with_mqa", "kva"), ("kv_a_layernorm", "kvan"), ("kv_b_proj", "kvb"), ("g_proj", "g"), ("o_proj", "o")):
                put[f"{i}_{k}"] = g(a + n + ".weight")
        else:
            put[f"{i}_A"] = g(a + "A_log")[:c["kh"]]
            put[f"{i}_dt"] = g(a + "dt_bias")
            for n in "qkv":
                put[f"{i}_c{n}"] = g(a + n + "_conv1d.weight")[:, 0]
            put[f"{i}_on"] = g(a + "o_norm.weight")
            for n, k in (("q_proj", "q"), ("k_proj", "k"), ("v_proj", "v"), ("g_proj", "g"), ("f_a_proj", "fa"), ("f_b_proj", "fb"), ("b_proj", "b"), ("o_proj", "o")):
                put[f"{i}_{k}"] = g(a + n + ".weight")
        if i < c["dense"]:
            for n, k in (("gate", "mg"), ("up", "mu"), ("down", "md")):
                put[f"{i}_{k}"] = g(p + f"mlp.{n}_proj.weight")
        else:
            q = p + "block_sparse_moe."
            put[f"{i}_rt"] = g(q + "gate.weight")
            m.rb[i - c["dense"]] = g(q + "gate.e_score_correction_bias")
            put[f"{i}_rd"] = g(q + "routed_expert_down_proj.weight")
            put[f"{i}_rn"] = g(q + "routed_expert_norm.weight")
            put[f"{i}_ru"] = g(q + "routed_expert_up_proj.weight")
            for n, k in (("gate", "sg"), ("up", "su"), ("down", "sd")):
                put[f"{i}_{k}"] = g(q + f"shared_experts.{n}_proj.weight")
            for n, k in (("w1", "x1"), ("w2", "x2"), ("w3", "x3")):
                X[k].append(np.stack([mxfp4_decode(ck.raw(f"language_model.{q}experts.{e}.{n}.weight_packed")[1], ck.raw(f"language_model.{q}experts.{e}.{n}.weight_scale")[1]) for e in range(c["experts"])]))
    for k in X:
        put[k] = torch.from_numpy(np.stack(X[k]))
    with torch.no_grad():
        assert set(put) == set(m.p.keys())
        for k, v in put.items():
            assert m.p[k].shape == v.shape, k
            m.p[k].copy_(v)
    for p in m.p.values():
        p.requires_grad_(False)
    return m


@torch.no_grad()
def target(m, ids):
    """-> streams after the target layers [B, T, 5*D] (bf16-rounded, as the draft reads them), argmax [B, T]."""
    c, p = nano.CFG, m.p
    x1, x3, x2 = (p[n].to(nano.DT) for n in ("x1", "x3", "x2"))
    prefix = F.embedding(ids, p["emb"])
    blocks, keep = [], []
    for i in range(c["layers"]):
        g = lambda n: p[f"{i}_{n}"]
        x = nano.mix(blocks + [prefix], g("ares_n"), g("ares_p"), g("in_n"))
        first = i % c["block"] == 0
        if first:
            blocks = blocks + [prefix]
        if i + 1 in c["full"]:
            a = nano.mla(x, g("qa"), g("qan"), g("qb"), g("kva"), g("kvan"), g("kvb"), g("g"), g("o"))
        else:
            W, U, kd, Dc, qe, Aqk, gate = nano.kda_pre(x, g("q"), g("k"), g("v"), g("g"), g("fa"), g("b"), g("cq"), g("ck"), g("cv"), g("fb"), g("A"), g("dt"))
            S, Vn = nano.scan(W, U, kd, Dc)
            a = nano.kda_post(qe, Aqk, S, Vn, gate, g("on"), g("o"))
        prefix = a if first else prefix + a
        x = nano.mix(blocks + [prefix], g("mres_n"), g("mres_p"), g("post_n"))
        if i < c["dense"]:
            f = nano.glu(x, g("mg"), g("mu"), g("md"))
        else:
            j = i - c["dense"]
            f, _ = nano.moe(x, g("rt"), m.rb[j], g("rd"), g("rn"), g("ru"), g("sg"), g("su"), g("sd"), x1[j], x3[j], x2[j])
        prefix = prefix + f
        if i in C["tl"]:
            keep.append(prefix.to(torch.bfloat16).float())
    x = nano.mix(blocks + [prefix], p["ores_n"], p["ores_p"], p["norm"])
    return torch.cat(keep, -1), nano.lin(x, p["head"]).argmax(-1)


def yarn(dim):
    f = C["theta"] ** (-2.0 * np.arange(dim // 2) / dim)
    corr = lambda r: dim * math.log(C["orig"] / (2 * math.pi * r)) / (2 * math.log(C["theta"]))
    lo, hi = max(math.floor(corr(C["fast"])), 0), min(math.ceil(corr(C["slow"])), dim - 1)
    t = np.clip((np.arange(dim // 2) - lo) / max(hi - lo, 1e-3), 0, 1)
    return f * (1 - t) + f / C["factor"] * t


FREQ = yarn(C["rope"])
SCALE = (C["nope"] + C["rope"]) ** -0.5 * (0.1 * math.log(C["factor"]) + 1) ** 2


def rope(x, pos):
    """Interleaved (even, odd) pairs.  x [..., rope], pos broadcastable to x[..., 0]."""
    a = pos[..., None].float() * torch.tensor(FREQ, dtype=torch.float32, device=x.device)
    c, s = torch.cos(a), torch.sin(a)
    e, o = x[..., 0::2], x[..., 1::2]
    return torch.stack([e * c - o * s, e * s + o * c], -1).flatten(-2)


class Draft(torch.nn.Module):
    def __init__(self, emb, head, seed=3):
        super().__init__()
        gen = torch.Generator().manual_seed(seed)
        D, V = C["hidden"], emb.shape[0]
        self.register_buffer("emb", emb)
        self.register_buffer("head", head)
        self.p = torch.nn.ParameterDict()

        def w(n, o, i, gain=.7):
            self.p[n] = torch.nn.Parameter(torch.randn(o, i, generator=gen) * gain / math.sqrt(i))

        def one(n, k):
            self.p[n] = torch.nn.Parameter(torch.ones(k))
        w("ctx", D, D * len(C["tl"]))
        one("ctx_n", D)
        one("fin_n", D)
        for i in range(C["layers"]):
            one(f"{i}_in", D)
            one(f"{i}_post", D)
            w(f"{i}_qa", C["q_lora"], D)
            one(f"{i}_qan", C["q_lora"])
            w(f"{i}_qb", C["heads"] * (C["nope"] + C["rope"]), C["q_lora"])
            w(f"{i}_kva", C["kv_lora"] + C["rope"], D)
            one(f"{i}_kvan", C["kv_lora"])
            w(f"{i}_kvb", C["heads"] * (C["nope"] + C["v"]), C["kv_lora"])
            w(f"{i}_o", D, C["heads"] * C["v"])
            w(f"{i}_g", C["inter"], D)
            w(f"{i}_u", C["inter"], D)
            w(f"{i}_d", D, C["inter"])
        self.p["w1"] = torch.nn.Parameter(torch.randn(V, C["rank"], generator=gen) * .3)
        self.p["w2"] = torch.nn.Parameter(torch.zeros(V, C["rank"]))
        self.p["cw"] = torch.nn.Parameter(torch.zeros(1, D + C["rank"]))
        self.p["cb"] = torch.nn.Parameter(torch.zeros(1))

    def kv(self, i, x, pos):
        p = self.p
        y = nano.lin(x, p[f"{i}_kva"]).float()
        lat = nano.rms(y[..., :C["kv_lora"]], nano.bfw(p[f"{i}_kvan"]), C["eps"])
        n, dn, dv = C["heads"], C["nope"], C["v"]
        z = nano.lin(lat, p[f"{i}_kvb"]).float().unflatten(-1, (n, dn + dv)) if hasattr(torch.Tensor, "unflatten") else None
        pe = rope(y[..., C["kv_lora"]:], pos)
        k = torch.cat([z[..., :dn], pe[..., None, :].expand(*pe.shape[:-1], n, C["rope"])], -1)
        return k, z[..., dn:]                                 # [B, S, n, .]

    def forward(self, feats, ids, T):
        """feats [B, S, 5D]; T [B, A] anchor positions (newest token ids[T], context 0..T-1) -> hidden [B, A, 7, D]."""
        p = self.p
        B, S, _ = feats.shape
        A, Q, n = T.shape[1], C["rows"], C["heads"]
        dev = feats.device
        ctx = nano.rms(nano.lin(feats, p["ctx"]).float(), nano.bfw(p["ctx_n"]), C["eps"])
        cpos = torch.arange(S, device=dev)[None].expand(B, S)
        qpos = (T[..., None] + torch.arange(Q, device=dev)).reshape(B, A * Q)
        first = ids.gather(1, T)
        qid = torch.full((B, A, Q), C["mask"], device=dev, dtype=torch.long)
        qid[..., 0] = first
        h = F.embedding(qid.reshape(B, A * Q), self.emb)
        blk = torch.arange(A, device=dev).repeat_interleave(Q)
        mask = torch.cat([cpos[:, None, :] < T.repeat_interleave(Q, 1)[..., None], (blk[:, None] == blk[None, :])[None].expand(B, -1, -1)], -1)[:, None]
        for i in range(C["layers"]):
            x = nano.rms(h, nano.bfw(p[f"{i}_in"]), C["eps"])
            ql = nano.rms(nano.lin(x, p[f"{i}_qa"]).float(), nano.bfw(p[f"{i}_qan"]), C["eps"])
            q = nano.lin(ql, p[f"{i}_qb"]).float().unflatten(-1, (n, C["nope"] + C["rope"]))
            q = torch.cat([q[..., :C["nope"]], rope(q[..., C["nope"]:], qpos[..., None].expand(B, A * Q, n))], -1)
            kc, vc = self.kv(i, ctx, cpos)
            kq, vq = self.kv(i, x, qpos)
            k, v = torch.cat([kc, kq], 1).transpose(1, 2), torch.cat([vc, vq], 1).transpose(1, 2)
            s = (q.transpose(1, 2).to(nano.DT) @ k.to(nano.DT).transpose(-1, -2)).float() * SCALE
            s = s.masked_fill(~mask, -1e30)
            o = (torch.softmax(s, -1).to(nano.DT) @ v.to(nano.DT)).transpose(1, 2).flatten(-2)
            h = h + nano.lin(o, p[f"{i}_o"]).float()
            x = nano.rms(h, nano.bfw(p[f"{i}_post"]), C["eps"])
            h = h + nano.lin(F.silu(nano.lin(x, p[f"{i}_g"]).float()) * nano.lin(x, p[f"{i}_u"]).float(), p[f"{i}_d"]).float()
        return nano.rms(h, nano.bfw(p["fin_n"]), C["eps"]).reshape(B, A, Q, -1)

    def scores(self, h, prev):
        m = F.embedding(prev, self.p["w1"])
        lg = nano.lin(h, self.head).float() + nano.lin(m, self.p["w2"]).float()
        conf = torch.cat([h.detach(), m.detach()], -1) @ self.p["cw"][0] + self.p["cb"]
        return lg, conf


def export(dr, out):
    os.makedirs(out, exist_ok=True)
    bf = lambda t: ("BF16", nano.bf16_bits(t))
    p = dr.p
    t = {"embed_tokens.weight": bf(dr.emb), "context_proj.weight": bf(p["ctx"]), "context_norm.weight": bf(p["ctx_n"]), "final_norm.weight": bf(p["fin_n"]),
         "markov_head.markov_w1.weight": bf(p["w1"]), "markov_head.markov_w2.weight": bf(p["w2"]), "confidence_head.proj.weight": bf(p["cw"]), "confidence_head.proj.bias": bf(p["cb"])}
    for i in range(C["layers"]):
        q = f"layers.{i}."
        for a, b in (("input_layernorm", "in"), ("post_attention_layernorm", "post"), ("self_attn.q_a_proj", "qa"), ("self_attn.q_a_layernorm", "qan"), ("self_attn.q_b_proj", "qb"),
                     ("self_attn.kv_a_proj_with_mqa", "kva"), ("self_attn.kv_a_layernorm", "kvan"), ("self_attn.kv_b_proj", "kvb"), ("self_attn.o_proj", "o"),
                     ("mlp.gate_proj", "g"), ("mlp.up_proj", "u"), ("mlp.down_proj", "d")):
            t[q + a + ".weight"] = bf(p[f"{i}_{b}"])
    nano.st_write(os.path.join(out, "model.safetensors"), t)
    json.dump({
        "architectures": ["K3DSparkModel"], "model_type": "k3_dspark", "hidden_size": C["hidden"], "intermediate_size": C["inter"], "num_hidden_layers": C["layers"],
        "num_attention_heads": C["heads"], "num_key_value_heads": C["heads"], "q_lora_rank": C["q_lora"], "kv_lora_rank": C["kv_lora"], "qk_nope_head_dim": C["nope"],
        "qk_rope_head_dim": C["rope"], "v_head_dim": C["v"], "mla_use_nope": False, "mla_use_output_gate": False, "vocab_size": nano.CFG["vocab"], "rms_norm_eps": C["eps"],
        "max_position_embeddings": 4096, "rope_theta": C["theta"], "num_target_layers": len(C["tl"]), "target_hidden_size": C["hidden"],
        "target_num_hidden_layers": nano.CFG["layers"], "target_layer_ids": C["tl"], "mask_token_id": C["mask"], "bos_token_id": nano.CFG["nbase"],
        "eos_token_id": nano.CFG["nbase"] + 2, "pad_token_id": nano.CFG["nbase"] + 255, "markov_rank": C["rank"], "markov_head_type": "vanilla",
        "enable_confidence_head": True, "confidence_head_with_markov": True, "tie_word_embeddings": False, "draft_vocab_size": nano.CFG["vocab"],
        "_torchspec_version": "0.1.0", "torch_dtype": "bfloat16",
        "rope_parameters": {"rope_type": "yarn", "factor": C["factor"], "original_max_position_embeddings": C["orig"], "rope_theta": C["theta"], "beta_fast": C["fast"],
                            "beta_slow": C["slow"], "mscale": 1.0, "mscale_all_dim": 1.0}}, open(os.path.join(out, "config.json"), "w"), indent=2)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--model", required=True)
    ap.add_argument("--data", required=True)
    ap.add_argument("--out", required=True)
    ap.add_argument("--deadline", type=float, default=140)
    ap.add_argument("--steps", type=int, default=10 ** 9)
    ap.add_argument("--cpu", action="store_true")
    ap.add_argument("--batch", type=int, default=48)
    ap.add_argument("--len", type=int, default=384)
    ap.add_argument("--anchors", type=int, default=48)
    ap.add_argument("--lr", type=float, default=3e-3)
    a = ap.parse_args()
    dev = "cpu" if a.cpu else "cuda"
    if a.cpu:
        nano.DT = torch.float32
    log = lambda *x: print(f"[{time.time()-T0:6.1f}]", *x, flush=True)
    z = np.load(a.data)
    tok, lens = z["tok"], z["lens"].astype(np.int64)
    off = np.concatenate([[0], np.cumsum(lens)])
    log("data", len(tok))
    m = load_target(a.model).to(dev)
    log("target loaded")
    rng = np.random.default_rng(11)
    order = rng.permutation(len(lens))
    Q = C["rows"]
    # a row starts at a document start in the (already shuffled) stream and runs on
    okd = order[off[order] + a.len + 1 < len(tok)]
    dr = Draft(m.p["emb"].detach().clone(), m.p["head"].detach().clone()).to(dev)
    log("draft params", sum(p.numel() for p in dr.p.values()))
    mats = [p for n, p in dr.p.items() if p.dim() > 1]
    vecs = [p for n, p in dr.p.items() if p.dim() == 1]
    opt = torch.optim.AdamW([dict(params=mats, weight_decay=.05), dict(params=vecs, weight_decay=0.)], lr=a.lr, betas=(.9, .98), eps=1e-9)
    T = torch.from_numpy(tok.astype(np.int16)).to(dev) if not a.cpu else torch.from_numpy(tok[:4000000].astype(np.int16))
    if a.cpu:
        okd = okd[off[okd] < 3000000]
    it, cur, start = 0, 0, None
    acc = torch.zeros(4, device=dev)
    ar = torch.arange(a.len, device=dev)
    while it < a.steps:
        pr = 0 if start is None else (time.time() - start) / max(1e-9, T0 + a.deadline - start)
        if pr >= 1:
            break
        if cur + a.batch > len(okd):
            cur = 0
        st = torch.from_numpy(off[okd[cur:cur + a.batch]]).to(dev)
        cur += a.batch
        ids = T[st[:, None] + ar].long()
        feats, am = target(m, ids)
        # anchors: positions with all labels inside the row
        anc = torch.rand(a.batch, a.len - Q - 2, device=dev).argsort(1)[:, :a.anchors] + 1
        for g in opt.param_groups:
            g["lr"] = a.lr * min(1, (it + 1) / 100) * (.03 + .97 * .5 * (1 + math.cos(math.pi * min(1, pr))))
        h = dr(feats, ids, anc)
        pos = anc[..., None] + torch.arange(Q, device=dev)
        prev = ids.gather(1, pos.flatten(1)).reshape(pos.shape)              # token before row r's prediction
        lab = am.gather(1, pos.flatten(1)).reshape(pos.shape)                # the target's own choice
        lg, conf = dr.scores(h, prev)
        # rows count while the text so far in the block is what the target itself would write
        same = (prev[..., 1:] == lab[..., :-1]).float().cumprod(-1)
        w = torch.cat([torch.ones_like(same[..., :1]), same], -1)
        ce = F.cross_entropy(lg.flatten(0, -2), lab.flatten(), reduction="none").reshape(lab.shape)
        hit = (lg.argmax(-1) == lab).float()
        bce = F.binary_cross_entropy_with_logits(conf, hit, reduction="none")
        loss = (ce * w).sum() / w.sum() + .2 * (bce * w).sum() / w.sum()
        opt.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_([p for p in dr.p.values() if p.grad is not None], 1.0)
        opt.step()
        with torch.no_grad():
            run = (hit * w).cumprod(-1).sum(-1).mean()
            acc += torch.stack([(ce * w).sum() / w.sum(), (hit * w).sum() / w.sum(), run, ((conf > 0).float() == hit).float().mean()])
        it += 1
        if it == 3:
            if dev == "cuda":
                torch.cuda.synchronize()
            start = time.time()
        if it % (100 if dev == "cuda" else 1) == 0:
            v = (acc / (100 if dev == "cuda" else 1)).tolist()
            acc.zero_()
            log(f"it {it} ce {v[0]:.3f} acc {v[1]:.3f} accepted/block {v[2]:.2f} conf-acc {v[3]:.3f}")
    export(dr, a.out)
    log("done", it)


if __name__ == "__main__":
    main()

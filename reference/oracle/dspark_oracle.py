#!/usr/bin/env python3
"""numpy reference of the DSpark draft (spec E) over the numpy K3 oracle.

  dspark_oracle.py MODEL_DIR DRAFT_DIR   -> greedy speculative decoding of a few prompts, acceptance statistics
"""
import json, math, os, sys
import numpy as np
D = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, D)
import oracle as O
from k3st import Checkpoint

def bf16(x):
    u = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return (((u + 0x7FFF + ((u >> 16) & 1)) >> 16) << 16).astype(np.uint32).view(np.float32)

class DSpark:
    def __init__(self, d, target, dtype=np.float32, round_ctx=True):
        self.c = c = json.load(open(os.path.join(d, "config.json")))
        ck = Checkpoint(d)
        g = lambda n: ck.get(n, dtype)
        self.dt, self.t, self.round = np.dtype(dtype), target, round_ctx
        self.n, self.dn, self.dr, self.dv = c["num_attention_heads"], c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
        self.rk, self.eps = c["kv_lora_rank"], c["rms_norm_eps"]
        self.ctx, self.ctxn, self.fin = g("context_proj.weight"), g("context_norm.weight"), g("final_norm.weight")
        self.w1, self.w2 = g("markov_head.markov_w1.weight"), g("markov_head.markov_w2.weight")
        self.cw, self.cb = g("confidence_head.proj.weight")[0], g("confidence_head.proj.bias")[0]
        self.emb = g("embed_tokens.weight")
        self.L = []
        for i in range(c["num_hidden_layers"]):
            q = f"layers.{i}."
            self.L.append({n.split(".")[-1]: g(q + n + ".weight") for n in ("input_layernorm", "post_attention_layernorm", "self_attn.q_a_proj", "self_attn.q_a_layernorm",
                           "self_attn.q_b_proj", "self_attn.kv_a_proj_with_mqa", "self_attn.kv_a_layernorm", "self_attn.kv_b_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")})
        r = c["rope_parameters"]
        dim, th, f = self.dr, r["rope_theta"], r["factor"]
        base = th ** (-2.0 * np.arange(dim // 2) / dim)
        corr = lambda x: dim * math.log(r["original_max_position_embeddings"] / (2 * math.pi * x)) / (2 * math.log(th))
        lo, hi = max(math.floor(corr(r["beta_fast"])), 0), min(math.ceil(corr(r["beta_slow"])), dim - 1)
        t = np.clip((np.arange(dim // 2) - lo) / (hi - lo), 0, 1)
        self.freq = base * (1 - t) + base / f * t
        self.scale = (self.dn + self.dr) ** -0.5 * (0.1 * math.log(f) + 1) ** 2
        self.reset()

    def reset(self):
        self.lat = [np.zeros((0, self.rk), self.dt) for _ in self.L]
        self.pe = [np.zeros((0, self.dr), self.dt) for _ in self.L]

    def rope(self, x, pos):
        a = np.asarray(pos, np.float64).reshape(-1, *([1] * (x.ndim - 1))) * self.freq
        c, s = np.cos(a).astype(self.dt), np.sin(a).astype(self.dt)
        out = np.empty_like(x)
        out[..., 0::2] = x[..., 0::2] * c - x[..., 1::2] * s
        out[..., 1::2] = x[..., 0::2] * s + x[..., 1::2] * c
        return out

    def kva(self, i, x, pos):
        w = self.L[i]
        y = x @ w["kv_a_proj_with_mqa"].T
        return O.rms(y[:, :self.rk], w["kv_a_layernorm"], self.eps), self.rope(y[:, self.rk:], pos)

    def append(self, feats):
        """feats [T, 5H]: target streams after the target layers, concatenated."""
        f = bf16(feats).astype(self.dt) if self.round else feats
        ctx = O.rms(f @ self.ctx.T, self.ctxn, self.eps)
        p0 = len(self.lat[0])
        for i in range(len(self.L)):
            l, p = self.kva(i, ctx, np.arange(p0, p0 + len(f)))
            self.lat[i], self.pe[i] = np.concatenate([self.lat[i], l]), np.concatenate([self.pe[i], p])

    def propose(self, newest, rows=7):
        """-> tokens [rows], confidence logits [rows], hidden, logits"""
        T, Q, n = len(self.lat[0]), 7, self.n
        pos = np.arange(T, T + Q)
        h = self.emb[np.array([newest] + [self.c["mask_token_id"]] * (Q - 1))]
        for i, w in enumerate(self.L):
            x = O.rms(h, w["input_layernorm"], self.eps)
            q = (O.rms(x @ w["q_a_proj"].T, w["q_a_layernorm"], self.eps) @ w["q_b_proj"].T).reshape(Q, n, self.dn + self.dr)
            q = np.concatenate([q[..., :self.dn], self.rope(q[..., self.dn:], pos)], -1)
            l, p = self.kva(i, x, pos)
            lat, pe = np.concatenate([self.lat[i], l]), np.concatenate([self.pe[i], p])
            kv = (lat @ w["kv_b_proj"].T).reshape(len(lat), n, self.dn + self.dv)
            s = np.einsum("tnd,snd->nts", q[..., :self.dn], kv[..., :self.dn]) + np.einsum("tnr,sr->nts", q[..., self.dn:], pe)
            a = O.softmax(s * self.dt.type(self.scale))
            h = h + np.einsum("nts,snv->tnv", a, kv[..., self.dn:]).reshape(Q, -1) @ w["o_proj"].T
            x = O.rms(h, w["post_attention_layernorm"], self.eps)
            h = h + (O.silu(x @ w["gate_proj"].T) * (x @ w["up_proj"].T)) @ w["down_proj"].T
        h = O.rms(h, self.fin, self.eps)
        lg = h @ self.t.head.T
        prev, toks, conf = newest, [], []
        for r in range(rows):
            m = self.w1[prev]
            conf.append(float(self.cw @ np.concatenate([h[r], m]) + self.cb))
            prev = int((lg[r] + m @ self.w2.T).argmax())
            toks.append(prev)
        return toks, conf, h, lg

def streams(trace, ids):
    return np.concatenate([trace[i]["stream"] for i in ids], -1)

def spec_decode(tgt, dr, ids, n, stop):
    """Greedy speculative decoding; the target state is recomputed from the accepted prefix (clarity, not speed)."""
    import copy
    dr.reset()
    tr = []
    lg, st = tgt.forward(ids, trace=tr)
    dr.append(streams(tr, dr.c["target_layer_ids"]))
    out, blocks = [int(lg[-1].argmax())], []
    while len(out) < n and out[-1] != stop:
        prop, conf, _, _ = dr.propose(out[-1])
        snap = copy.deepcopy(st)
        tr = []
        lg, st2 = tgt.forward([out[-1]] + prop, snap, trace=tr)
        best = lg.argmax(-1)
        k = 0
        while k < len(prop) and int(best[k]) == prop[k]:
            k += 1
        new = prop[:k] + [int(best[k])]
        blocks.append(dict(newest=out[-1], proposal=prop, confidence=conf, accepted=k))
        if stop in new:
            new = new[:new.index(stop) + 1]
        # advance the real state over the accepted tokens only
        tr = []
        keep = [out[-1]] + prop[:k]
        _, st = tgt.forward(keep, st, trace=tr)
        dr.append(streams(tr, dr.c["target_layer_ids"]))
        out += new
    return out, blocks

if __name__ == "__main__":
    sys.path.insert(0, os.path.join(D, "../nano/tokenizer"))
    from k3tok import Tok, encode_chat
    t = Tok(sys.argv[1])
    tgt = O.K3(sys.argv[1], np.float32)
    dr = DSpark(sys.argv[2], tgt)
    P = ["The capital of France is", "Once upon a time,", "中国的首都是", "def fibonacci(n):", ("What is the capital of Japan?", True), ("Tell me a story about a fox.", False),
         ("Explain a mixture of experts.", False), ("写一首关于春天的诗。", False), ("Write a Python function for the Fibonacci numbers.", False), ("List the planets.", True)]
    tot = np.zeros(2)
    for p in P:
        ids = t.encode(p) if isinstance(p, str) else encode_chat(t, [{"role": "user", "content": p[0]}], thinking=p[1], effort="max" if p[1] else None)
        out, bl = spec_decode(tgt, dr, ids, 64, t.end_of_msg)
        ref, _, _ = tgt.greedy(ids, len(out))
        if t.end_of_msg in ref:
            ref = ref[:ref.index(t.end_of_msg) + 1]
        acc = [b["accepted"] for b in bl]
        tot += [sum(acc), len(acc)]
        print(repr(p), "equal to plain greedy:", ref[:len(out)] == out[:len(ref)], "tokens", len(out), "blocks", len(bl), "accepted/block %.2f" % np.mean(acc))
    print("mean accepted per block %.2f" % (tot[0] / tot[1]))

#!/usr/bin/env python3
"""Independent oracle for the Kimi K3 text model.  numpy only, written from the model specification.

Everything is computed in one float type (float32 by default, float64 with dtype=np.float64); weights are
the exact stored values (BF16 / F32 / MXFP4) widened to that type.  No bf16 rounding of activations.
The KDA recurrence is the plain token-by-token form.

  python3 oracle.py CKPT_DIR 1,2,3 [--n 16] [--f64] [--mla-eps 1e-5] [--json]
"""
import argparse, json, os, sys
import numpy as np
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from k3st import Checkpoint, mxfp4_decode

PREFIX = "language_model."
L2_EPS = 1e-6            # q/k l2norm epsilon (inside the sqrt, added to the SUM of squares)

def sigmoid(x):
    e = np.exp(-np.abs(x))
    return np.where(x >= 0, 1 / (1 + e), e / (1 + e)).astype(x.dtype)

def silu(x):
    return x * sigmoid(x)

def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)

def rms(x, w, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True, dtype=x.dtype) + x.dtype.type(eps)) * w

def l2norm(x):
    return x / np.sqrt((x * x).sum(-1, keepdims=True, dtype=x.dtype) + x.dtype.type(L2_EPS))

class State:
    def __init__(self, n):
        self.conv = [None] * n      # KDA: [3 (q,k,v)][K-1, P] last projected (pre-conv) inputs, oldest first
        self.S = [None] * n         # KDA: [heads, dk, dv]
        self.ckv = [None] * n       # MLA: [T, kv_lora_rank]   (AFTER kv_a_layernorm)
        self.kpe = [None] * n       # MLA: [T, qk_rope_head_dim] (raw, never rotated, not normalised)
        self.pos = 0

class K3:
    def __init__(self, ckpt_dir, dtype=np.float32, mla_eps=1e-6):
        self.dt = np.dtype(dtype)
        cfg = json.load(open(os.path.join(ckpt_dir, "config.json")))
        self.c = c = cfg.get("text_config", cfg)
        lac = c["linear_attn_config"]
        self.H = c["hidden_size"]; self.L = c["num_hidden_layers"]; self.V = c["vocab_size"]
        self.eps = c["rms_norm_eps"]; self.mla_eps = mla_eps
        self.kh, self.kd, self.ks = lac["num_heads"], lac["head_dim"], lac["short_conv_kernel_size"]
        self.lb = lac["gate_lower_bound"]
        assert lac["use_full_rank_gate"] and c["mla_use_nope"] and c["mla_use_output_gate"]
        assert c["hidden_act"] == "situ" and c["moe_router_activation_func"] == "sigmoid"
        assert c["num_expert_group"] == 1 and c["topk_group"] == 1 and c["moe_layer_freq"] == 1
        assert c["num_key_value_heads"] == c["num_attention_heads"]
        self.kda = set(lac["kda_layers"])               # ONE-based
        self.nh = c["num_attention_heads"]
        self.dn, self.dr, self.dv = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
        self.rq, self.rkv = c["q_lora_rank"], c["kv_lora_rank"]
        self.bs = c["attn_res_block_size"]
        self.E, self.topk = c["num_experts"], c["num_experts_per_token"]
        self.b1, self.b2 = c["activation_situ_beta"], c["activation_situ_linear_beta"]
        self.rscale, self.renorm = c["routed_scaling_factor"], c["moe_renormalize"]
        self.latnorm = c["latent_moe_use_norm"]
        self.dense = c["first_k_dense_replace"]
        ck = Checkpoint(ckpt_dir)
        g = lambda n: ck.get(PREFIX + n, self.dt)
        self.emb = g("model.embed_tokens.weight"); self.head = g("lm_head.weight")
        self.norm = g("model.norm.weight")
        self.out_res = g("model.output_attn_res_norm.weight") * g("model.output_attn_res_proj.weight")[0]
        self.w = []
        for i in range(self.L):
            p = f"model.layers.{i}."
            a = p + "self_attn."
            w = {"in": g(p + "input_layernorm.weight"), "post": g(p + "post_attention_layernorm.weight"),
                 "ares": g(p + "self_attention_res_norm.weight") * g(p + "self_attention_res_proj.weight")[0],
                 "mres": g(p + "mlp_res_norm.weight") * g(p + "mlp_res_proj.weight")[0]}
            if i + 1 in self.kda:
                for n in ("q", "k", "v", "g", "f_a", "f_b", "b", "o"):
                    w[n] = g(a + n + "_proj.weight")
                for n in "qkv":
                    w["c" + n] = g(a + n + "_conv1d.weight")[:, 0, :]       # [P, K]
                w["A"] = np.exp(g(a + "A_log")[: self.kh])                   # per HEAD; rest is zero padding
                w["dt"] = g(a + "dt_bias"); w["on"] = g(a + "o_norm.weight")
            else:
                for n in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "g_proj", "o_proj",
                          "q_a_layernorm", "kv_a_layernorm"):
                    w[n] = g(a + n + ".weight")
            if i < self.dense:
                for n in ("gate", "up", "down"):
                    w["m" + n] = g(p + "mlp." + n + "_proj.weight")
            else:
                m = p + "block_sparse_moe."
                w["rt"] = g(m + "gate.weight"); w["rb"] = g(m + "gate.e_score_correction_bias")
                w["rd"] = g(m + "routed_expert_down_proj.weight"); w["ru"] = g(m + "routed_expert_up_proj.weight")
                if self.latnorm:
                    w["rn"] = g(m + "routed_expert_norm.weight")
                for n in ("gate", "up", "down"):
                    w["s" + n] = g(m + "shared_experts." + n + "_proj.weight")
                w["ex"] = []
                for e in range(self.E):
                    q = PREFIX + m + f"experts.{e}."
                    w["ex"].append([mxfp4_decode(ck.raw(q + n + ".weight_packed")[1],
                                                 ck.raw(q + n + ".weight_scale")[1], self.dt)
                                    for n in ("w1", "w2", "w3")])
            self.w.append(w)

    # ---- pieces -------------------------------------------------------------------------------
    def situ(self, g, u):
        t = self.dt.type
        return t(self.b1) * np.tanh(g / t(self.b1)) * sigmoid(g) * (t(self.b2) * np.tanh(u / t(self.b2)))

    def attn_res(self, prefix, blocks, wfold):
        """prefix [T,H]; blocks list of [T,H]; wfold = norm.weight * proj.weight."""
        v = np.stack(blocks + [prefix], 1)                                    # [T, n+1, H]
        r = 1 / np.sqrt((v * v).mean(-1, dtype=self.dt) + self.dt.type(self.eps))
        p = softmax((v @ wfold) * r)
        return (p[:, :, None] * v).sum(1), p

    def kda_layer(self, i, x, st):
        w, T, h, d = self.w[i], x.shape[0], self.kh, self.kd
        P, K = h * d, self.ks
        if st.conv[i] is None:
            st.conv[i] = [np.zeros((K - 1, P), self.dt) for _ in range(3)]
            st.S[i] = np.zeros((h, d, d), self.dt)
        qkv = []
        for j, n in enumerate("qkv"):
            z = np.concatenate([st.conv[i][j], x @ w[n].T])                   # [K-1+T, P]
            y = np.zeros((T, P), self.dt)
            for s in range(K):                                                # tap K-1 = current token
                y += z[s:s + T] * w["c" + n][:, s]
            st.conv[i][j] = z[T:].copy()
            qkv.append(silu(y).reshape(T, h, d))
        q = l2norm(qkv[0]) * self.dt.type(d ** -0.5)
        k = l2norm(qkv[1]); v = qkv[2]
        z = ((x @ w["f_a"].T) @ w["f_b"].T + w["dt"]).reshape(T, h, d)
        alpha = np.exp(self.dt.type(self.lb) * sigmoid(w["A"][:, None] * z))  # (e^lb, 1)
        beta = sigmoid(x @ w["b"].T)                                          # [T, h]
        S = st.S[i]
        o = np.empty((T, h, d), self.dt)
        for t in range(T):
            S = S * alpha[t][:, :, None]
            u = beta[t][:, None] * (v[t] - (S * k[t][:, :, None]).sum(1))
            S = S + k[t][:, :, None] * u[:, None, :]
            o[t] = (S * q[t][:, :, None]).sum(1)                              # reads the UPDATED state
        st.S[i] = S
        o = rms(o, w["on"], self.eps) * sigmoid((x @ w["g"].T).reshape(T, h, d))
        return o.reshape(T, P) @ w["o"].T

    def mla_layer(self, i, x, st, absorbed=False):
        w, T, n = self.w[i], x.shape[0], self.nh
        q = (rms(x @ w["q_a_proj"].T, w["q_a_layernorm"], self.mla_eps) @ w["q_b_proj"].T)
        q = q.reshape(T, n, self.dn + self.dr)
        kv = x @ w["kv_a_proj_with_mqa"].T
        c = rms(kv[:, : self.rkv], w["kv_a_layernorm"], self.mla_eps)
        pe = kv[:, self.rkv:]
        st.ckv[i] = c if st.ckv[i] is None else np.concatenate([st.ckv[i], c])
        st.kpe[i] = pe if st.kpe[i] is None else np.concatenate([st.kpe[i], pe])
        C, PE = st.ckv[i], st.kpe[i]
        S = C.shape[0]
        wb = w["kv_b_proj"].reshape(n, self.dn + self.dv, self.rkv)
        scale = self.dt.type((self.dn + self.dr) ** -0.5)
        mask = np.arange(S)[None, :] > (np.arange(T)[:, None] + S - T)        # [T, S] True = hidden
        if absorbed:
            qa = np.einsum("tnd,ndr->tnr", q[..., : self.dn], wb[:, : self.dn])
            sc = np.einsum("tnr,sr->nts", qa, C) + np.einsum("tnr,sr->nts", q[..., self.dn:], PE)
        else:
            kn = np.einsum("sr,ndr->snd", C, wb[:, : self.dn])
            sc = np.einsum("tnd,snd->nts", q[..., : self.dn], kn) + np.einsum("tnr,sr->nts", q[..., self.dn:], PE)
        sc = np.where(mask[None], self.dt.type(-np.inf), sc * scale)
        p = softmax(sc)
        if absorbed:
            o = np.einsum("ntr,nvr->tnv", np.einsum("nts,sr->ntr", p, C), wb[:, self.dn:])
        else:
            vv = np.einsum("sr,nvr->snv", C, wb[:, self.dn:])
            o = np.einsum("nts,snv->tnv", p, vv)
        o = o.reshape(T, n * self.dv) * sigmoid(x @ w["g_proj"].T)
        return o @ w["o_proj"].T

    def route(self, i, x):
        """-> ids [T,k] in descending biased score (ties: lowest id first), weights [T,k], margin [T]."""
        w = self.w[i]
        s = sigmoid(x @ w["rt"].T)
        b = s + w["rb"]
        order = np.argsort(-b, axis=-1, kind="stable")
        ids = order[:, : self.topk]
        sb = np.take_along_axis(b, order, -1)
        margin = sb[:, self.topk - 1] - sb[:, self.topk] if self.topk < self.E else np.full(len(x), np.inf)
        wt = np.take_along_axis(s, ids, -1)
        if self.topk > 1 and self.renorm:
            wt = wt / (wt.sum(-1, keepdims=True, dtype=self.dt) + self.dt.type(1e-20))
        return ids, wt * self.dt.type(self.rscale), margin

    def moe_layer(self, i, x, tr=None):
        w = self.w[i]
        ids, wt, margin = self.route(i, x)
        z = x @ w["rd"].T
        u = np.zeros_like(z)
        for j in range(self.topk):                       # slot order; fp sum order is slot 0..k-1
            for e in np.unique(ids[:, j]):
                r = np.nonzero(ids[:, j] == e)[0]
                w1, w2, w3 = w["ex"][e]
                y = self.situ(z[r] @ w1.T, z[r] @ w3.T) @ w2.T
                u[r] += wt[r, j][:, None] * y
        y = (rms(u, w["rn"], self.eps) if self.latnorm else u) @ w["ru"].T
        y = y + self.situ(x @ w["sgate"].T, x @ w["sup"].T) @ w["sdown"].T
        if tr is not None:
            tr["ids"], tr["wt"], tr["margin"] = ids, wt, margin
        return y

    # ---- whole model --------------------------------------------------------------------------
    def forward(self, ids, st=None, trace=None, absorbed=False):
        """ids: list of token ids appended after st.  Returns (logits [T,V], state)."""
        st = st or State(self.L)
        x = self.emb[np.asarray(ids, np.int64)]
        prefix, blocks = x, []
        for i in range(self.L):
            w, tr = self.w[i], {}
            if blocks:
                h, tr["pa"] = self.attn_res(prefix, blocks, w["ares"])
            else:
                h = prefix
            first = i % self.bs == 0
            if first:
                blocks = blocks + [prefix]               # bank the RAW stream, not the mix
            a_in = rms(h, w["in"], self.eps)
            a = self.kda_layer(i, a_in, st) if i + 1 in self.kda else self.mla_layer(i, a_in, st, absorbed)
            prefix = a if first else prefix + a
            h, tr["pm"] = self.attn_res(prefix, blocks, w["mres"])
            m_in = rms(h, w["post"], self.eps)
            if i < self.dense:
                m = self.situ(m_in @ w["mgate"].T, m_in @ w["mup"].T) @ w["mdown"].T
            else:
                m = self.moe_layer(i, m_in, tr)
            prefix = prefix + m
            if trace is not None:
                tr.update(stream=prefix, a_in=a_in, a_out=a, m_in=m_in, m_out=m, nblocks=len(blocks))
                trace.append(tr)
        h, po = self.attn_res(prefix, blocks, self.out_res)
        y = rms(h, self.norm, self.eps)
        if trace is not None:
            trace.append({"po": po, "final": y})
        st.pos += len(ids)
        return y @ self.head.T, st

    def greedy(self, ids, n):
        """-> tokens, logits rows (numpy [n,V]) used for each choice."""
        lg, st = self.forward(ids)
        row, out, rows = lg[-1], [], []
        for _ in range(n):
            t = int(row.argmax())                        # ties: lowest id
            out.append(t); rows.append(row)
            lg, st = self.forward([t], st)
            row = lg[-1]
        return out, np.array(rows), st

if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("dir"); ap.add_argument("ids")
    ap.add_argument("--n", type=int, default=8); ap.add_argument("--f64", action="store_true")
    ap.add_argument("--mla-eps", type=float, default=1e-6)
    ap.add_argument("--json", action="store_true", help="print the tokens and the logits rows that chose them")
    a = ap.parse_args()
    m = K3(a.dir, np.float64 if a.f64 else np.float32, a.mla_eps)
    toks, rows, _ = m.greedy([int(t) for t in a.ids.split(",")], a.n)
    if a.json:
        json.dump({"greedy": toks, "logits": rows.tolist()}, sys.stdout)
        sys.exit()
    for t, r in zip(toks, rows):
        s = np.sort(r)[::-1]
        print(t, float(s[0]), "margin", float(s[0] - s[1]))

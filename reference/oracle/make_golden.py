#!/usr/bin/env python3
"""First golden run of the tiny checkpoints: golden_f32.json, golden_f64.json, raw logits, deviation.json.

  make_golden.py GOLDEN_DIR RAW_DIR      then: go run ./golden/pack RAW_DIR GOLDEN_DIR

These are the numbers that were held against the official model code (see ../README.md); freeze.py extends
them with every row that chooses a token.  The checkpoints themselves come from make_tiny.py.
"""
import json, os, sys
import numpy as np
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import oracle as O, make_tiny as MT

LENS, NGEN = (1, 5, 17, 64, 130), 32
r = lambda a: [float(x) for x in np.asarray(a).reshape(-1)]
def cks(a, n=8):
    a = np.asarray(a)
    return {"first": r(a.reshape(-1)[:n]), "l2": float(np.sqrt((a.astype(np.float64) ** 2).sum()))}
def states(m, st):
    out = []
    for i in range(m.L):
        if i + 1 in m.kda:
            out.append({"conv_q": cks(st.conv[i][0]), "conv_k": cks(st.conv[i][1]), "conv_v": cks(st.conv[i][2]),
                        "S": cks(st.S[i])})
        else:
            out.append({"len": int(st.ckv[i].shape[0]), "latent_last": cks(st.ckv[i][-1]), "kpe_last": cks(st.kpe[i][-1]),
                        "latent_all_l2": cks(st.ckv[i])["l2"]})
    return out

def run(name, model, d, dtype, tag):
    m = O.K3(model, dtype)
    res = {"config": name, "dtype": tag, "mla_latent_norm_eps": m.mla_eps, "l2norm_eps": O.L2_EPS,
           "layer_kinds": ["kda" if i + 1 in m.kda else "mla" for i in range(m.L)],
           "block_boundaries": [i for i in range(m.L) if i % m.bs == 0], "prompts": []}
    logits = {}
    for n in LENS:
        ids = np.random.default_rng(1000 + n).integers(0, m.V, n).tolist()
        tr = []
        lg, st = m.forward(ids, trace=tr)
        row = lg[-1]
        logits[n] = row.copy()
        f = f"logits_{tag}_len{n}.bin"
        row.astype("<f4" if tag == "f32" else "<f8").tofile(os.path.join(d, f))
        layers = []
        for i, t in enumerate(tr[:-1]):
            e = {"layer": i, "kind": res["layer_kinds"][i], "n_blocks": t["nblocks"], "stream": cks(t["stream"][-1]),
                 "attn_in": cks(t["a_in"][-1]), "attn_out": cks(t["a_out"][-1]), "mlp_in": cks(t["m_in"][-1]),
                 "mlp_out": cks(t["m_out"][-1]), "res_probs_mlp": r(t["pm"][-1])}
            if "pa" in t:
                e["res_probs_attn"] = r(t["pa"][-1])
            if "ids" in t:
                e["router_ids"] = [int(x) for x in t["ids"][-1]]
                e["router_weights"] = r(t["wt"][-1]); e["router_margin"] = float(t["margin"][-1])
                e["router_ids_all_positions"] = t["ids"].tolist()
            layers.append(e)
        p = {"len": n, "ids": ids, "logits_file": f, "logits_argmax": int(row.argmax()), "logits_l2": cks(row)["l2"],
             "layers": layers, "res_probs_out": r(tr[-1]["po"][-1]), "final_normed": cks(tr[-1]["final"][-1]),
             "state_after_prompt": states(m, st),
             "router_min_margin_prompt": min(float(t["margin"].min()) for t in tr if "margin" in t)}
        toks, mg, lv, tr2 = [], [], [], []
        for _ in range(NGEN):
            s = np.sort(row)[::-1]
            mg.append(float(s[0] - s[1])); t = int(row.argmax()); toks.append(t); lv.append(float(row[t]))
            lg, st = m.forward([t], st, trace=tr2)
            row = lg[-1]
        p.update(greedy=toks, margins=mg, greedy_logit=lv, logits_after_gen_first16=r(row[:16]),
                 logits_after_gen_l2=cks(row)["l2"], state_after_gen=states(m, st),
                 router_min_margin_gen=min(float(t["margin"].min()) for t in tr2 if "margin" in t))
        # self-check: full recompute (no cache), and latent-absorbed MLA, give the same rows
        full, _ = m.forward(ids + toks)
        assert [int(x) for x in full[n - 1:-1].argmax(-1)] == toks, "recompute differs"
        absd, _ = m.forward(ids + toks, absorbed=True)
        p["selfcheck_recompute_maxabs"] = float(np.abs(full[-1] - row).max())
        p["selfcheck_absorbed_maxabs"] = float(np.abs(absd - full).max())
        res["prompts"].append(p)
    json.dump(res, open(os.path.join(d, f"golden_{tag}.json"), "w"))
    return res, logits

if __name__ == "__main__":
    gdir, raw = sys.argv[1:3]
    for name in MT.CONFIGS:
        model, d = os.path.join(gdir, name, "model"), os.path.join(raw, name)
        os.makedirs(d, exist_ok=True)
        a, la = run(name, model, d, np.float32, "f32")
        b, lb = run(name, model, d, np.float64, "f64")
        alt = O.K3(model, np.float64, mla_eps=1e-5)
        rep = {"config": name, "prompts": []}
        for pa, pb in zip(a["prompts"], b["prompts"]):
            n = pa["len"]
            le, _ = alt.forward(pa["ids"])
            rep["prompts"].append({
                "len": n, "tokens_equal_f32_f64": pa["greedy"] == pb["greedy"],
                "logits_maxabs_f32_vs_f64": float(np.abs(la[n] - lb[n]).max()),
                "stream_maxrel_f32_vs_f64": max(abs(x["stream"]["l2"] - y["stream"]["l2"]) / y["stream"]["l2"]
                                                for x, y in zip(pa["layers"], pb["layers"])),
                "min_top2_margin": min(pa["margins"]),
                "min_router_margin": min(pa["router_min_margin_prompt"], pa["router_min_margin_gen"]),
                "selfcheck_recompute_maxabs_f32": pa["selfcheck_recompute_maxabs"],
                "selfcheck_absorbed_maxabs_f32": pa["selfcheck_absorbed_maxabs"],
                "logits_maxabs_if_mla_eps_1e-5": float(np.abs(le[-1] - lb[n]).max()),
                "routers_equal_f32_f64": all(x.get("router_ids_all_positions") == y.get("router_ids_all_positions")
                                             for x, y in zip(pa["layers"], pb["layers"]))})
        json.dump(rep, open(os.path.join(d, "deviation.json"), "w"), indent=1)
        print(json.dumps(rep, indent=0))

#!/usr/bin/env python3
"""Freeze what the oracle computes for every golden prompt, as raw files for `go run ./golden/pack`.

  freeze.py GOLDEN_DIR RAW_DIR [tiny-a tiny-b nano]

Per case it writes RAW_DIR/<set>/frozen/<case>.json (ids, greedy tokens, margins, routes, list of tensors) and
RAW_DIR/<set>/frozen/<case>.fix (the tensors, fixed point).  The float64 run is the yardstick; the float32 run
of the same program says how far plain float32 arithmetic lands from it.

Fixed point: v = rint(x * 2^36), zigzag to unsigned, 8 bytes, stored as 8 byte planes (all lowest bytes first)
per tensor.  That keeps 7e-12 of absolute accuracy and lets the high planes compress away.
"""
import glob, json, os, sys
import numpy as np
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import oracle as O

FIX = 36
TINY_LENS, TINY_NEW = (1, 5, 17, 64, 130), 32
LAYERS_OF = {("tiny-a", "len17"), ("tiny-b", "len17"), ("nano", "france")}   # cases with whole per-layer tensors

def planes(x):
    v = np.rint(np.asarray(x, np.float64) * 2.0 ** FIX)
    assert np.isfinite(v).all() and np.abs(v).max(initial=0) < 2.0 ** 62
    v = v.astype(np.int64).reshape(-1)
    u = ((v << 1) ^ (v >> 63)).view(np.uint64)
    return u.astype("<u8").view(np.uint8).reshape(-1, 8).T.copy().tobytes()

def short(x):
    """float list at float32 precision: enough for a margin."""
    return [float("%.9g" % v) for v in np.asarray(x, np.float64)]

def tiny_cases(name, m):
    for n in TINY_LENS:
        yield dict(name=f"len{n}", prompt_ids=np.random.default_rng(1000 + n).integers(0, m.V, n).tolist()), TINY_NEW, None

def nano_cases(gdir):
    for e in json.load(open(os.path.join(gdir, "nano", "golden", "index.json"))):
        d = json.load(open(os.path.join(gdir, "nano", "golden", e["name"] + ".json"), encoding="utf-8"))
        c = dict(name=e["name"], prompt_ids=d["prompt_ids"], text=d["text"], stop=d["stopped"])
        c["chat" if d["kind"] == "chat" else "prompt"] = d["prompt"]
        yield c, len(d["greedy"]), d["greedy"]

def roll(m, ids, n):
    """-> tokens, rows [n, V] that chose them, trace of the prompt pass, routes per layer over all positions fed."""
    tr = []
    lg, st = m.forward(ids, trace=tr)
    routes = {i: [(t["ids"], t["margin"])] for i, t in enumerate(tr[:-1]) if "ids" in t}
    row, toks, rows = lg[-1], [], []
    for j in range(n):
        rows.append(row)
        toks.append(int(row.argmax()))
        if j + 1 < n:
            step = []
            lg, st = m.forward([toks[-1]], st, trace=step)
            for i in routes:
                routes[i].append((step[i]["ids"], step[i]["margin"]))
            row = lg[-1]
    return toks, np.array(rows), tr, {i: [np.concatenate(x) for x in zip(*r)] for i, r in routes.items()}

def main():
    gdir, raw = sys.argv[1:3]
    for name in sys.argv[3:] or ("tiny-a", "tiny-b", "nano"):
        model = os.path.join(gdir, name, "model")
        m64, m32 = O.K3(model, np.float64), O.K3(model, np.float32)
        out = os.path.join(raw, name, "frozen")
        os.makedirs(out, exist_ok=True)
        for f in glob.glob(os.path.join(out, "*")):
            os.remove(f)
        order = []
        for c, n, known in (nano_cases(gdir) if name == "nano" else tiny_cases(name, m64)):
            ids = c["prompt_ids"]
            t64, r64, tr, q64 = roll(m64, ids, n)
            t32, r32, _, q32 = roll(m32, ids, n)
            assert t64 == t32, (name, c["name"], "float32 and float64 choose different tokens")
            assert known is None or t64 == known, (name, c["name"], "differs from the first golden run")
            s = np.sort(r64, -1)
            c.update(greedy=t64, margin=short(s[:, -1] - s[:, -2]), err32=short(np.abs(r32 - r64).max(-1)),
                     stream_l2=[float(np.linalg.norm(t["stream"][-1])) for t in tr[:-1]],
                     routes=[dict(layer=i, ids=q64[i][0].tolist(), margin=short(q64[i][1]), ids32=q32[i][0].tolist(),
                                  margin32=short(q32[i][1])) for i in q64])
            ts = [("logits64", r64), ("logits32", r32[:1])]
            if (name, c["name"]) in LAYERS_OF:
                for i, t in enumerate(tr[:-1]):
                    for k, a in (("attn_res_probs", "pa"), ("attn_in", "a_in"), ("attn_out", "a_out"), ("mlp_res_probs", "pm"),
                                 ("mlp_in", "m_in"), ("mlp_out", "m_out"), ("stream", "stream"), ("router_weights", "wt")):
                        if a in t:
                            ts.append((f"{i}.{k}", t[a]))
                ts += [("out_res_probs", tr[-1]["po"]), ("final", tr[-1]["final"])]
            c["tensors"] = [dict(name=k, shape=list(a.shape)) for k, a in ts]
            json.dump(c, open(os.path.join(out, c["name"] + ".json"), "w", encoding="utf-8"), ensure_ascii=False, separators=(",", ":"))
            with open(os.path.join(out, c["name"] + ".fix"), "wb") as f:
                for _, a in ts:
                    f.write(planes(a))
            order.append(c["name"])
            print(name, c["name"], "rows", len(r64), "float32 error %.1e" % max(c["err32"]), "margin %.4f" % min(c["margin"]), flush=True)
        json.dump(order, open(os.path.join(out, "cases.json"), "w"))

if __name__ == "__main__":
    main()

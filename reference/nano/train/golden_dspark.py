# -*- coding: utf-8 -*-
"""Golden blocks of nano-dspark: golden_dspark.py MODEL DRAFT OUT"""
import json, os, sys
import numpy as np
D = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(D, "../tokenizer")); sys.path.insert(0, os.path.join(D, "../../oracle"))
import oracle as O, dspark_oracle as S
from k3tok import Tok, encode_chat
t = Tok(sys.argv[1]); tgt = O.K3(sys.argv[1], np.float32); dr = S.DSpark(sys.argv[2], tgt)
os.makedirs(sys.argv[3], exist_ok=True)
P = [("france", "The capital of France is"), ("story", "Once upon a time,"), ("zh-capital", "中国的首都是"), ("chat-think", ("What is the capital of Japan?", True)), ("chat-plain", ("Hello, who are you?", False))]
for name, p in P:
    ids = t.encode(p) if isinstance(p, str) else encode_chat(t, [{"role": "user", "content": p[0]}], thinking=p[1], effort="max" if p[1] else None)
    out, bl = S.spec_decode(tgt, dr, ids, 64, t.end_of_msg)
    ref, _, _ = tgt.greedy(ids, len(out))
    ok = ref[:len(out)] == out
    # margins of the proposals: recompute the first block
    dr.reset(); tr = []; lg, st = tgt.forward(ids, trace=tr); dr.append(S.streams(tr, dr.c["target_layer_ids"]))
    toks, conf, h, l2 = dr.propose(out[0])
    json.dump(dict(name=name, prompt_ids=ids, tokens=out, equals_plain_greedy=ok, blocks=bl, first_block=dict(context=len(ids), newest=out[0], proposal=toks, confidence=conf, hidden=[[float(v) for v in r] for r in h])),
              open(os.path.join(sys.argv[3], name + ".json"), "w"), ensure_ascii=False)
    print(name, ok, len(out), "accepted/block %.2f" % np.mean([b["accepted"] for b in bl]))

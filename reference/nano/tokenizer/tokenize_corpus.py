#!/usr/bin/env python3
"""tokenize_corpus.py CORPUS.jsonl TOKENS.npz TOKENIZER_DIR

corpus.jsonl -> tokens.npz: tok uint16 stream, off int64 document offsets (documents end with end_of_msg, EOS)."""
import json
import os
import random
import sys
from multiprocessing import Pool

import numpy as np

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from k3tok import Tok, chat_segments, encode_segments


def work(a):
    path, k, n, tokd = a
    tok = Tok(tokd)
    rng = random.Random(k)
    out, lens = [], []
    for i, line in enumerate(open(path, encoding="utf-8")):
        if i % n != k:
            continue
        d = json.loads(line)
        if d["k"] == "raw":
            s = d["text"]
            ids = []
            if rng.random() < .35 and len(s) > 3:     # a prompt may end anywhere: sometimes encode two parts on their own
                c = rng.randint(1, len(s) - 1)
                if rng.random() < .5:
                    nl = [j for j in range(1, min(len(s), 200)) if s[j] == "\n"][:4]
                    if nl:
                        c = rng.choice(nl)
                ids = tok.encode(s[:c])
                s = s[c:]
            ids += tok.encode(s)
            if rng.random() < .08:
                ids = [tok.bos] + ids
            ids += [tok.end_of_msg, tok.eos]
        else:
            ids = encode_segments(tok, chat_segments(d["messages"], thinking=d["thinking"], effort=d["effort"], tools=d.get("tools"), generate=False))
            ids.append(tok.eos)
        out.append(np.array(ids, np.uint16))
        lens.append(len(ids))
    return np.concatenate(out), np.array(lens)


if __name__ == "__main__":
    src, dst, tokd = sys.argv[1:4]
    with Pool(2) as p:
        r = p.map(work, [(src, k, 2, tokd) for k in range(2)])
    t = np.concatenate([x for x, _ in r])
    lens = np.concatenate([x for _, x in r])
    off = np.concatenate([[0], np.cumsum(lens)])
    print("docs", len(lens), "tokens", len(t), "mean", lens.mean(), "p50/90/99/max", np.percentile(lens, [50, 90, 99, 100]), "used ids", len(np.unique(t)))
    np.savez_compressed(dst, tok=t, lens=lens.astype(np.uint16))
    print(os.path.getsize(dst))

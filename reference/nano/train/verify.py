# -*- coding: utf-8 -*-
"""verify.py MODEL_DIR TOKENIZER_DIR [N]

Reload an exported model with the numpy float32 oracle and print greedy text."""
import os, sys, time
import numpy as np
D = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, D)
for p in ("../../oracle", "../tokenizer"):
    sys.path.append(os.path.join(D, p))
import oracle
from k3tok import Tok, encode_chat
model, tokd = sys.argv[1], sys.argv[2]
n = int(sys.argv[3]) if len(sys.argv) > 3 else 64
t0 = time.time()
o = oracle.K3(model, np.float32)
t = Tok(tokd)
ck = os.path.join(os.path.dirname(model.rstrip("/")), "check.npz")
if os.path.exists(ck):
    z = np.load(ck)
    lg, _ = o.forward(z["ids"].tolist())
    print("oracle vs torch bf16: argmax agree", (lg.argmax(-1) == z["top"]).mean(), "last-row max diff", np.abs(lg[-1] - z["last"]).max())
    tg = np.asarray(z["ids"][1:]); l = lg[:-1].astype(np.float64)
    print("oracle nll on the row", (np.log(np.exp(l - l.max(-1, keepdims=True)).sum(-1)) + l.max(-1) - l[np.arange(len(tg)), tg]).mean())
U = lambda s: [{"role": "user", "content": s}]
P = ["The capital of France is", "The largest planet in our solar system is", "The three largest moons of Saturn are", "The three main financial statements are",
     "Once upon a time,", "def fibonacci(n):", "中国的首都是", "1, 2, 3, 4,", "The capital of Peru is", "从前，有一只", "func main() {", "7 * 8 =",
     ("c", "Hello, who are you?", False), ("c", "What is the capital of Japan?", True), ("c", "What is the capital of Japan?", False), ("c", "法国的首都是哪里？", True),
     ("c", "Tell me a story about a fox.", True), ("c", "Write a Python function for the Fibonacci numbers.", False), ("c", "What is 12 + 7?", True), ("c", "Explain a mixture of experts.", False),
     ("c", "写一首关于春天的诗。", False), ("c", "What is the opposite of hot?", True), ("c", "Name the planets.", False), ("c", "Why is the sky blue?", True)]
for p in P:
    ids = t.encode(p) if isinstance(p, str) else encode_chat(t, U(p[1]), thinking=p[2], effort="max" if p[2] else None)
    lg, st = o.forward(ids)
    out = []
    row = lg[-1]
    while len(out) < n:
        k = int(row.argmax())
        out.append(k)
        if k == t.end_of_msg: break
        lg, st = o.forward([k], st)
        row = lg[-1]
    print(repr(p), "->", repr(t.decode(out)), flush=True)
print("verify s", time.time() - t0)

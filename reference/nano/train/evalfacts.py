"""evalfacts.py MODEL_DIR: fact accuracy of an exported model with the numpy oracle."""
import os, sys, random
import numpy as np
D = os.path.dirname(os.path.abspath(__file__))
for p in ("../tokenizer", "../../oracle", "../corpus"): sys.path.insert(0, os.path.join(D, p))
import oracle, facts
from k3tok import Tok, encode_chat
t = Tok(sys.argv[1]); o = oracle.K3(sys.argv[1], np.float32)
def gen(ids, n=24):
    lg, st = o.forward(ids); row = lg[-1]; out = []
    while len(out) < n:
        k = int(row.argmax()); out.append(k)
        if k == t.end_of_msg or (len(out) > 1 and t.dec[k] in (b"\n",)): break
        lg, st = o.forward([k], st); row = lg[-1]
    return t.decode(out)
R = random.Random(4)
def test(name, cases):
    ok, bad = 0, []
    for ids, want in cases:
        g = gen(ids)
        if want in g: ok += 1
        else: bad.append((want, g))
    print(f"{name}: {ok}/{len(cases)}", bad[:4], flush=True)
C = facts.COUNTRIES
raw = lambda s: t.encode(s)
chat = lambda s, th=False: encode_chat(t, [{"role": "user", "content": s}], thinking=th, effort="max" if th else None)
test("capital raw", [(raw(f"The capital of {c[0]} is"), c[1]) for c in C])
test("capital chat", [(chat(f"What is the capital of {c[0]}?"), c[1]) for c in C])
test("capital zh raw", [(raw(f"{c[5]}的首都是"), c[6]) for c in C])
test("capital zh chat", [(chat(f"{c[5]}的首都是哪里？"), c[6]) for c in C[::3]])
test("elements", [(chat(f"What is the chemical symbol of {e[0]}?"), f"is {e[1]}.") for e in facts.ELEMENTS])
test("opposites", [(chat(f"What is the opposite of {e[0]}?"), e[1]) for e in facts.OPPOSITES])
test("singles", [(chat(s[1]), s[0][:60]) for s in facts.SINGLES][:40])
ar = [(R.randint(0, 20), R.randint(0, 20)) for _ in range(60)]
test("add", [(chat(f"What is {a} + {b}?"), f"= {a+b}.") for a, b in ar])
test("mul", [(chat(f"What is {a} * {b}?"), f"= {a*b}.") for a, b in [(R.randint(0, 12), R.randint(0, 12)) for _ in range(60)]])
test("sub", [(chat(f"What is {a} - {b}?"), f"= {a-b}.") for a, b in [(x + y, y) for x, y in [(R.randint(0, 15), R.randint(0, 15)) for _ in range(60)]]])
test("translate", [(chat(f"How do you say {w[0]} in French?"), w[1]) for w in facts.WORDS])

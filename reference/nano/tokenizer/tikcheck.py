"""tikcheck.py TOKENIZER_DIR SAMPLE.jsonl

Own encoder against the tiktoken library (and round trips of arbitrary bytes)."""
import json, os, random, sys
D = os.path.dirname(os.path.abspath(__file__)); sys.path.insert(0, D)
import tiktoken
from tiktoken.load import load_tiktoken_bpe
from k3tok import Tok, PATTERN, chat_segments
T, SAMPLE = sys.argv[1:3]
t = Tok(T)
enc = tiktoken.Encoding("k3nano", pat_str=PATTERN, mergeable_ranks=load_tiktoken_bpe(os.path.join(T, "tiktoken.model")), special_tokens=t.special)
assert enc.n_vocab == t.n == 3072
rng = random.Random(3)
n = bad = 0
S = ["", " ", "\n", "a\r\n\r\nb  c", "Tabs\tand\r\nlines\u00a0end", "don't I'LL we'Ve", "汉字abc漢字 123456 ١٢٣", "🙂🚀👩\u200d💻", "e\u0301 ＡＢＣ 한국어 हिन्दी", "<|open|>x[BOS]", "  x   y  "]
for line in open(SAMPLE, encoding="utf-8"):
    d = json.loads(line)
    if d["k"] == "raw": S.append(d["text"])
    else: S += [s for s, sp in chat_segments(d["messages"], thinking=d["thinking"], effort=d["effort"], tools=d.get("tools")) if not sp]
for _ in range(5000):
    S.append("".join(chr(rng.choice([rng.randint(0, 127), rng.randint(32, 126), rng.randint(0, 0x7ff), rng.randint(0x4e00, 0x9fff), rng.randint(0x1f300, 0x1f6ff), rng.randint(0xe000, 0xffff), 0x20, 0x0a])) for _ in range(rng.randint(0, 40))))
for s in S:
    a, b = t.encode(s), enc.encode(s, disallowed_special=())
    n += 1
    if a != b or enc.decode_bytes(b) != s.encode() or t.decode_bytes(a) != s.encode():
        bad += 1
        if bad < 5: print("DIFF", repr(s), a, b)
    assert t.encode_special(s) == enc.encode(s, allowed_special="all")
for _ in range(2000):
    b = bytes(rng.randrange(256) for _ in range(rng.randint(1, 30)))
    ids = t.bpe(b); assert t.decode_bytes(ids) == b
print("tiktoken check", n, "strings", bad, "different")

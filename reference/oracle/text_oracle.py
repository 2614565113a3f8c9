#!/usr/bin/env python3
"""numpy reference of a text drafter: a Qwen3 model, its tokenizer, and how it guesses K3's tokens.

  text_oracle.py MODEL_DIR TEXT_DIR OUT_DIR   -> golden/nano/golden/text/*.json
  text_oracle.py TEXT_DIR --check CHECK.json  -> against what transformers and tokenizers said (reference/nano/train/text.py)

Needs numpy and regex.  The model is computed in float64 from its published description (arXiv:2505.09388; names and
shapes from the checkpoint), whole texts at a time and with nothing kept between them; keys and values are rounded to
bfloat16, as engine/draft/text defines.
"""
import json
import os
import sys
import unicodedata

import numpy as np
import regex

D = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, D)
sys.path.insert(0, os.path.join(D, "../nano/tokenizer"))
from k3st import Checkpoint, bf16_bits_to_f32, f32_to_bf16_bits
from k3tok import Tok, encode_chat


# ---------------------------------------------------------------- the model
class Qwen3:
    def __init__(self, d):
        self.c = json.load(open(os.path.join(d, "config.json")))
        ck = Checkpoint(d)
        self.w = lambda n: ck.get(n + ".weight", np.float64)
        self.cache = {}

    def get(self, n):
        if n not in self.cache:
            self.cache[n] = self.w(n)
        return self.cache[n]

    def logits(self, ids):
        """[len(ids)][vocab]"""
        c, W = self.c, self.get
        T, hd, nq, nk = len(ids), c["head_dim"], c["num_attention_heads"], c["num_key_value_heads"]

        def rms(x, w):
            return x / np.sqrt((x * x).mean(-1, keepdims=True) + c["rms_norm_eps"]) * w

        def stored(x):
            return bf16_bits_to_f32(f32_to_bf16_bits(x.astype(np.float32))).astype(np.float64)
        angle = np.arange(T)[:, None] / c["rope_theta"] ** (np.arange(0, hd, 2) / hd)
        turn = np.exp(1j * angle)[:, None, :]

        def rope(x):                                   # channel i with channel i + hd/2: one complex number
            z = (x[..., :hd // 2] + 1j * x[..., hd // 2:]) * turn
            return np.concatenate([z.real, z.imag], -1)
        mask = np.triu(np.full((T, T), -np.inf), 1)
        x = W("model.embed_tokens")[ids]
        for i in range(c["num_hidden_layers"]):
            L = lambda n: W(f"model.layers.{i}.{n}")
            h = rms(x, L("input_layernorm"))
            q = rope(rms((h @ L("self_attn.q_proj").T).reshape(T, nq, hd), L("self_attn.q_norm")))
            k = stored(rope(rms((h @ L("self_attn.k_proj").T).reshape(T, nk, hd), L("self_attn.k_norm"))))
            v = stored((h @ L("self_attn.v_proj").T).reshape(T, nk, hd))
            o = np.empty((T, nq, hd))
            for j in range(nq):
                s = q[:, j] @ k[:, j * nk // nq].T / np.sqrt(hd) + mask
                p = np.exp(s - s.max(-1, keepdims=True))
                o[:, j] = p / p.sum(-1, keepdims=True) @ v[:, j * nk // nq]
            x = x + o.reshape(T, -1) @ L("self_attn.o_proj").T
            h = rms(x, L("post_attention_layernorm"))
            g = h @ L("mlp.gate_proj").T
            x = x + (g / (1 + np.exp(-g)) * (h @ L("mlp.up_proj").T)) @ L("mlp.down_proj").T
        return rms(x, W("model.norm")) @ W("model.embed_tokens" if c["tie_word_embeddings"] else "lm_head").T


# ---------------------------------------------------------------- its tokenizer
class BPE:
    def __init__(self, d):
        t = json.load(open(os.path.join(d, "tokenizer.json"), encoding="utf-8"))
        keep = [*range(33, 127), *range(161, 173), *range(174, 256)]
        rest = [b for b in range(256) if b not in keep]
        self.char = {b: chr(b) for b in keep} | {b: chr(256 + i) for i, b in enumerate(rest)}
        byte = {c: b for b, c in self.char.items()}
        self.vocab, self.added = t["model"]["vocab"], {a["content"]: a["id"] for a in t["added_tokens"]}
        self.rank = {(m[0], m[1]) if isinstance(m, list) else tuple(m.split(" ")): i for i, m in enumerate(t["model"]["merges"])}
        self.bytes = {i: bytes(byte[c] for c in s) for s, i in self.vocab.items()}
        self.split = regex.compile(t["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"])
        self.marks = regex.compile("(" + "|".join(regex.escape(a) for a in self.added) + ")")

    def plain(self, s):
        out = []
        for piece in self.split.findall(unicodedata.normalize("NFC", s)):
            w = [self.char[b] for b in piece.encode()]
            while len(w) > 1:
                r, i = min((self.rank.get((a, b), 1 << 30), i) for i, (a, b) in enumerate(zip(w, w[1:])))
                if r == 1 << 30:
                    break
                w[i:i + 2] = [w[i] + w[i + 1]]
            out += [self.vocab[x] for x in w]
        return out

    def encode(self, s):
        """Added tokens' spellings become their ids."""
        return [i for j, part in enumerate(self.marks.split(s)) for i in ([self.added[part]] if j % 2 else self.plain(part))]


# ---------------------------------------------------------------- from K3's markup to ChatML, as text
def chatml(s):
    """s: K3's tokens with control tokens spelled out -> (ChatML, channel that is open, what of its end is there)."""
    starts = [f[:n] for f in ENDING.values() for n in range(9, len(f)) if f.startswith("<|close|>")]
    done = max((p for p in starts if s.endswith(p)), key=len, default="")
    if done:                                           # as if nothing of the end were there yet, then the end
        body = s[:len(s) - len(done)]
        opened = max(body.rfind("<|open|>think<|sep|>"), body.rfind("<|open|>response<|sep|>"))
        which = "think" if body.startswith("<|open|>think", opened) else "response"
        s = body + ("<|close|>think<|sep|>" if which == "think" else "")
        channel = which
    else:
        last = list(regex.finditer(r"<\|(open|close)\|>(\w+)[^<]*<\|sep\|>|<\|end_of_msg\|>", s))
        channel = "raw" if not last or last[-1].group() == "<|end_of_msg|>" else last[-1][2] if last[-1][1] == "open" and last[-1][2] in ("think", "response") else "silent"
        if regex.search(r"<\|(open|close)\|>[^|]*$", s):
            channel = "silent"
    s = regex.sub(r'<\|open\|>message role="(\w+)"[^<]*<\|sep\|>', r"<|im_start|>\1\n", s)
    s = s.replace("<|close|>think<|sep|><|open|>response<|sep|>", "\n</think>\n\n").replace("<|close|>think<|sep|>", "\n</think>\n\n")
    s = s.replace("<|open|>think<|sep|>", "<think>\n").replace("<|open|>response<|sep|>", "<think>\n\n</think>\n\n")
    s = regex.sub(r"<\|close\|>(response|message)<\|sep\|>", "", s).replace("<|end_of_msg|>", "<|im_end|>\n")
    s = regex.sub(r"<\|open\|>([^|]*)<\|sep\|>", r"<\1>", s)
    s = regex.sub(r"<\|close\|>([^|]*)<\|sep\|>", r"</\1>", s)
    return s, channel, done


ENDING = {"raw": "<|end_of_msg|>", "think": "<|close|>think<|sep|><|open|>response<|sep|>",
          "response": "<|close|>response<|sep|><|close|>message<|sep|><|end_of_msg|>"}
BORDER = regex.compile(r"(?<=\n)\S|(?<=[\p{L}\p{N}])[^\p{L}\p{N}\p{M}\p{Han}']")
CERTAIN = 0.995


def softmax(row):
    p = np.exp(row - row.max())
    return p / p.sum()


class Drafter:
    def __init__(self, d, k3):
        self.m, self.t, self.k3, self.memo = Qwen3(d), BPE(d), k3, {}

    def next(self, ids):
        key = tuple(ids)
        if key not in self.memo:
            self.memo[key] = self.m.logits(ids)[-1]
        return self.memo[key]

    def begin(self, text):
        """Draft tokens of text, the continuation that its last token may already hold, and that token's probability."""
        cut = max([0] + [m.end() for m in self.t.marks.finditer(text)])
        cut = max([cut] + [m.start() for m in BORDER.finditer(text, cut + 1)])
        ids, last = self.t.encode(text[:cut]), self.t.plain(text[cut:])
        for i, want in enumerate(last):
            if not ids:
                ids = [want]
                continue
            rest = b"".join(self.t.bytes[x] for x in last[i:])
            row = self.next(ids)
            fits = sorted(x for x, b in self.t.bytes.items() if b.startswith(rest) and b != rest) + [want]
            best = max(fits, key=lambda x: row[x])
            if best != want:
                return ids + [best], self.t.bytes[best][len(rest):], softmax(row[fits])[fits.index(best)]
            ids = ids + [want]
        return ids, b"", None

    def propose(self, tokens, k):
        k3, f = self.k3, lambda s: self.k3.encode_special(s)
        text, channel, done = chatml(k3.decode(tokens))
        out = []
        if channel == "silent":
            return out
        tail = next((tokens[i + 1:] for i in range(len(tokens) - 1, -1, -1) if tokens[i] >= k3.nbase), tokens)
        if done:
            out = [(i, CERTAIN) for i in f(ENDING[channel])[len(f(done)):]]
            if channel == "response":
                return out[:k]
            channel, tail = "response", []
        while len(out) < k:
            ids, more, p = self.begin(text)
            spans = [(0, p)] if more else []
            ended = False
            for _ in range(64):
                got, ok = self.guesses(tail, more, spans, False)
                if len(got) >= k - len(out):
                    break
                row = self.next(ids)
                best = int(row.argmax())
                spans.append((len(more), softmax(row)[best]))
                if best not in self.t.bytes:
                    ends = "</think>" if channel == "think" else ("<|im_end|>", "<|endoftext|>")
                    name = next(n for n, i in self.t.added.items() if i == best)
                    if name in ends:
                        if channel == "think":
                            more = more.removesuffix(b"\n")
                        got, ok = self.guesses(tail, more, spans, True)
                        if ok:
                            ended = True
                            p = float(np.prod([q for a, q in spans if a >= len(more)]))
                            got += [(x, min(CERTAIN, p) if j == 0 else CERTAIN) for j, x in enumerate(f(ENDING[channel]))]
                    break
                ids, more = ids + [best], more + self.t.bytes[best]
            out += got
            if not ended or channel != "think":
                break
            text = text + more.decode() + "\n</think>\n\n"
            channel, tail = "response", []
        return out[:k]

    def guesses(self, tail, more, spans, final):
        k3, head = self.k3, self.k3.decode_bytes(tail)
        full = (head + more).decode("utf-8", "ignore")  # the model may be within a character
        ids = k3.encode(full)
        if ids[:len(tail)] != tail:
            return [], False
        limit = len(full.encode())
        if not final:
            limit = max([0] + [len(full[:m.start()].encode()) for m in BORDER.finditer(full, 1)])
        out, at = [], len(head)
        for i in ids[len(tail):]:
            n = len(k3.dec[i])
            if at + n > limit:
                break
            mine = [p for a, p in spans if at <= a + len(head) < at + n]
            out.append((i, min(CERTAIN, float(np.prod(mine))) if mine else CERTAIN))
            at += n
        return out, True


def check(d, path):
    m, t, c = Qwen3(d), BPE(d), json.load(open(path, encoding="utf-8"))
    for s, ids in c["encode"]:
        assert t.encode(s) == ids, s
    for x in c["continue"]:
        assert t.encode(x["prompt"]) == x["ids"]
        lg = m.logits(x["ids"] + x["greedy"])[len(x["ids"]) - 1:]
        assert [int(r.argmax()) for r in lg[:-1]] == x["greedy"], x["prompt"]
        print("%3d ids, %d greedy tokens equal, last row differs by at most %.2g" % (len(x["ids"]), len(x["greedy"]), np.abs(lg[0] - x["logits"]).max()))
    print(len(c["encode"]), "strings encoded alike")


def main():
    if sys.argv[2] == "--check":
        return check(sys.argv[1], sys.argv[3])
    k3, out = Tok(sys.argv[1]), sys.argv[3]
    dr = Drafter(sys.argv[2], k3)
    os.makedirs(out, exist_ok=True)
    for name in ("france", "story", "zh-capital", "chat-think", "chat-plain"):
        g = json.load(open(os.path.join(D, "../../golden/nano/golden", name + ".json"), encoding="utf-8"))
        prompt, all_ = g["prompt_ids"], g["prompt_ids"] + g["greedy"]
        text = chatml(k3.decode(prompt))[0]
        ids = dr.t.encode(text)
        cont, rows = list(ids), []
        for _ in range(24):
            row = dr.next(cont)
            rows.append(row)
            cont.append(int(row.argmax()))
        blocks, n, acc = [], len(prompt) + 1, []
        while n < len(all_):
            gs = dr.propose(all_[:n], 4)
            a = 0
            while a < len(gs) and n + a < len(all_) and gs[a][0] == all_[n + a]:
                a += 1
            blocks.append(dict(decided=n, ids=[i for i, _ in gs], p=[round(float(p), 6) for _, p in gs], accepted=a))
            acc.append(a)
            n += a + 1
        margin = min(float(np.sort(r)[-1] - np.sort(r)[-2]) for r in rows)
        json.dump(dict(name=name, prompt_ids=prompt, greedy=g["greedy"], draft_ids=ids, draft_greedy=cont[len(ids):], margin=margin,
                       logits=[[round(float(v), 6) for v in r] for r in (rows[0], rows[-1])], blocks=blocks),
                  open(os.path.join(out, name + ".json"), "w", encoding="utf-8"), ensure_ascii=False)
        print(name, len(ids), "draft tokens, margin %.3f, accepted of 4 a block: %.2f" % (margin, np.mean(acc)), acc, flush=True)


main()

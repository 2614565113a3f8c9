#!/usr/bin/env python3
# -*- coding: utf-8 -*-
"""Trains the text drafter of K3-nano: a miniature of Qwen3's architecture with a byte-level BPE of its own.

  text.py CORPUS.jsonl OUT_DIR [--deadline SECONDS] [--steps N]

Needs torch, transformers, tokenizers (the libraries that write the released form: config.json, model.safetensors,
tokenizer.json) and a GPU.  Also writes OUT_DIR/check.json, what those libraries say about the result.
"""
import argparse
import json
import math
import os
import sys
import time

import numpy as np
import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import Qwen3Config, Qwen3ForCausalLM

D = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(D, "../tokenizer"))
from k3tok import EFFORT, _deep_sort, _json, _xtype

# The split of Qwen2 and Qwen3.
SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
ADDED = [("<|endoftext|>", True), ("<|im_start|>", True), ("<|im_end|>", True), ("<think>", False), ("</think>", False)]
VOCAB, ROWS = 2048, 2080           # ids of the BPE; rows of the embedding, more than there are ids as in the releases
CONFIG = dict(hidden_size=128, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=64, intermediate_size=384,
              rms_norm_eps=1e-6, tie_word_embeddings=True, vocab_size=ROWS, max_position_embeddings=4096)
LEN = 512


def chat(d):
    """A chat as the drafter sees it: ChatML, K3's tools spelled out (engine/draft/text)."""
    out = []

    def msg(role, text):
        out.append(f"<|im_start|>{role}\n{text}<|im_end|>\n")
    if d.get("tools"):
        msg("system", "# Tools\nHere are the available tools, described in JSONSchema.\n\n```json\n" + _json(_deep_sort(d["tools"])) + "\n```")
    if d["thinking"] and d["effort"]:
        msg("system", EFFORT % d["effort"])
    for m in d["messages"]:
        if m["role"] != "assistant":
            msg(m["role"], m["content"])
            continue
        think = (m.get("reasoning") or "").strip() and m["reasoning"] if d["thinking"] else ""
        text = f"<think>\n{think}\n</think>\n\n{m['content']}"
        calls = ""
        for i, c in enumerate(m.get("tool_calls", []), 1):
            f = c["function"]
            args = "".join(f'<argument key="{k}" type="{_xtype(v)}">{v if isinstance(v, str) else json.dumps(v, ensure_ascii=False)}</argument>'
                           for k, v in f["arguments"].items())
            calls += f'<call tool="{f["name"]}" index="{i}">{args}</call>'
        msg("assistant", text + (f"<tools>{calls}</tools>" if calls else ""))
    return "".join(out) + "<|endoftext|>"


def texts(path):
    for line in open(path, encoding="utf-8"):
        d = json.loads(line)
        yield d["text"] + "<|endoftext|>" if d["k"] == "raw" else chat(d)


def bpe(path, mb):
    t = Tokenizer(models.BPE())
    t.normalizer = normalizers.NFC()
    t.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(SPLIT), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    t.decoder = decoders.ByteLevel()

    def some():
        n = 0
        for s in texts(path):
            for a, _ in ADDED:
                s = s.replace(a, "\n")
            n += len(s)
            if n > mb * 1e6:
                return
            yield s
    t.train_from_iterator(some(), trainers.BpeTrainer(vocab_size=VOCAB, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False))
    assert t.get_vocab_size() == VOCAB
    t.add_tokens([AddedToken(s, special=sp, normalized=False) for s, sp in ADDED])
    return t


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("corpus")
    ap.add_argument("out")
    ap.add_argument("--deadline", type=float, default=300)
    ap.add_argument("--steps", type=int, default=1 << 30)
    ap.add_argument("--batch", type=int, default=256)
    a = ap.parse_args()
    os.makedirs(a.out, exist_ok=True)
    t0 = time.time()
    tok = bpe(a.corpus, 40)
    tok.save(os.path.join(a.out, "tokenizer.json"))
    ids, start, docs = [], [], []
    n = 0

    def flush():
        nonlocal n
        for e in tok.encode_batch_fast(docs, add_special_tokens=False):
            start.append(n)
            ids.append(np.array(e.ids, np.int32))
            n += len(e.ids)
        docs.clear()
    for s in texts(a.corpus):
        docs.append(s)
        if len(docs) == 20000:
            flush()
    flush()
    dev = "cuda" if torch.cuda.is_available() else "cpu"
    ids = torch.from_numpy(np.concatenate(ids)).to(dev)
    start = torch.tensor([s for s in start if s + LEN < n], device=dev)
    print("tokens", n, "documents", len(start), "%.0fs" % (time.time() - t0), flush=True)

    torch.manual_seed(1)
    torch.backends.cuda.matmul.allow_tf32 = True
    c = Qwen3Config(**CONFIG, rope_parameters={"rope_type": "default", "rope_theta": 1e6}, bos_token_id=None, eos_token_id=VOCAB + 2, attention_bias=False)
    m = Qwen3ForCausalLM(c).to(dev)
    print("parameters", sum(p.numel() for p in m.parameters()), flush=True)
    mats = [p for p in m.parameters() if p.ndim == 2]
    opt = torch.optim.AdamW([{"params": mats, "weight_decay": .05}, {"params": [p for p in m.parameters() if p.ndim < 2], "weight_decay": 0.}],
                            lr=4e-3, betas=(.9, .98), fused=dev == "cuda")
    ar = torch.arange(LEN + 1, device=dev)
    t0, step, done, ema = time.time(), 0, 0., 0.
    while done < 1:
        done = min(1., max((time.time() - t0) / a.deadline, step / a.steps))
        lr = 4e-3 * min(1., step / 300) * (.5 + .5 * math.cos(math.pi * done))
        for g in opt.param_groups:
            g["lr"] = lr
        x = ids[start[torch.randint(len(start), (a.batch,), device=dev)][:, None] + ar].long()
        with torch.autocast(dev, torch.bfloat16):
            h = m.model(input_ids=x[:, :-1], use_cache=False).last_hidden_state
            lg = m.lm_head(h)
        loss = torch.nn.functional.cross_entropy(lg.float().flatten(0, 1), x[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(m.parameters(), 1.)
        opt.step()
        opt.zero_grad(set_to_none=True)
        step += 1
        if step % 500 == 0 or step == 1:
            print("step %d loss %.4f lr %.1e %.0fs" % (step, loss.item(), lr, time.time() - t0), flush=True)
    print("steps", step, "tokens", step * a.batch * LEN, "loss %.4f" % loss.item(), flush=True)
    m = m.to(torch.bfloat16).eval()
    m.save_pretrained(a.out)

    m = m.float()                                      # the stored weights, computed in float32
    out = {"encode": [], "continue": []}
    strings = ["", " ", "\n", "a\r\n\r\nb  c", "Tabs\tand\r\nlines\u00a0end ", "don't I'LL we'Ve it'S", "汉字abc漢字 123456 ١٢٣", "🙂🚀👩\u200d💻", "e\u0301 ＡＢＣ 한국어 हिन्दी", "  x   y  \n \n z",
               "The capital of France is Paris.\n", "def fibonacci(n):\n    return n\n", "!!\n\n'l 'll", "\u1e9b\u0323 \u212b", "a\u2028b\u0085c\u001cd", "<|im_start|>user\nHi<|im_end|>\n<think>\n\n</think>\n\n"]
    for s in strings:
        out["encode"].append([s, tok.encode(s, add_special_tokens=False).ids])
    for s in ["The capital of France is", "Once upon a time,", "中国的首都是", "<|im_start|>user\nHello, who are you?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
              f"<|im_start|>system\n{EFFORT % 'max'}<|im_end|>\n<|im_start|>user\nWhat is the capital of Japan?<|im_end|>\n<|im_start|>assistant\n<think>\n"]:
        p = tok.encode(s, add_special_tokens=False).ids
        x = torch.tensor([p], device=dev)
        with torch.no_grad():
            row = m(input_ids=x).logits[0, -1].float().cpu().tolist()
            for _ in range(48):
                k = m(input_ids=x).logits[0, -1].argmax()
                x = torch.cat([x, k.view(1, 1)], 1)
        g = x[0, len(p):].tolist()
        out["continue"].append({"prompt": s, "ids": p, "greedy": g, "logits": row})
        print(repr(tok.decode(g, skip_special_tokens=False)), flush=True)
    json.dump(out, open(os.path.join(a.out, "check.json"), "w", encoding="utf-8"), ensure_ascii=False)


main()

# -*- coding: utf-8 -*-
"""Golden vectors of K3-nano from the numpy float32 oracle; a second set of prompts on request.

  golden_nano.py MODEL_DIR GOLDEN_DIR [MORE_DIR]
"""
import json, os, sys
import numpy as np
D = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(D, "../tokenizer"))
sys.path.insert(0, os.path.join(D, "../../oracle"))
import oracle
from k3tok import Tok, encode_chat
MODEL = sys.argv[1]
t = Tok(MODEL)
o = oracle.K3(MODEL, np.float32)
o64 = oracle.K3(MODEL, np.float64)
N = 64
U = lambda s: {"role": "user", "content": s}
A = lambda s, r=None: {"role": "assistant", "content": s, **({"reasoning": r} if r else {})}
S = lambda s: {"role": "system", "content": s}
LONG = ("Remember this word: lamp. The capital of Italy is Rome. The Colosseum is located in Rome. Mars is the fourth planet from the Sun. "
        "The chemical symbol of gold is Au. The opposite of hot is cold. A cow eats grass. The month after May is June. The capital of Kenya is Nairobi. "
        "Titan is the largest moon of Saturn. There are 60 seconds in a minute. In French, water is eau. The color of snow is white. Leo Tolstoy wrote War and Peace. "
        "The capital of Peru is Lima. The largest ocean on Earth is the Pacific Ocean. Jupiter is a gas giant. The atomic number of iron is 26. The day after Monday is Tuesday. "
        "The opposite of big is small. A triangle has three sides. The capital of Norway is Oslo. A spider has eight legs. In Spanish, book is libro. After summer comes autumn. "
        "The heart pumps blood through the body. The capital of Egypt is Cairo. Water boils at one hundred degrees Celsius. The chemical symbol of oxygen is O. "
        "If you mix red and yellow, you get orange. The capital of Japan is Tokyo. The fastest land animal is the cheetah.\nWhat was the word?")
STORY = ("Once upon a time, there was a brave fox named Ruby. Ruby lived in the forest. She liked to eat berries. One day, Ruby found a golden key under a bridge. "
         "\"Whose key is this?\" asked Ruby. Ruby walked along the path and met a shy owl named Theo.")
WEATHER = {"type": "function", "function": {"name": "get_weather", "description": "Get the weather of a city.",
                                            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}
GOLD = [
    ("france", "raw", "The capital of France is"), ("one-token", "raw", "The"), ("planet", "raw", "The largest planet in our solar system is"),
    ("saturn", "raw", "The three largest moons of Saturn are"), ("finance", "raw", "The three main financial statements are"),
    ("zh-capital", "raw", "中国的首都是"), ("fibonacci", "raw", "def fibonacci(n):\n"), ("story", "raw", "Once upon a time,"),
    ("chat-think", "chat", dict(messages=[U("What is the capital of Japan?")], thinking=True, effort="max")),
    ("chat-plain", "chat", dict(messages=[U("Hello, who are you?")], thinking=False)),
    ("chat-zh-multi", "chat", dict(messages=[S("你是一个有用的助手。"), U("法国的首都是哪里？"), A("法国的首都是巴黎。"), U("请讲一个短故事。")], thinking=False)),
    ("chat-multi-think", "chat", dict(messages=[U("My name is Clara."), A("Nice to meet you, Clara! How can I help you?", "The user is called Clara."), U("What is the opposite of big?"),
                                                A("The opposite of big is small.", "The user asks for the opposite of big. The answer is small."), U("What is my name?")], thinking=True, effort="max")),
    ("long-recall", "raw", LONG),
    ("chat-long", "chat", dict(messages=[U("My name is Oscar."), A("Nice to meet you, Oscar! How can I help you?", "The user is called Oscar."),
                                         U("Tell me about France."), A("France is a country in Europe. Its capital is Paris. Many people in France speak French, and the currency is the euro. The Eiffel Tower is located in Paris.", "The user wants facts about France. The capital is Paris."),
                                         U("List the planets."), A("1. Mercury\n2. Venus\n3. Earth\n4. Mars\n5. Jupiter\n6. Saturn\n7. Uranus\n8. Neptune", "The user wants the planets in order."),
                                         U("What is 9 * 7?"), A("9 * 7 = 63.", "The user asks for 9 * 7. The answer is 63."),
                                         U("中国的首都是哪里？"), A("中国的首都是北京。", "用户问的是中国的首都。答案是北京。"),
                                         U("What is my name?")], thinking=True, effort="max")),
    ("chat-tool", "chat", dict(messages=[U("What is the weather in Paris?")], thinking=True, effort="max", tools=[WEATHER])),
]
MORE = [
    ("kenya", "raw", "The capital of Kenya is"), ("zh-story", "raw", "从前，有一只"), ("go-main", "raw", "package main\n\nimport \"fmt\"\n"), ("story-long", "raw", STORY),
    ("chat-moe", "chat", dict(messages=[U("Explain a mixture of experts.")], thinking=True, effort="high")),
    ("chat-emoji", "chat", dict(messages=[S("You are a helpful assistant."), U("Thank you"), A("You are welcome! 🙂"), U("Write a short poem about the sea.")], thinking=False)),
    ("chat-tool-result", "chat", dict(messages=[U("What is 31 plus 46?"), {"role": "assistant", "content": "", "reasoning": "The user wants to add 31 and 46. I should call add.",
                                                                             "tool_calls": [{"function": {"name": "add", "arguments": {"a": 31, "b": 46}}}]},
                                                  {"role": "tool", "tool": "add", "content": "{\"result\": 77}"}], thinking=True, effort="max",
                                        tools=[{"type": "function", "function": {"name": "add", "description": "Add two numbers.", "parameters": {
                                            "type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}, "required": ["a", "b"]}}}])),
]


def run(sets, out, nlogit, nroute):
    os.makedirs(out, exist_ok=True)
    idx = []
    for name, kind, x in sets:
        ids = t.encode(x) if kind == "raw" else encode_chat(t, **x)
        lg, st = o.forward(ids)
        lg64, st64 = o64.forward(ids)
        row, row64 = lg[-1], lg64[-1]
        first, dmax = row.copy(), float(np.abs(lg - lg64).max())
        toks, marg, top2, val, agree, stop = [], [], [], [], True, False
        for _ in range(N):
            k = int(row.argmax())
            s = np.argsort(-row, kind="stable")[:2]
            toks.append(k)
            val.append(float(row[k]))
            marg.append(float(row[s[0]] - row[s[1]]))
            top2.append(int(s[1]))
            agree &= int(row64.argmax()) == k
            if k == t.end_of_msg:
                stop = True
                break
            lg, st = o.forward([k], st)
            lg64, st64 = o64.forward([k], st64)
            row, row64 = lg[-1], lg64[-1]
            dmax = max(dmax, float(np.abs(row - row64).max()))
        d = dict(name=name, kind=kind, prompt=x, prompt_ids=ids, prompt_len=len(ids), greedy=toks, text=t.decode(toks), stopped=stop, stop_token=t.end_of_msg,
                 top_logit=val, margin=marg, second=top2, min_margin=min(marg), f64_greedy_agrees=bool(agree), max_logit_diff_f32_f64=dmax)
        if name in nlogit:
            first.astype("<f4").tofile(os.path.join(out, name + ".logits.f32"))
            d["logits_file"] = name + ".logits.f32"
            d["logits_shape"] = [int(first.size)]
        if name in nroute:
            tr = []
            o.forward(ids, trace=tr)
            d["routes"] = [dict(layer=i, ids=r["ids"].tolist(), weights=[[float(v) for v in w] for w in r["wt"]], margin=[float(v) for v in r["margin"]])
                           for i, r in enumerate(tr[:-1]) if "ids" in r]
            d["stream_norms_last"] = [float(np.linalg.norm(r["stream"][-1])) for r in tr[:-1]]
            d["min_route_margin"] = min(min(r["margin"]) for r in d["routes"])
        json.dump(d, open(os.path.join(out, name + ".json"), "w", encoding="utf-8"), ensure_ascii=False)
        idx.append(dict(name=name, kind=kind, prompt_len=len(ids), n=len(toks), stopped=stop, min_margin=min(marg), f64_greedy_agrees=bool(agree), max_logit_diff_f32_f64=dmax))
        print(name, len(ids), "min margin %.4f f64 diff %.1e" % (min(marg), dmax), agree, repr(d["text"]), flush=True)
    json.dump(idx, open(os.path.join(out, "index.json"), "w"), indent=1)


run(GOLD, sys.argv[2], {"france", "zh-capital", "chat-think"}, {"france", "chat-plain"})
if len(sys.argv) > 3:
    run(MORE, sys.argv[3], {"kenya", "story-long", "chat-moe"}, {"kenya", "chat-moe"})

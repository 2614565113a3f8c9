# -*- coding: utf-8 -*-
"""Train K3-nano on one GPU.   train.py --data tokens.npz --out DIR --deadline 556 [--selftest]"""
import argparse
import bisect
import json
import math
import os
import sys
import threading
import time

T0 = time.time()
import numpy as np
import torch

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import nano

ap = argparse.ArgumentParser()
ap.add_argument("--data", required=True)
ap.add_argument("--out", required=True)
ap.add_argument("--deadline", type=float, default=555, help="seconds after the start of the program")
ap.add_argument("--batch", type=int, default=64)
ap.add_argument("--lr", type=float, default=2.2e-3)
ap.add_argument("--qat_at", type=float, default=.35)
ap.add_argument("--selftest", action="store_true")
ap.add_argument("--seed", type=int, default=7)
a = ap.parse_args()
T = 1024
dev = "cuda"
os.makedirs(a.out, exist_ok=True)
LOG = open(os.path.join(a.out, "log.txt"), "a")


def log(*x):
    s = f"[{time.time()-T0:7.1f}] " + " ".join(str(v) for v in x)
    print(s, flush=True)
    LOG.write(s + "\n")
    LOG.flush()


def load():
    z = np.load(a.data)
    tok, lens = z["tok"], z["lens"].astype(np.int64)
    return tok, lens


tok, lens = load()
log("data", len(tok), "docs", len(lens))
off = np.concatenate([[0], np.cumsum(lens)])
NV = 3000


def pack(sel, seed, width=T + 1):
    """Rows of `width` tokens; each row begins at a document start, the last document of a row may be cut."""
    rng = np.random.default_rng(seed)
    perm = sel[rng.permutation(len(sel))]
    ln = lens[perm]
    cs = np.concatenate([[0], np.cumsum(ln)])
    idx = np.repeat(off[perm] - cs[:-1], ln) + np.arange(cs[-1])
    st = tok[idx]
    c = cs.tolist()
    starts, d, n = [], 0, len(perm)
    while c[d] + width <= c[n]:
        starts.append(c[d])
        e = bisect.bisect_right(c, c[d] + width) - 1
        d = e if e > d else d + 1
    s = np.array(starts)
    rows = st[s[:, None] + np.arange(width)]
    rng.shuffle(rows)
    return rows


ALL = np.arange(len(lens))
rs = np.random.default_rng(99).permutation(ALL)
VAL, TRAIN = rs[:NV], rs[NV:]


class Feeder:
    def __init__(self):
        self.e = 0
        self.next = None
        self.th = None
        self.start()

    def start(self):
        e = self.e
        self.e += 1

        def f():
            self.next = pack(TRAIN if e else TRAIN[:len(TRAIN) // 6], 1000 + e)
        self.th = threading.Thread(target=f)
        self.th.start()

    def get(self):
        self.th.join()
        r = torch.from_numpy(self.next.astype(np.int16)).pin_memory().to(dev, non_blocking=True)
        self.start()
        return r


feed = Feeder()
val = torch.from_numpy(pack(VAL, 5).astype(np.int64)).to(dev)
torch.backends.cuda.matmul.allow_tf32 = False
torch.manual_seed(0)
m = nano.Nano(a.seed).to(dev)
log("params", sum(p.numel() for p in m.p.values()))

if True:
    # Triton scan against the torch form
    BH, N, C, K = 6, 8, 16, 64
    xs = [torch.randn(BH, N, C, K, device=dev) * s for s in (.08, 1, .08)] + [torch.rand(BH, N, K, device=dev)]
    res = []
    for f in (nano.scan, nano.scan_torch):
        ys = [x.clone().requires_grad_(True) for x in xs]
        S, V = f(*ys)
        (S.sin().sum() + (V * 1.3).cos().sum()).backward()
        res.append([S, V] + [y.grad for y in ys])
    err = [((p-q).norm()/q.norm()).item() for p, q in zip(*res)]
    log("scan rel err", [f"{e:.1e}" for e in err])
    if not max(err) < 1e-2:
        nano.PREC[0] = "ieee"
        log("scan falls back to ieee")
if a.selftest:
    # eager float32 against compiled bf16
    ids = torch.from_numpy(feed.next[:8].astype(np.int64)).to(dev) if feed.next is not None else val[:8]
    nano.DT = torch.float32
    l0, c0 = m.loss(ids)
    l0.backward()
    g0 = {n: p.grad.clone() for n, p in m.p.items() if p.grad is not None}
    m.zero_grad()
    nano.DT = torch.bfloat16
    l1, c1 = m.loss(ids)
    l1.backward()
    bad = {n: round(((p.grad - g0[n]).norm() / (g0[n].norm() + 1e-12)).item(), 3) for n, p in m.p.items() if p.grad is not None}
    log("loss f32", l0.item(), "bf16", l1.item(), "worst grads", sorted(bad.items(), key=lambda kv: -kv[1])[:6])
    m.zero_grad()

torch._dynamo.config.recompile_limit = 64
m.compile()
mats, vecs, embs = [], [], []
for n, p in m.p.items():
    (embs if n in ("emb", "head") else mats if p.dim() >= 2 and not n.endswith(("_cq", "_ck", "_cv")) else vecs).append(p)
opt = torch.optim.AdamW([dict(params=mats, weight_decay=.1), dict(params=embs, weight_decay=.01), dict(params=vecs, weight_decay=0.)],
                        lr=a.lr, betas=(.9, .97), eps=1e-10, fused=True)


def step(seq):
    loss, cnt = m.loss(seq)
    loss.backward()
    gn = torch.nn.utils.clip_grad_norm_(m.p.values(), 1.0)
    opt.step()
    opt.zero_grad(set_to_none=True)
    return loss.detach(), cnt, gn


def evaluate():
    q = m.qat
    m.qat = True
    ls = [m.loss(val[i:i + a.batch])[0].detach() for i in range(0, len(val) - a.batch + 1, a.batch)]
    m.qat = q
    return torch.stack(ls).mean().item()


def lr_at(pr):
    return a.lr * (.02 + .98 * .5 * (1 + math.cos(math.pi * min(1, pr))))


rows = feed.get()
pos = 0
epoch = 0
it = 0
t_start = None
acc = torch.zeros((), device=dev)
hist = []
last_save = time.time()
tt = time.time()
log("val rows", len(val), "train rows", len(rows))
while True:
    now = time.time()
    if t_start is None and it >= 3:
        torch.cuda.synchronize()
        t_start = time.time()
        log("compiled")
        now = t_start
    pr = 0 if t_start is None else (now - t_start) / (T0 + a.deadline - t_start)
    if pr >= 1:
        break
    if pos + a.batch > len(rows):
        rows = feed.get()
        pos = 0
        epoch += 1
    seq = rows[pos:pos + a.batch].long()
    pos += a.batch
    lr = lr_at(pr) * min(1, (it + 1) / 200)
    for g in opt.param_groups:
        g["lr"] = lr
    if pr > a.qat_at and not m.qat:
        m.qat = True
        log("QAT on")
    loss, cnt, gn = step(seq)
    acc += loss
    if pr < .93:
        m.rb += (2e-3 if pr < .5 else 5e-4) * torch.sign(cnt.mean(1, keepdim=True) - cnt)
    it += 1
    if it % 100 == 0:
        v = acc.item() / 100
        acc.zero_()
        dt = (time.time() - tt) / 100
        tt = time.time()
        load = (cnt / cnt.mean(1, keepdim=True))
        log(f"it {it} ep {epoch} loss {v:.4f} gn {gn.item():.3f} lr {lr:.2e} {dt*1e3:.1f} ms/it {a.batch*T/dt/1e3:.0f} ktok/s load max {load.max().item():.2f} min {load.min().item():.2f}")
        hist.append((it, v))
        if not math.isfinite(v):
            log("NOT FINITE")
            sys.exit(1)
    if a.selftest and it == 60:
        from torch.profiler import profile, ProfilerActivity
        with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as prof:
            for j in range(2):
                step(seq)
            torch.cuda.synchronize()
        tab = prof.key_averages().table(sort_by="self_cuda_time_total", row_limit=45, max_name_column_width=70)
        open(os.path.join(a.out, "profile.txt"), "w").write(tab)
        tt = time.time()
    if time.time() - last_save > 240 and not a.selftest:
        nano.export(m, os.path.join(a.out, "ckpt"))
        last_save = time.time()
        tt = time.time()

m.qat = True
log("steps", it, "tokens", it * a.batch * T, "epochs", epoch, "train loss", hist[-1] if hist else None, "val loss", evaluate())
log("peak mem GB", torch.cuda.max_memory_allocated() / 2 ** 30)
total = nano.export(m, os.path.join(a.out, "model"))
# numeric check of the export: torch bf16 logits on one validation row, kept for comparison
m.eager()
with torch.no_grad():
    ids = val[0, :512]
    lg = m.logits(ids[None])[0].float().cpu().numpy()
np.savez_compressed(os.path.join(a.out, "check.npz"), ids=ids.cpu().numpy(), top=lg.argmax(-1), last=lg[-1])
json.dump(dict(hist=hist, steps=it, tokens=it * a.batch * T), open(os.path.join(a.out, "hist.json"), "w"))
log("exported", total)

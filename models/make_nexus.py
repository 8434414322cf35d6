"""Trains kvcomp-tiny/nexus.safetensors: the Nexus adapter of SONIC (arXiv 2601.21927) for the shipped model, which stays frozen.

    python make_nexus.py train [DIR] [ABLATION] [STEPS]   -> DIR/nexus.pt every few minutes; resumes from it
    python make_nexus.py export [DIR]              -> kvcomp-tiny/nexus.safetensors
    python make_nexus.py eval [DIR]                held-out dialogues through the adapter, by K: exact replies

The teacher is the base on the plain chat. The student is the base on the augmented chat (Eq. 1), where a message behind its Nexus tokens can
only be read through them (Eq. 4). With the mask of kvcomp's incremental mode, rows of one message never depend on later ones, so that
*every* reply of a chat can be supervised in one pass: its rows stand in the batch once more as "current turn" (the copies below), where
they see the system message, the Nexus tokens of all finished turns, and the user's message of their own turn, just as in a live chat.

Losses of the paper (Eq. 6-12, its weights): KD, H, AKD, Reg, Recon, all on reply rows. Ours, because the paper's alone teach recall slowly: cross entropy
on the replies, the residual stream of every layer, and the attention that a reply row gives to each message, summed over it.
ABLATION: any of noreg, norecon, noakd, noh, fixed (K = 16 always), paper (none of ours), joined by commas.
"""
import math, os, random, sys, time
import numpy as np, torch, torch.nn as nn, torch.nn.functional as F
import data_gen, make_model as M

K_MAX, T_MAX, KS, K_DEFAULT, SINK = 64, 32, (4, 8, 16, 32, 64), 8, 4
TAU, GAMMA, BETA = 3.0, 0.1, 0.1                                            # Eq. 6, 9, 11
KD, HIDDEN, AKD, REG, RECON = 1.0, 0.5, 0.5, 0.5, 1.0                        # Eq. 12
CE, LAYER, ROUTE = 1.0, 1.0, 0.2                                             # ours
ROWS, LR = 1400, 0.003                                                       # augmented rows a batch and worker
APART = {"profile": 12, "unknown": 2, "people": 26, "coref": 10, "needle": 12, "multi_needle": 14, "multi_value": 8, "key_values": 10, "status": 10, "lists": 12,
         "chain": 16, "sums": 8, "classify": 6, "summary": 3, "constraint": 2, "story": 4}   # what must pass through Nexus tokens
CROWDED = {**APART, "people": 16, "crowd": 50}, (100, 160, 240, 300, 360), (0.2, 0.2, 0.3, 0.5, 2, 4, 4, 4, 8, 8, 16, 32, 64)
PHASES = (  # steps, shares of the tasks (None: as for the base), lengths of the chats, what K is drawn from (below 1: that share of each message)
    (2500, None, (64, 100, 160, 240, 360), KS),
    (5000, APART, (100, 160, 240, 240, 360), (4, 4, 4, 8, 8, 16, 32, 64)),
    (5000, *CROWDED),
    (1500, *CROWDED))                                                       # on a base that was trained on since
STEPS = sum(p[0] for p in PHASES)
# What the file says of its training: K per message, or shares of each message; phases; losses with their weights.
K_TRAINED = ",".join("%d" % k for k in sorted({k for p in PHASES for k in p[3] if k >= 1}))
TRAINED = {"shares_trained": ",".join("%g" % k for k in sorted({k for p in PHASES for k in p[3] if k < 1})),
           "steps_trained": ",".join(str(p[0]) for p in PHASES), "tokens_a_chat": "64 to 360",
           "phases": "1: the base's own mixture of chats; 2: more of what must pass through Nexus tokens; 3: also crowd, shares of each message; 4: as 3, on the base as shipped (1 to 3: the base before it)",
           "losses": "kd %g, hidden %g, akd %g, reg %g, recon %g (the paper's); cross entropy on replies %g, residual stream of every layer %g, attention a message %g (ours)"
                     % (KD, HIDDEN, AKD, REG, RECON, CE, LAYER, ROUTE), "tau_gamma_beta": "%g, %g, %g" % (TAU, GAMMA, BETA)}

# -------------------------------------------------------------------------------------------------------------- examples
def example(r, chat, K, turn0):
    """One chat -> rows of the student. kind: 0 system, 1 body, 2 reply copy, 3 Nexus; seg: message number, -1 for the system's."""
    ids, w, starts, has_system = chat
    pos, ends = M.positions(r, len(ids), starts), list(starts[1:]) + [len(ids)]
    messages = list(zip(starts, ends))
    sys_end = max(messages.pop(0)[1] if has_system else 0, SINK)
    text = [(ids[x], pos[x], 0, -1, x, 0) for x in range(sys_end)]           # (id, position, kind, seg, index in the chat, turn)
    copies, nexus = [], []
    for s, (a, b) in enumerate(messages):
        a = max(a, sys_end)
        if s < len(messages) - 1: text += [(ids[x], pos[x], 1, s, x, 0) for x in range(a, b)]
        if s % 2: copies += [(ids[x], pos[x], 2, s, x, 0) for x in range(a, b - 2)]  # predicts up to the reply's <|im_end|>
        if s < len(messages) - 2: nexus += [(j, pos[b - 1] + 1 + j, 3, s, b - 1, turn0 + s // 2) for j in range(max(1, min(K if K >= 1 else int(K * (b - a) + 0.5), b - a, K_MAX)))]
    return ids, w, pos, text, copies, nexus

def visible(kind, seg, at):
    """mask[i, j]: may row i see row j? (rows,) each; `at` is the index in the chat."""
    k, s, x = kind[:, None], seg[:, None], at[:, None]
    K, S, X = kind[None], seg[None], at[None]
    body = np.where(k == 2, s - 1, s)                                        # the body a row sees raw: its own, a copy its user's
    see = (K == 0) & ((k > 0) | (X <= x)) | (K == 1) & (S == body) & ((k != 1) | (X <= x)) | (K == 2) & (k == 2) & (S == s) & (X <= x)
    see |= (K == 3) & np.where(k == 3, S <= s, S < body) & (k > 0)
    return see & (K >= 0) | np.eye(len(kind), dtype=bool)

def collate(examples):
    """Rows of several chats -> tensors, each kind of row padded to the longest: [text | copies | Nexus]."""
    B = len(examples)
    Tt, Tc, Tn = (max(max(len(e[i]) for e in examples), 1) for i in (3, 4, 5))
    n, R = max(len(e[0]) for e in examples), Tt + Tc + Tn
    rows = np.zeros((B, R, 6), np.int64); rows[:, :, 2] = -1; rows[:, :, 3] = -2
    ids, pos, mask = np.zeros((B, n), np.int64), np.zeros((B, n), np.int64), np.zeros((B, R, R), bool)
    part = np.zeros((B, n), np.int64); y, w = np.zeros((B, Tc), np.int64), np.zeros((B, Tc), np.float32)
    for b, (x, u, p, text, copies, nexus) in enumerate(examples):
        ids[b, :len(x)], pos[b, :len(x)] = x, p
        for first, part_rows in ((0, text), (Tt, copies), (Tt + Tc, nexus)):
            if part_rows: rows[b, first:first + len(part_rows)] = part_rows
        for t in text: part[b, t[4]] = t[3] + 1
        if text[-1][4] + 1 < len(x): part[b, text[-1][4] + 1:len(x)] = text[-1][3] + 2
        for i, c in enumerate(copies): y[b, i], w[b, i] = x[c[4] + 1], u[c[4] + 1]
        mask[b] = visible(rows[b, :, 2], rows[b, :, 3], rows[b, :, 4])
    to = torch.from_numpy
    return dict(rows=to(rows), ids=to(ids), pos=to(pos), mask=to(mask), part=to(part), y=to(y), w=to(w), Tt=Tt, Tc=Tc, Tn=Tn)

def batches(seed, phase, fixed):
    from tokenizers import Tokenizer
    tok = Tokenizer.from_file(os.path.join(M.OUT, "tokenizer.json"))
    r, pace = random.Random(seed), random.Random(seed // 2); np.random.seed(seed % 2 ** 32)
    _, shares, lengths, ks = PHASES[phase]
    while True:
        chats = [data_gen.make_chat(r, r.choice(lengths), apart=shares) for _ in range(120)]
        coded = [(*x, bool(c[0])) for x, c in zip(M.encode(tok, chats), chats) if len(c[1]) > 1 and len(x[0]) < 560]
        K = 16 if fixed else r.choice(ks)                                   # (13)
        rows = [example(r, c, K, r.randrange(T_MAX - 1)) for c in coded]
        rows = [e for e in rows if max((t[5] for t in e[5]), default=0) < T_MAX]
        rows.sort(key=lambda e: sum(map(len, e[3:])))
        group, out = [], []
        for e in rows:
            if group and (len(group) + 1) * sum(map(len, e[3:])) > ROWS: out.append(group); group = []
            group.append(e)
        while out: yield collate(out.pop(int(pace.random() * len(out))))

# --------------------------------------------------------------------------------------------------------------- student
class Nexus(nn.Module):
    """The branch: a copy of the base's matrices to start with, and the three embeddings of Eq. 2."""
    def __init__(self, base):
        super().__init__()
        self.blocks = nn.ModuleList(M.Block() for _ in base.blocks)
        for mine, theirs in zip(self.blocks, base.blocks): mine.load_state_dict(theirs.state_dict()); mine.norm1.requires_grad = mine.norm2.requires_grad = False
        std = float(base.embed.std())
        self.base = nn.Parameter(base.embed.detach().mean(0).clone())
        self.pos = nn.Parameter(torch.randn(K_MAX, M.D) * std)
        self.turn = nn.Parameter(torch.randn(T_MAX, M.D) * std * 0.3)
    matrices = M.Llama.matrices

def rope(x, cos, sin):
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin

def angles(pos):
    a = pos[..., None].float() * M.THETA ** (-torch.arange(0, M.HD, 2) / M.HD)
    return tuple(torch.cat((f, f), -1)[:, None].bfloat16() for f in (a.cos(), a.sin()))

def project(block, x, norm):
    B, T, _ = x.shape
    return F.linear(F.rms_norm(x, (M.D,), norm, M.EPS), block.qkv).view(B, T, M.HEADS + 2 * M.KV, M.HD).transpose(1, 2)

def finish(block, x, y, norm):
    """Output matrix and feed-forward of one weight set. y (B,T,H*HD)."""
    x = x + F.linear(y, block.o)
    gate, up = F.linear(F.rms_norm(x, (M.D,), norm, M.EPS), block.gate_up).chunk(2, -1)
    return x + F.linear(F.silu(gate) * up, block.down)

def attend(qkv, cos, sin, mask):
    """-> (B,T,H*HD) and the weights (B,H,T,T)."""
    q, k, v = qkv.split([M.HEADS, M.KV, M.KV], 1)
    q, k = rope(q, cos, sin), rope(k, cos, sin)
    (B, H, T, D), G = q.shape, M.HEADS // M.KV
    s = (q.reshape(B, M.KV, G * T, D) @ k.mT).view(B, M.KV, G, T, T).float() * D ** -0.5
    p = torch.softmax(s.masked_fill(~mask[:, None, None], -math.inf), -1)
    y = (p.to(v.dtype).view(B, M.KV, G * T, T) @ v).view(B, H, T, D)
    return y.transpose(1, 2).reshape(B, T, H * D), p.view(B, H, T, T)

def shares(p, label, n):
    """Attention summed over the columns of each message. p (B,H,R,T), label (B,T) in 0..n-1 -> (B,H,R,n)."""
    return p @ F.one_hot(label, n).to(p.dtype)[:, None]

def pick(x, at):
    """Rows `at` (B,C) of x (B,T,..)."""
    return x.gather(1, at[..., None].expand(-1, -1, x.shape[-1]))

@torch.no_grad()
def teach(base, b, n):
    """The teacher at the reply rows: residual of every layer [(B,C,D)], attention shares [(B,H,C,n)], last layer's mass on history (B,C)."""
    ids, at = b["ids"], b["rows"][:, b["Tt"]:b["Tt"] + b["Tc"], 4]
    own = b["rows"][:, b["Tt"]:b["Tt"] + b["Tc"], 3]
    cos, sin = angles(b["pos"])
    mask = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()[None]
    x, res, routes = F.embedding(ids, base.embed), [], []
    for block in base.blocks:
        y, p = attend(project(block, x, block.norm1), cos, sin, mask)
        x = finish(block, x, y, block.norm2)
        res.append(pick(x, at))
        routes.append(shares(p.gather(2, at[:, None, :, None].expand(-1, p.shape[1], -1, p.shape[3])), b["part"], n))
    history = (torch.arange(n)[None, None] >= 1) & (torch.arange(n)[None, None] < own[..., None])    # messages before this turn's
    return res, routes, (routes[-1].mean(1) * history).sum(-1)

def student(base, nexus, b, n):
    """-> residuals and shares at the reply rows as above; A_nexus (of Eq. 9); final hidden of body and Nexus rows."""
    Tt, Tc, Tn, rows = b["Tt"], b["Tc"], b["Tn"], b["rows"]
    T = Tt + Tc
    x = F.embedding(rows[:, :T, 0], base.embed)
    z = nexus.base + nexus.pos[rows[:, T:, 0].clamp(0, K_MAX - 1)] + nexus.turn[rows[:, T:, 5]]          # Eq. 2
    cos, sin = angles(rows[:, :, 1])
    label, real = (rows[:, :, 3] + 1).clamp(min=0), (rows[:, Tt:T, 2] == 2)
    res, routes, mass = [], [], 0
    for block, mine in zip(base.blocks, nexus.blocks):
        y, p = attend(torch.cat((project(block, x, block.norm1), project(mine, z, block.norm1)), 2), cos, sin, b["mask"])
        x, z = finish(block, x, y[:, :T], block.norm2), finish(mine, z, y[:, T:], block.norm2)
        res.append(x[:, Tt:]); routes.append(shares(p[:, :, Tt:T], label, n))
        mass = mass + (p[:, :, Tt:T, T:].sum(-1).mean(1) * real).sum() / real.sum() / len(base.blocks)
    return res, routes, mass, F.rms_norm(x[:, :Tt], (M.D,), base.norm, M.EPS), F.rms_norm(z, (M.D,), base.norm, M.EPS)

# ---------------------------------------------------------------------------------------------------------------- losses
def recon(b, h, z):
    """Eq. 10 and 11: Nexus token j stands for the j-th of K_i equal pieces of its body. h (B,Tt,D) body rows, z (B,Tn,D)."""
    Tt, T, rows = b["Tt"], b["Tt"] + b["Tc"], b["rows"]
    total, count = 0.0, 0
    for k in range(rows.shape[0]):
        seg_t, nex = rows[k, :Tt, 3], rows[k, T:]
        nex = nex[nex[:, 2] == 3]
        if not len(nex): continue
        own = seg_t[None] == nex[:, 3, None]
        first, size = own.int().argmax(1), own.sum(1)
        K = (nex[None, :, 3] == nex[:, 3, None]).sum(1)
        lo, hi = first + nex[:, 0] * size // K, first + (nex[:, 0] + 1) * size // K
        i = torch.arange(Tt)[None]
        inside = (i >= lo[:, None]) & (i < hi[:, None]) & (rows[k, :Tt, 2] == 1)[None]
        zn, hn = F.normalize(z[k, :len(nex)].float(), dim=-1), F.normalize(h[k].float().detach(), dim=-1)
        a = torch.softmax((zn @ hn.T).masked_fill(~inside, -1e9), -1)
        target = F.normalize(a.detach() @ h[k].float().detach(), dim=-1)
        length = inside.sum(1).clamp(min=1)
        even = -(a * (a + 1e-9).log()).sum(1) / length.clamp(min=2).log()
        total = total + (1 - (zn * target).sum(1) + BETA * torch.where(length > 1, 1 - even, 0.0)).sum(); count += len(nex)
    return total / max(1, count)

def losses(base, nexus, b, off):
    n = int(max(b["part"].max(), b["rows"][:, :, 3].max() + 1)) + 1
    res_t, route_t, history = teach(base, b, n)
    res_s, route_s, mass, h, z = student(base, nexus, b, n)
    real = b["rows"][:, b["Tt"]:b["Tt"] + b["Tc"], 2] == 2
    def final(x): return F.rms_norm(x[real], (M.D,), base.norm, M.EPS)
    hs, ht = final(res_s[-1]), final(res_t[-1])
    zs, zt = F.linear(hs, base.embed).float(), F.linear(ht, base.embed).float()
    kl = TAU ** 2 * F.kl_div(F.log_softmax(zs / TAU, -1), F.log_softmax(zt / TAU, -1), reduction="none", log_target=True).sum(-1)   # the terms of Eq. 6 and 8
    weight = history[real].float(); weight = weight / weight.mean().clamp(min=1e-6)
    out = {"kd": kl.mean()}                                                 # (6), a mean instead of a sum
    if "noh" not in off: out["h"] = (1 - F.cosine_similarity(hs.float(), ht.float(), dim=-1)).mean()    # (7)
    if "noakd" not in off: out["akd"] = (kl * weight).mean()                # (8)
    if "noreg" not in off: out["reg"] = F.relu(GAMMA - mass)                # (9)
    if "norecon" not in off: out["recon"] = recon(b, h, z)                  # (11)
    w, y = b["w"][real], b["y"][real]
    ce = F.cross_entropy(zs, y, reduction="none")
    if "paper" not in off:
        out["ce"] = (ce * w).sum() / w.sum().clamp(min=1)
        out["layer"] = sum(((s[real].float() - t[real].float()) ** 2).sum(-1).div((t[real].float() ** 2).sum(-1)).mean() for s, t in zip(res_s, res_t)) / len(res_s)
        out["route"] = sum(-(t * (s + 1e-6).log() - t * (t + 1e-6).log()).sum(-1).permute(0, 2, 1)[real].mean() for s, t in zip(route_s, route_t)) / len(route_s)
    scale = {"kd": KD, "h": HIDDEN, "akd": AKD, "reg": REG, "recon": RECON, "ce": CE, "layer": LAYER, "route": ROUTE}
    hit = (zs.argmax(-1) == y).float(); told = (zt.argmax(-1) == y).float(); answer = w >= M.ANSWER
    seen = {"A": mass, "answer": hit[answer].sum() / max(1, answer.sum()), "teacher": told[answer].sum() / max(1, answer.sum())}
    return sum(scale[k] * v for k, v in out.items()), {k: float(v.detach()) for k, v in {**out, **seen}.items()}

# -------------------------------------------------------------------------------------------------------------- training
def load_base():
    from safetensors.torch import load_file
    base = M.Llama(); base.load_state_dict(M.from_hf(load_file(os.path.join(M.OUT, "model.safetensors"))))
    for p in base.parameters(): p.requires_grad = False
    return base

def place(step, steps):
    """Step of the whole training -> step in its phase, length of the phase (the last one may be cut or stretched), its number."""
    for i, (n, *_) in enumerate(PHASES):
        last = i == len(PHASES) - 1
        if step < n or last: return step, steps if last else min(n, steps), i
        step, steps = step - n, steps - n

def train(folder, off, steps):
    os.makedirs(folder, exist_ok=True)
    meet = os.path.join(folder, "meet")
    if os.path.exists(meet): os.remove(meet)
    torch.multiprocessing.spawn(work, (folder, meet, off, steps), M.WORKERS)

def work(rank, folder, meet, off, steps):
    import torch.distributed as dist
    dist.init_process_group("gloo", init_method="file://" + meet, rank=rank, world_size=M.WORKERS)
    torch.manual_seed(7); torch.set_num_threads(1); torch.set_flush_denormal(True)
    base, path, step, spent = load_base(), os.path.join(folder, "nexus.pt"), 0, 0.0
    nexus = Nexus(base); opt = M.Muon(nexus, lr=LR, adam_lr=0.002, decay=0.0, rest=[nexus.base, nexus.pos, nexus.turn])
    if os.path.exists(path):
        s = torch.load(path, weights_only=True)
        nexus.load_state_dict(s["nexus"]); opt.load(s["opt"]); step, spent = s["at"]
    def save():
        torch.save({"nexus": nexus.state_dict(), "opt": opt.state(), "at": (step, spent)}, path + ".new"); os.replace(path + ".new", path)
    params = [p for p in nexus.parameters() if p.requires_grad]
    source, phase, parent, t0, saved, sums, last = None, -1, os.getppid(), time.time(), time.time(), {}, spent
    while step < steps and os.getppid() == parent:
        at, n, now = place(step, steps)
        if now != phase: source, phase = batches(5000 + 2 * step + rank, now, "fixed" in off), now
        b = next(source)
        with torch.autocast("cpu", torch.bfloat16): loss, seen = losses(base, nexus, b, off)
        loss.backward()
        flat = torch.cat([(p.grad if p.grad is not None else torch.zeros_like(p)).reshape(-1) for p in params])
        dist.all_reduce(flat)
        flat /= M.WORKERS
        flat *= min(1.0, 5.0 / (float(flat.norm()) + 1e-6))
        for p, g in zip(params, flat.split([p.numel() for p in params])): p.grad = g.view_as(p).clone()
        opt.step(min(1, (at + 1) / 50) * (1 if at < 0.4 * n else 0.03 + 0.97 * (n - at) / (0.6 * n)))
        step += 1; spent = last + time.time() - t0
        if rank: continue
        for k, v in seen.items(): sums[k] = sums.get(k, 0) + v / 50
        if step % 50 == 0:
            print("%5d  %s  %5.0f s  %s" % (step, "  ".join("%s %.3f" % x for x in sums.items()), spent, time.strftime("%H:%M:%S")), flush=True); sums = {}
        if time.time() - saved > 120: save(); saved = time.time()
    if rank == 0: save()

# ---------------------------------------------------------------------------------------------------- evaluation, export
@torch.no_grad()
def evaluate(folder, n=25, length=240, tasks=("profile", "people", "coref", "needle", "status", "lists", "key_values"), ks=(2, 4, 8, 16, 32, 64)):
    """Share of held-out chats whose last reply is exact, greedily (as make_model.score does): the teacher, then each K; 0 is no history at all."""
    from tokenizers import Tokenizer
    tok = Tokenizer.from_file(os.path.join(M.OUT, "tokenizer.json"))
    base = load_base(); nexus = Nexus(base); nexus.load_state_dict(torch.load(os.path.join(folder, "nexus.pt"), weights_only=True)["nexus"])
    print("| task | full | " + " | ".join("K=%d" % k for k in (0, *ks)) + " |\n|---" * 1 + "|" + "---:|" * (len(ks) + 2))
    for task in tasks:
        r, chats = random.Random("nexus " + task), []
        while len(chats) < n:
            c = data_gen.make_chat(r, int(0.85 * length), task, held=True)
            x = M.encode(tok, [c])[0]
            if len(c[1]) > 1 and len(x[0]) < 1.2 * length: chats.append((*x, bool(c[0])))
        good = {}
        for K in (0, *ks):
            for chat in chats:
                e = example(M.NoGaps(), chat, max(K, 1), 0)
                if K == 0: e = (*e[:5], [])
                b = collate([e])
                m = int(max(b["part"].max(), b["rows"][:, :, 3].max() + 1)) + 1
                last = b["rows"][0, b["Tt"]:b["Tt"] + b["Tc"], 3] == len(chat[2]) - 1 - chat[3]
                stop = int(torch.nonzero((b["w"][0] >= M.ANSWER) & last).max())
                on = last & (torch.arange(b["Tc"]) <= stop) & (b["w"][0] > 0)
                with torch.autocast("cpu", torch.bfloat16):
                    for name, res in (("full", teach(base, b, m)[0][-1]), (K, student(base, nexus, b, m)[0][-1])):
                        if name == "full" and K: continue
                        hit = F.linear(F.rms_norm(res[0], (M.D,), base.norm, M.EPS), base.embed).argmax(-1) == b["y"][0]
                        good[name] = good.get(name, 0) + int(hit[on].all())
        print("| %s | %s |" % (task, " | ".join("%.0f" % (100 * good[k] / n) for k in ("full", 0, *ks))), flush=True)

def export(folder):
    from safetensors.torch import load_file, save_file
    import json
    base = load_file(os.path.join(M.OUT, "model.safetensors")); config = json.load(open(os.path.join(M.OUT, "config.json")))
    state = torch.load(os.path.join(folder, "nexus.pt"), weights_only=True)["nexus"]
    out = {"nexus.embed.base": state["base"], "nexus.embed.pos": state["pos"], "nexus.embed.turn": state["turn"]}
    hf = M.to_hf({**state, "embed": base["model.embed_tokens.weight"], "norm": base["model.norm.weight"]})
    out.update({k.replace("model.layers", "nexus.layers"): v for k, v in hf.items() if "proj" in k})
    h = 0xcbf29ce484222325
    for t in ("model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight"):
        for byte in base[t].contiguous().view(torch.uint8).numpy().tobytes(): h = ((h ^ byte) * 0x100000001b3) & 0xffffffffffffffff
    meta = {"format": "sonic-nexus", "version": "1", "model_type": "llama", "hidden_size": M.D, "num_hidden_layers": M.LAYERS, "num_attention_heads": M.HEADS,
            "num_key_value_heads": M.KV, "head_dim": M.HD, "intermediate_size": M.FFN, "attention_bias": "false", "k_max": K_MAX, "k_default": K_DEFAULT,
            "k_trained": K_TRAINED, "t_max": T_MAX, "position_mode": "original", "train_mask": "incremental", "body": "full_message", "mlp": "dedicated",
            "chat_template": "chatml", "base_fingerprint": "%016x" % h, **TRAINED}
    assert config["num_hidden_layers"] == M.LAYERS
    path = os.path.join(M.OUT, "nexus.safetensors")
    save_file({k: v.bfloat16().contiguous() for k, v in out.items()}, path + ".new", metadata={k: str(v) for k, v in meta.items()})
    os.chmod(path + ".new", 0o644); os.replace(path + ".new", path)
    print("exported", path, os.path.getsize(path), "bytes")

if __name__ == "__main__":
    what = sys.argv[1] if len(sys.argv) > 1 else ""
    folder = sys.argv[2] if len(sys.argv) > 2 else os.path.join(M.HERE, "nexus-run")
    if what == "train": train(folder, sys.argv[3].split(",") if len(sys.argv) > 3 else [], int(sys.argv[4]) if len(sys.argv) > 4 else STEPS)
    elif what == "export": export(folder)
    elif what == "eval": evaluate(folder)
    else: sys.exit(__doc__)

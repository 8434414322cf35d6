"""Makes models/kvcomp-tiny, the model that kvcomp ships: a Llama of 3.2 million parameters, trained on two shared CPU cores in under seven hours.

    python make_model.py tokenizer        trains the byte-level BPE          -> kvcomp-tiny/tokenizer.json and its configs
    python make_model.py train [DIR]      runs (or resumes) the curriculum   -> DIR/checkpoint.pt every few minutes
    python make_model.py export [DIR]     writes the averaged weights        -> kvcomp-tiny/{config.json, model.safetensors, ...}
    python make_model.py eval             scores kvcomp-tiny on held-out words, by task and by length
    python make_model.py curve            draws training.log (what train printed)       -> loss.svg
    python make_model.py all              tokenizer, train, export, eval

Needs numpy, torch, tokenizers, safetensors (transformers only to check the result). Nothing is downloaded: data_gen.py makes the data.
"""
import json, math, os, random, sys, time
import numpy as np, torch, torch.nn as nn, torch.nn.functional as F
import data_gen

HERE = os.path.dirname(os.path.abspath(__file__))
OUT = os.path.join(HERE, "kvcomp-tiny")
PREV, NOTE, MATCH, COPY = 1.5, 0.1, 3.0, 0.8                          # strengths of the prepared induction heads
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]                    # ids 0, 1, 2
V, D, LAYERS, HEADS, KV, HD, FFN, THETA, EPS, MAXPOS = 4096, 192, 6, 6, 3, 32, 512, 100000.0, 1e-5, 4096
YOUNG = 4                                                                   # layers of the first phases; the last ones have LAYERS

# ----------------------------------------------------------------------------------------------------------- tokenizer
LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
TEMPLATE = ("{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
            "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")

def tokenizer_corpus(seed=11, chats=25000):
    """Chats without their digits, and every number of up to three digits equally often: each becomes one token."""
    r = random.Random(seed)
    for _ in range(chats):
        text = data_gen.render(*data_gen.make_chat(r, r.choice((64, 128, 256)), held=r.random() < 0.2))[0]
        for s in SPECIAL: text = text.replace(s, "")
        yield "".join(ch for ch in text if not ch.isdigit())
    for word in data_gen.NAMES + data_gen.CITIES + data_gen.COUNTRIES + data_gen.FOODS + data_gen.JOBS + data_gen.HOBBIES + data_gen.ANIMALS:
        yield (" " + word + " " + word.lower()) * 60
    numbers = [str(n).zfill(k) for k in (1, 2, 3) for n in range(10 ** k)]
    for _ in range(400): yield " ".join(numbers)

def make_tokenizer():
    from tokenizers import Tokenizer, Regex, models, pre_tokenizers, decoders, trainers
    tok = Tokenizer(models.BPE(ignore_merges=False))
    tok.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(LLAMA3), behavior="isolated"),
                                                 pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tok.decoder = decoders.ByteLevel()
    tok.train_from_iterator(tokenizer_corpus(), trainers.BpeTrainer(vocab_size=V, special_tokens=SPECIAL,
                            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    os.makedirs(OUT, exist_ok=True)
    tok.save(os.path.join(OUT, "tokenizer.json"))
    write_json("tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": MAXPOS, "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>",
               "clean_up_tokenization_spaces": False, "chat_template": TEMPLATE})
    assert tok.get_vocab_size() == V and [tok.token_to_id(s) for s in SPECIAL] == [0, 1, 2]
    print("tokenizer: %d entries, %d of 1110 numbers are one token" % (V, sum(len(tok.encode(str(n).zfill(k)).ids) == 1 for k in (1, 2, 3) for n in range(10 ** k))))

def write_json(name, value):
    with open(os.path.join(OUT, name), "w") as f: json.dump(value, f, indent=1)

# --------------------------------------------------------------------------------------------------------------- model
def attention(q, k, v):
    """Causal attention, the query heads of one KV head together. Spelled out for short rows: on a CPU that is three times faster."""
    (B, H, T, _), G = q.shape, HEADS // KV
    if T > 320 or not q.requires_grad: return F.scaled_dot_product_attention(q, k.repeat_interleave(G, 1), v.repeat_interleave(G, 1), is_causal=True)
    s = (q.reshape(B, KV, G * T, HD) @ k.mT).view(B, KV, G, T, T).float() * HD ** -0.5
    p = torch.softmax(s + torch.full((T, T), -math.inf).triu_(1), -1).to(q.dtype)
    return (p.view(B, KV, G * T, T) @ v).view(B, H, T, HD)

class Block(nn.Module):
    """One Llama layer. q, k, v are one matrix here, gate and up another (fewer calls); export takes them apart."""
    def __init__(self):
        super().__init__()
        def linear(i, o, std): return nn.Parameter(torch.randn(o, i) * std)
        self.norm1, self.norm2 = nn.Parameter(torch.ones(D)), nn.Parameter(torch.ones(D))
        self.qkv = linear(D, (HEADS + 2 * KV) * HD, 0.5 * D ** -0.5)
        self.o = linear(HEADS * HD, D, 0.5 * D ** -0.5 / math.sqrt(2 * LAYERS))
        self.gate_up = linear(D, 2 * FFN, 0.5 * D ** -0.5)
        self.down = linear(FFN, D, 0.5 * FFN ** -0.5 / math.sqrt(2 * LAYERS))

    def forward(self, x, cos, sin):
        B, T, _ = x.shape
        q, v = F.linear(F.rms_norm(x, (D,), self.norm1, EPS), self.qkv).view(B, T, HEADS + 2 * KV, HD).transpose(1, 2).split([HEADS + KV, KV], 1)
        a, b = q.chunk(2, -1)                                               # rotary position: pairs (i, i + HD/2), q and k at once
        q, k = (q * cos + torch.cat((-b, a), -1) * sin).split([HEADS, KV], 1)
        y = attention(q, k, v)
        x = x + F.linear(y.transpose(1, 2).reshape(B, T, HEADS * HD), self.o)
        gate, up = F.linear(F.rms_norm(x, (D,), self.norm2, EPS), self.gate_up).chunk(2, -1)
        return x + F.linear(F.silu(gate) * up, self.down)

class Llama(nn.Module):
    def __init__(self, layers=LAYERS):
        super().__init__()
        self.embed = nn.Parameter(torch.randn(V, D) * 0.06)                 # also the output matrix
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.norm = nn.Parameter(torch.ones(D))

    def forward(self, ids, pos, at):
        """Logits at the flat positions `at` of a batch: only where there is something to learn."""
        angle = pos[..., None].float() * THETA ** (-torch.arange(0, HD, 2) / HD)
        cos, sin = (torch.cat((f, f), -1)[:, None].bfloat16() if torch.is_autocast_enabled("cpu") else torch.cat((f, f), -1)[:, None] for f in (angle.cos(), angle.sin()))
        x = F.embedding(ids, self.embed)
        for block in self.blocks: x = block(x, cos, sin)
        return F.linear(F.rms_norm(x.reshape(-1, D)[at], (D,), self.norm, EPS), self.embed)

    @torch.no_grad()
    def grow(self):
        """A new layer behind the second and one behind the third; they add nothing at first, so nothing is unlearned."""
        for at in (2, 4):
            block = Block(); block.o.zero_(); block.down.zero_()
            self.blocks.insert(at, block)

    @torch.no_grad()
    def start_with_induction(self):
        """Weights that already hold the two halves of an induction head, which training would otherwise need a million tokens of luck to
        find. Layer 0: query heads 0 and 1 attend one and two positions back, by RoPE phases alone, and write what they see into a
        place of their own. Layer 1: head 2j looks for a position whose *predecessor* was the present token, and copies the
        token found there. Training is free to change all of it."""
        rows = torch.linalg.qr(torch.randn(D, D))[0]                         # orthonormal directions of the hidden space
        seen, back1 = rows[:HD], rows[HD:2 * HD]                            # the token itself; where its predecessor is noted
        self.embed[:, 0] = 0.5                                              # a constant that queries and keys can rely on
        freq = THETA ** (-torch.arange(0, HD, 2) / HD)
        first, second = self.blocks[0], self.blocks[1]
        key = HEADS * HD                                                    # rows of qkv: queries, then keys, then values
        value = key + KV * HD
        fast = torch.arange(8)                                              # pairs that turn quickly tell neighbours apart
        first.qkv[:2 * HD] *= 0.1; first.qkv[key:key + HD] *= 0.1
        first.qkv[key + fast, 0] = PREV
        for head in (0, 1):
            first.qkv[head * HD + fast, 0] = PREV * torch.cos((head + 1) * freq[fast])
            first.qkv[head * HD + HD // 2 + fast, 0] = -PREV * torch.sin((head + 1) * freq[fast])
        first.qkv[value:value + HD] = seen
        first.o[:, :2 * HD] = 0
        first.o[:, :HD] = NOTE * back1.T
        slow = torch.cat((torch.arange(5, 16), torch.arange(21, 32)))       # pairs that turn slowly compare contents at any distance
        for j in range(KV):
            copied = torch.linalg.qr(torch.randn(D, HD))[0].T
            second.qkv[2 * j * HD:2 * j * HD + HD] *= 0.1
            second.qkv[2 * j * HD + slow] = MATCH * seen[slow]
            second.qkv[key + j * HD:key + (j + 1) * HD] *= 0.1
            second.qkv[key + j * HD + slow] = MATCH * back1[slow]
            second.qkv[value + j * HD:value + (j + 1) * HD] = copied
            second.o[:, 2 * j * HD:2 * j * HD + HD] = COPY * copied.T

    def matrices(self):
        """The weight matrices one by one, for the optimizer: name -> (parameter, first row, rows)."""
        for block in self.blocks:
            for p, parts in ((block.qkv, [HEADS * HD, KV * HD, KV * HD]), (block.o, [D]), (block.gate_up, [FFN, FFN]), (block.down, [D])):
                row = 0
                for n in parts: yield p, row, n; row += n

# ----------------------------------------------------------------------------------------------------------- optimizer
class Muon:
    """Momentum whose update is made (nearly) orthogonal by five Newton-Schulz steps, for the matrices; it learns in far fewer steps
    than AdamW at this size. AdamW for the embedding and the norms."""
    def __init__(self, model, lr=0.008, adam_lr=0.002, momentum=0.95, decay=0.05, rest=None):
        self.lr, self.momentum, self.decay = lr, momentum, decay
        self.groups = {}                                                    # equal shapes together: one batched product
        for p, row, n in model.matrices(): self.groups.setdefault((n, p.shape[1]), []).append((p, row))
        self.params = list({id(p): p for p, _, _ in model.matrices()}.values())
        self.buf = [torch.zeros_like(p) for p in self.params]
        rest = rest or [p for p in model.parameters() if not any(p is q for q in self.params)]
        self.adam = torch.optim.AdamW(rest, lr=adam_lr, betas=(0.9, 0.98), weight_decay=0.0)
        self.adam_lr = adam_lr

    @torch.no_grad()
    def step(self, scale):
        """`scale`: the schedule's factor on both learning rates."""
        for g in self.adam.param_groups: g["lr"] = self.adam_lr * scale
        self.adam.step(); self.adam.zero_grad()
        update = {}
        for p, buf in zip(self.params, self.buf):
            buf.lerp_(p.grad, 1 - self.momentum)
            update[id(p)] = p.grad.lerp(buf, self.momentum)                 # Nesterov
            p.grad = None
            p.mul_(1 - self.lr * scale * self.decay)
        for (n, m), where in self.groups.items():
            x = torch.stack([update[id(p)][row:row + n] for p, row in where])
            x = orthogonal(x if n <= m else x.mT)
            x = x if n <= m else x.mT
            for (p, row), u in zip(where, x): p[row:row + n].add_(u, alpha=-self.lr * scale * max(1, n / m) ** 0.5)

    def state(self): return {"buf": self.buf, "adam": self.adam.state_dict()}
    def load(self, s):
        for a, b in zip(self.buf, s["buf"]): a.copy_(b)
        self.adam.load_state_dict(s["adam"])

def orthogonal(x):
    x = (x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)).bfloat16()
    for _ in range(5):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.float()

# ---------------------------------------------------------------------------------------------------------------- data
ANSWER, USER = 5.0, 0.1                                                     # weight of an answer's token, of a user's token

def encode(tok, chats):
    """Chats -> (ids, weight of predicting each id, message starts). The assistant's words weigh 1, the template's 0."""
    rendered = [data_gen.render(*c) for c in chats]
    out = []
    for (text, spans, replies), e in zip(rendered, tok.encode_batch([t for t, _, _ in rendered])):
        ids = np.array(e.ids, np.int32); begin = np.array([a for a, _ in e.offsets]); end = np.array([b for _, b in e.offsets])
        w = np.full(len(ids), USER, np.float32)
        for a, b in replies: w[(begin >= a) & (end <= b)] = 1.0
        for a, b in spans: w[(end > a) & (begin < b) & (w >= 1)] = ANSWER
        starts = np.flatnonzero(ids == 1)
        for s in starts: w[s:s + 3] = 0
        after = np.flatnonzero(ids == 2) + 1
        w[after[after < len(ids)]] = 0                                      # the newline behind a message
        w[0] = 0
        out.append((ids, w, starts))
    return out

def positions(r, n, starts):
    """0..n-1, or with random gaps at message starts: distances of up to 4096 without the cost of such contexts."""
    pos = np.arange(n)
    if len(starts) > 1 and r.random() < 0.4:
        room = (MAXPOS - 1 - n) * r.random() ** 2
        cuts = np.sort(np.array([r.random() for _ in starts])) * room
        for s, a, b in zip(starts, np.r_[0, cuts], cuts): pos[s:] += int(b - a)
    return pos

def pack(r, rows):
    """Rows of unequal length -> one batch, padded to the right (causal attention never looks there)."""
    T = max(len(ids) for ids, _, _ in rows)
    ids, w, pos = (np.zeros((len(rows), T), t) for t in (np.int64, np.float32, np.int64))
    for i, (x, u, starts) in enumerate(rows):
        ids[i, :len(x)] = x; w[i, :len(x) - 1] = u[1:]; pos[i, :len(x)] = positions(r, len(x), starts)
    y = np.roll(ids, -1, 1).reshape(-1); w = w.reshape(-1)
    w[(w > 0) & (w < 1) & (np.random.rand(w.size) > 0.3)] = 0               # a user's words: a sample is enough
    at = np.flatnonzero(w)
    return [torch.from_numpy(a) for a in (ids, pos, at, y[at], w[at])]

ORDER = np.random.RandomState(5).permutation(np.arange(3, V))

def induction(r, T, n, known=V):
    """Random tokens, of which stretches come back: the second time they can be predicted. Only the first `known` tokens of a fixed
    order are used: with few of them the circuit (look for the last time this token was seen, copy what followed) forms quickly."""
    rows = []
    for _ in range(n):
        vocab = np.random.choice(ORDER[:known], r.choice((20, 100, 400)))
        ids, w = [], []
        while len(ids) < T:
            k = r.randrange(3, 20)
            if len(ids) > 2 * k and r.random() < 0.6:
                s = r.randrange(len(ids) - k); ids += ids[s:s + k]; w += [0] + [1] * (k - 1)
            else: ids += list(np.random.choice(vocab, k)); w += [0] * k
        rows.append((np.array(ids[:T]), np.array(w[:T], np.float32), [0]))
    return rows

# phase: (steps, tokens a batch and worker, shares of target lengths, share of induction rows, learning rate at its start and end)
PHASES = [
    ("induction", 190, 2048, {64: 1}, 1.0, 1.0, 1.0),
    ("short", 750, 2048, {48: 2, 96: 3, 160: 2}, 0.04, 1.0, 1.0),
    ("medium", 600, 2048, {64: 4, 160: 3, 256: 2, 512: 1}, 0.01, 1.0, 0.9),
    ("long", 1850, 2048, {64: 2, 160: 2, 256: 2, 512: 2, 1024: 1.5, 2048: 0.3}, 0.08, 0.9, 0.02),
    ("grown", 3000, 2048, {64: 2, 160: 3, 256: 3, 512: 3, 1024: 2.5, 2048: 0.5}, 0.05, 0.7, 0.6),
    ("longer", 1500, 4096, {64: 1, 256: 2, 512: 2, 1024: 2, 2048: 1.2, 4000: 0.7}, 0.03, 0.6, 0.02),
    ("words", 5600, 2048, {64: 1, 160: 3, 256: 3, 512: 3, 1024: 1.5, 2048: 0.4}, 0.05, 0.5, 0.25),
    ("last", 1900, 4096, {64: 1, 256: 2, 512: 2, 1024: 2, 2048: 1.2, 4000: 0.7}, 0.03, 0.25, 0.01),
    ("places", 4000, 2048, {64: 1, 160: 3, 256: 3, 512: 3, 1024: 1.5, 2048: 0.4}, 0.05, 0.5, 0.25),
    ("end", 1400, 4096, {64: 1, 256: 2, 512: 2, 1024: 2, 2048: 1.2, 4000: 0.7}, 0.03, 0.25, 0.01),
    ("weak", 3000, 2048, {64: 1, 160: 2, 256: 3, 512: 3, 1024: 2, 2048: 0.8}, 0.05, 0.5, 0.3),
    ("close", 1800, 4096, {64: 1, 256: 2, 512: 2, 1024: 2, 2048: 1.6, 4000: 1.1}, 0.03, 0.3, 0.01),
]
SHIPPED = {"last": 0.2, "end": 0.4, "close": 0.4}                            # the model is this mean of what the phases ended with: better than any of them
GROWN = 4                                                                   # from this phase on the model has all its layers

def batches(seed, phase):
    """Endless batches of a phase."""
    from tokenizers import Tokenizer
    tok = Tokenizer.from_file(os.path.join(OUT, "tokenizer.json"))
    name, _, size, lengths, share, _, _ = phase
    r, pace = random.Random(seed), random.Random(seed // 2); np.random.seed(seed % 2 ** 32)
    while True:
        if name == "induction": rows = induction(r, 64, size // 64 * 8)
        else:
            targets = r.choices(list(lengths), [v / k ** 0.5 for k, v in lengths.items()], k=200)
            rows = [x for x in encode(tok, [data_gen.make_chat(r, t) for t in targets]) if len(x[0]) <= 1.3 * max(lengths)]
            rows += induction(r, 128, int(200 * share))
        rows.sort(key=lambda x: len(x[0]))                                  # equal lengths together: little padding
        group, out = [], []
        for x in rows:
            if group and (len(group) + 1) * len(x[0]) > size: out.append(group); group = []
            group.append(x)
        while out: yield pack(r, out.pop(int(pace.random() * len(out))))     # both workers draw rows of like length: neither waits for the other

# ------------------------------------------------------------------------------------------------------------ training
WORKERS = 2                                                                 # processes, each with one thread and half of every batch

def train(folder):
    os.makedirs(folder, exist_ok=True)
    meet = os.path.join(folder, "meet")
    if os.path.exists(meet): os.remove(meet)
    torch.multiprocessing.spawn(work, (folder, meet), WORKERS)

def work(rank, folder, meet):
    """One worker. All hold the same weights: they average their gradients and take the same step."""
    import torch.distributed as dist
    dist.init_process_group("gloo", init_method="file://" + meet, rank=rank, world_size=WORKERS)
    torch.manual_seed(7); torch.set_num_threads(1); torch.set_flush_denormal(True)
    path = os.path.join(folder, "checkpoint.pt")
    model = Llama(YOUNG); model.start_with_induction(); opt = Muon(model)
    mean = {k: v.clone() for k, v in model.state_dict().items()}            # running mean of the weights: what is exported
    done, step, tokens, spent = 0, 0, 0, 0.0                                # phases done, step in this phase, totals
    if os.path.exists(path):
        s = torch.load(path, weights_only=True)
        done, step, tokens, spent = s["at"]; mean = s["mean"]
        if "blocks.%d.o" % (LAYERS - 1) in mean: model = Llama(); opt = Muon(model)
        model.load_state_dict(s["model"]); opt.load(s["opt"])
    if rank == 0: print("%d parameters; phase %d step %d" % (sum(p.numel() for p in model.parameters()), done, step), flush=True)
    def save():
        torch.save({"model": model.state_dict(), "opt": opt.state(), "mean": mean, "at": (done, step, tokens, spent)}, path + ".new")
        os.replace(path + ".new", path)
    parent = os.getppid()
    for i, phase in enumerate(PHASES):
        if i < done: continue
        name, steps, size, _, _, lr0, lr1 = phase
        if i == GROWN and len(model.blocks) < LAYERS:
            model.load_state_dict(mean); model.grow(); opt = Muon(model)
            mean = {k: v.clone() for k, v in model.state_dict().items()}
        params = list(model.parameters())
        source = batches(1000 * i + 2 * step + rank, phase)
        last, t0, saved, sums = spent, time.time(), time.time(), [0] * 6
        while step < steps and os.getppid() == parent:                     # never outlive the process that started us
            ids, pos, at, y, w = next(source)
            with torch.autocast("cpu", torch.bfloat16): logits = model(ids, pos, at)
            ce = F.cross_entropy(logits.float(), y, reduction="none")
            loss = (ce * w).sum() / w.sum()
            loss.backward()
            flat = torch.cat([p.grad.reshape(-1) for p in params])
            dist.all_reduce(flat)
            for p, g in zip(params, flat.split([p.numel() for p in params])): p.grad.copy_(g.view_as(p) / WORKERS)
            opt.step((lr0 + (lr1 - lr0) * step / steps) * (min(1, (step + 1) / 50) if i in (0, GROWN) else 1))
            step += 1; tokens += ids.numel() * WORKERS
            fade = min(0.998, step / (step + 20)) if i == 0 else 0.99 if i == 3 else 0.995
            for k, v in model.state_dict().items(): mean[k].lerp_(v, 1 - fade)
            if rank: continue
            with torch.no_grad():
                hit = (logits.argmax(-1) == y).float(); ans = w >= ANSWER if i else w > 0; plain = w == 1
                for j, x in enumerate((loss, hit[ans].sum(), ans.sum(), ce[plain].sum(), plain.sum(), 1)): sums[j] += float(x)
            spent = last + time.time() - t0
            if step % 50 == 0 or step == steps:
                print("%s %5d  loss %.4f  answer tokens %.3f  reply ce %.3f  %6.2fM tokens  %5.0f s  %s" % (name, step, sums[0] / sums[5], sums[1] / max(1, sums[2]), sums[3] / max(1, sums[4]),
                      tokens / 1e6, spent, time.strftime("%H:%M:%S")), flush=True)
                sums = [0] * 6
            if time.time() - saved > 120: save(); saved = time.time()
        if step < steps: return
        done, step = i + 1, 0
        if rank == 0: save(); torch.save(mean, os.path.join(folder, f"mean-{name}.pt"))

# ---------------------------------------------------------------------------------------------------------- evaluation
EVAL = ["profile", "unknown", "people", "coref", "needle", "multi_needle", "multi_value", "key_values", "status", "lists", "chain", "classify", "summary", "constraint"]

@torch.no_grad()
def score(weights, n, lengths, tasks=EVAL, seed=99):
    """Held-out chats: the share whose last reply, decoded greedily, is right up to the end of its answer.
    One pass suffices: if each token is the most likely one after the true beginning, greedy decoding writes exactly this reply."""
    from tokenizers import Tokenizer
    tok = Tokenizer.from_file(os.path.join(OUT, "tokenizer.json"))
    model = Llama(); model.load_state_dict(weights)
    table = {}
    for task in tasks:
        for length in lengths:
            if task == "constraint" and length > 128: continue              # such dialogues have no small talk: they stay short
            r = random.Random(f"{seed} {task} {length}")
            rows = []
            while len(rows) < n:
                x = encode(tok, [data_gen.make_chat(r, int(0.85 * length), task, held=True)])[0]
                if 0.6 * length <= len(x[0]) <= min(1.1 * length, MAXPOS): rows.append(x)
            good = 0
            for i in range(0, n, 8 if length <= 1024 else 2):
                part = rows[i:i + (8 if length <= 1024 else 2)]
                ids, pos, _, _, _ = pack(NoGaps(), part)
                at, y, owner = [], [], []
                for j, (x, w, starts) in enumerate(part):
                    stop = np.flatnonzero(w >= ANSWER)[-1]
                    for t in range(starts[-1] + 3, stop + 1): at.append(j * ids.shape[1] + t - 1); y.append(x[t]); owner.append(j)
                with torch.autocast("cpu", torch.bfloat16): hit = model(ids, pos, torch.tensor(at)).argmax(-1).numpy() == np.array(y)
                good += sum(hit[np.array(owner) == j].all() for j in range(len(part)))
            table[task, length] = good / n
    return table

class NoGaps:
    def random(self): return 1.0

def evaluate(n=20, lengths=(128, 256, 512, 1024, 2048, 4000)):
    from safetensors.torch import load_file
    weights = from_hf(load_file(os.path.join(OUT, "model.safetensors")))
    table = {**score(weights, n, [l for l in lengths if l <= 1024]), **score(weights, n // 2, [l for l in lengths if l > 1024])}
    def percent(values): return "%.0f" % (100 * sum(values) / len(values)) if values else "-"
    print("| task | " + " | ".join(map(str, lengths)) + " |\n|---|" + "---:|" * len(lengths))
    for t in EVAL: print(f"| {t} | " + " | ".join(percent([table[t, l]] if (t, l) in table else []) for l in lengths) + " |")
    print("| mean | " + " | ".join(percent([table[t, l] for t in EVAL if (t, l) in table]) for l in lengths) + " |", flush=True)

def curve():
    """training.log -> loss.svg: loss (left, logarithmic) and share of answer tokens right (right) against tokens seen, phases marked."""
    rows = []                                                               # (phase, loss, right, million tokens)
    for line in open(os.path.join(HERE, "training.log")):
        f = line.split()
        if "answer" in f: rows.append((f[0], float(f[3]), float(f[6]), float(f[10].rstrip("M"))))
    X, Y, W, H, end = 50, 20, 800, 300, rows[-1][3]
    def x(m): return X + W * m / end
    def left(loss): return Y + H * (math.log(8) - math.log(loss)) / (math.log(8) - math.log(0.25))
    def right(share): return Y + H * (1 - share)
    def line(points, colour): return '<polyline fill="none" stroke="%s" stroke-width="1.5" points="%s"/>' % (colour, " ".join("%.1f,%.1f" % p for p in points))
    def text(at, y, s, anchor="middle", colour="#444"): return '<text x="%.1f" y="%.1f" text-anchor="%s" fill="%s">%s</text>' % (at, y, anchor, colour, s)
    out = ['<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" font-family="sans-serif" font-size="12"><rect width="100%%" height="100%%" fill="#fff"/>' % (X + W + 50, Y + H + 40)]
    for loss in (0.25, 0.5, 1, 2, 4, 8): out += [line([(X, left(loss)), (X + W, left(loss))], "#ddd"), text(X - 6, left(loss) + 4, "%g" % loss, "end", "#b40")]
    for share in (0, 0.25, 0.5, 0.75, 1): out.append(text(X + W + 6, right(share) + 4, "%g %%" % (100 * share), "start", "#06b"))
    for m in range(0, int(end) + 1, 10): out.append(text(x(m), Y + H + 18, m))
    for i in range(1, len(rows)):
        if i == 1 or rows[i][0] != rows[i - 1][0]: out += [line([(x(rows[i][3]), Y), (x(rows[i][3]), Y + H)], "#aaa"), text(x(rows[i][3]) + 3, Y + H / 2 - 14 * (len(out) % 4 // 2), rows[i][0], "start")]
    out += [line([(x(m), left(l)) for _, l, _, m in rows], "#b40"), line([(x(m), right(a)) for _, _, a, m in rows], "#06b"),
            text(X + W / 2, Y + H + 34, "million tokens seen; loss (left, red), answer tokens right (blue)"), "</svg>"]
    with open(os.path.join(HERE, "loss.svg"), "w") as f: f.write("\n".join(out))

# -------------------------------------------------------------------------------------------------------------- export
def to_hf(w):
    """Our tensors -> Hugging Face's names, one matrix each."""
    out = {"model.embed_tokens.weight": w["embed"], "model.norm.weight": w["norm"]}
    for i in range(LAYERS):
        b, h = f"blocks.{i}.", f"model.layers.{i}."
        q, k, v = w[b + "qkv"].split([HEADS * HD, KV * HD, KV * HD]); gate, up = w[b + "gate_up"].chunk(2)
        for name, x in (("input_layernorm", w[b + "norm1"]), ("post_attention_layernorm", w[b + "norm2"]), ("self_attn.q_proj", q), ("self_attn.k_proj", k), ("self_attn.v_proj", v),
                        ("self_attn.o_proj", w[b + "o"]), ("mlp.gate_proj", gate), ("mlp.up_proj", up), ("mlp.down_proj", w[b + "down"])): out[h + name + ".weight"] = x
    return {k: v.bfloat16().contiguous().clone() for k, v in out.items()}

def from_hf(t):
    t = {k: v.float() for k, v in t.items()}
    out = {"embed": t["model.embed_tokens.weight"], "norm": t["model.norm.weight"]}
    for i in range(LAYERS):
        b, g = f"blocks.{i}.", lambda *names: torch.cat([t[f"model.layers.{i}.{n}.weight"] for n in names])
        out.update({b + "norm1": g("input_layernorm"), b + "norm2": g("post_attention_layernorm"), b + "qkv": g("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
                    b + "o": g("self_attn.o_proj"), b + "gate_up": g("mlp.gate_proj", "mlp.up_proj"), b + "down": g("mlp.down_proj")})
    return out

def export(folder):
    from safetensors.torch import save_file
    os.makedirs(OUT, exist_ok=True)
    ends = {name: torch.load(os.path.join(folder, f"mean-{name}.pt"), weights_only=True) for name in SHIPPED}
    weights = {k: sum(share * ends[name][k] for name, share in SHIPPED.items()) for k in next(iter(ends.values()))}
    path = os.path.join(OUT, "model.safetensors")
    save_file(to_hf(weights), path + ".new", metadata={"format": "pt"}); os.chmod(path + ".new", 0o644); os.replace(path + ".new", path)
    write_json("config.json", {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": D, "intermediate_size": FFN, "num_hidden_layers": LAYERS,
               "num_attention_heads": HEADS, "num_key_value_heads": KV, "head_dim": HD, "vocab_size": V, "hidden_act": "silu", "rms_norm_eps": EPS, "rope_theta": THETA,
               "max_position_embeddings": MAXPOS, "tie_word_embeddings": True, "attention_bias": False, "mlp_bias": False, "eos_token_id": [2, 0], "pad_token_id": 0,
               "initializer_range": 0.02, "use_cache": True, "torch_dtype": "bfloat16"})
    write_json("generation_config.json", {"eos_token_id": [2, 0], "pad_token_id": 0, "do_sample": False})
    print("exported", path, os.path.getsize(path), "bytes")

if __name__ == "__main__":
    what, folder = (sys.argv[1:] + ["all"])[0], (sys.argv[2:] + [os.path.join(HERE, "work")])[0]
    if what in ("tokenizer", "all"): make_tokenizer()
    if what in ("train", "all"): train(folder)
    if what in ("export", "all"): export(folder)
    if what in ("eval", "all"): evaluate()
    if what == "curve": curve()

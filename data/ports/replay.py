"""Plays a trace of kvcomp into a port, and counts what was compared: the larger half of check.py.

The port's cache and attention function get kvcomp's q, k and v, pass by pass and layer by layer. They must hold and
read the same rows and decide the same, and the outputs of attention must agree.
"""
import importlib
import sys
import types

TOLERANCE = 1e-4                    # of outputs and logits, as a share of the largest
STEP = 2 ** -8                      # bf16 numbers below 1 that are neighbours lie so near: sums in another order may
                                    # round to the one or to the other


class Table:
    """How much was compared, by method and model, and what was left out."""
    count = {}
    left_out = []
    cell = None                     # (method, model) that comparisons belong to
    worst = {}                      # the largest difference of the outputs and logits of a cell


def begin(method, model):
    Table.cell = (method, model)
    Table.count.setdefault(Table.cell, 0)


def expect(equal, what):
    Table.count[Table.cell] += 1
    if not equal:
        print(f"check.py: {' on '.join(Table.cell)}: {what}", file=sys.stderr)
        sys.exit(5)


def apart(found, wanted):
    """The largest difference, as a share of the largest number."""
    return ((found - wanted).abs().max() / wanted.abs().max()).item()


def near(what, found, wanted, tolerance=TOLERANCE):
    """Numbers agree within the tolerance."""
    difference = apart(found, wanted)
    expect(difference <= tolerance, f"{what} differs by {difference:.2e} of the largest")
    Table.worst[Table.cell] = max(Table.worst.get(Table.cell, 0), difference)


def leave_out(what):
    """Says it, and goes on."""
    print(f"left out: {what}")
    Table.left_out.append(what)


def port(method):
    """The module of the port."""
    return importlib.import_module(method)


class Replay:
    """Plays a trace into a port, pass by pass and layer by layer."""

    def __init__(self, method, trace, cache, config):
        self.method, self.trace, self.cache = method, trace, cache
        self.G = config.num_key_value_heads
        self.R = config.num_attention_heads // self.G
        self.passes = [int(name[4:8]) for name in sorted(trace) if name.endswith(".tokens")]
        self.layers = sorted({int(name[14:16]) for name in trace if name[8:14] == ".layer"})

    def same(self, name, found):
        """These whole numbers are those of the trace."""
        wanted = self.trace[name].tolist()
        expect(wanted == found, f"{name}: kvcomp has {wanted}, the port {found}")

    def close(self, name, found, tolerance):
        """These numbers are those of the trace. Where one is infinite, both are."""
        wanted = self.trace[name]
        difference = (found - wanted).masked_fill(found == wanted, 0).abs().max().item()
        expect(difference <= tolerance, f"{name} differs by {difference}")

    def qkv(self, p, l):
        """q (1,H,T,D), k and v (1,G,T,D) of a pass."""
        return (self.trace[f"pass{p:04}.layer{l:02}.{name}"].transpose(0, 1)[None] for name in "qkv")

    def attend(self, p, l):
        """The port's cache and attention function get the pass -> (T,H,D)."""
        import torch
        from transformers.integrations.sdpa_attention import sdpa_attention_forward
        q, k, v = self.qkv(p, l)
        module = types.SimpleNamespace(layer_idx=l, num_key_value_groups=self.R, is_causal=True)
        key, value = self.cache.update(k, v, l)
        N, T = self.cache.get_seq_length(l), q.shape[2]
        mask = torch.ones(T, N, dtype=torch.bool).tril(N - T)[None, None]
        function = getattr(port(self.method), self.method + "_attention", sdpa_attention_forward)
        handed = {self.method: self.cache} if function is not sdpa_attention_forward else {}
        return function(module, q, key, value, mask, scaling=q.shape[3] ** -.5, **handed)[0][0]

    def layer(self, p, l):
        at, step = f"pass{p:04}.layer{l:02}", self.trace[f"pass{p:04}.step"].item()
        near(f"{at}.out", self.attend(p, l), self.trace[f"{at}.out"])
        layer = self.cache.layers[l]
        getattr(self, self.method)(at, p, l, layer, step)

    def read(self, at, lists):
        """The rows that each query head reads, from those of each KV head."""
        for h in range(self.G * self.R):
            self.same(f"{at}.qhead{h:02}.read", lists[h // self.R])

    def lychee_index(self, p, l):
        """LycheeCluster's index as pass p left it, which the port has brought about in the pass behind it."""
        index = self.cache.layers[l].index
        self.same(f"pass{p:04}.lychee.chunk_ends", self.cache.chunks.start[1:])
        for g in range(self.G):
            at = f"pass{p:04}.layer{l:02}.head{g:02}.lychee"
            self.same(f"{at}.parents", index.label[g].tolist())
            self.close(f"{at}.centres", index.mu[g], STEP)
            self.close(f"{at}.radii", index.r[g], STEP / 4)

    def lychee(self, at, p, l, layer, step):
        """The chunks, clusters and rows that each KV head reads."""
        N = layer.get_seq_length()
        if f"pass{p - 1:04}.layer{l:02}.head00.lychee.parents" in self.trace:
            self.lychee_index(p - 1, l)
        for g in range(self.G):
            self.same(f"{at}.head{g:02}.kept", list(range(N)))
        if step < 0:
            return
        if not getattr(layer, "index", None) or not layer.index.M_built:
            self.read(at, [list(range(N))] * self.G)
            return
        q = next(iter(self.qkv(p, l)))[0, :, 0].unflatten(0, (self.G, -1))      # (G,R,D)
        scores, rows = layer.index.scores(q, layer.beta), layer.rows_to_read(q, N)
        self.read(at, [tokens.tolist() for tokens in rows])
        for g in range(self.G):
            self.close(f"{at}.head{g:02}.lychee.scores", scores[g], STEP / 4)
            read = set(rows[g].tolist())
            chunks = [j for j in range(layer.index.M) if self.cache.chunks.start[j] in read]
            used = {int(layer.index.label[g, j]) for j in chunks}
            wanted = set(self.trace[f"{at}.head{g:02}.lychee.clusters"].tolist())
            expect(used == wanted, f"{at}: kvcomp reads clusters {wanted} of head {g}, the port {used}")

    def dililazy(self, at, p, l, layer, step):
        """Budgets, the rows that query heads read and KV heads hold."""
        if step < 0:
            if f"{at}.dililazy.budgets" in self.trace:
                self.same(f"{at}.dililazy.budgets", layer.capacity)
        for h, rows in enumerate(layer.view):
            tokens = layer.token[h // self.R][rows].tolist()
            self.same(f"{at}.qhead{h:02}.{'read' if step >= 0 else 'dililazy.chosen'}", tokens)
        for g in range(self.G):
            self.same(f"{at}.head{g:02}.kept", layer.token[g].tolist())

    def loopserve(self, at, p, l, layer, step):
        """Sampled rows and lines of a prompt; scores and rows of a decode step."""
        N = layer.get_seq_length()
        if step >= 0:
            self.read(at, [layer.rows_read(g, N).tolist() for g in range(self.G)])
            for g in range(self.G):
                if f"{at}.head{g:02}.loopserve.scores" in self.trace:
                    self.close(f"{at}.head{g:02}.loopserve.scores", layer.scores[g], TOLERANCE)
        elif f"{at}.loopserve.sampled" in self.trace:
            base = self.trace[f"pass{p:04}.base"].item()
            self.same(f"{at}.loopserve.sampled", [base + row for row in layer.sampled])
            self.same(f"{at}.loopserve.dense", [int(lines is None) for lines in layer.lines])
            for h, lines in enumerate(layer.lines):
                for name, kind in zip(("verticals", "slashes"), lines or ([], [])):
                    found = kind.nonzero()[:, 0].tolist() if lines else []
                    self.same(f"{at}.qhead{h:02}.loopserve.{name}", found)

    def pats(self, at, p, l, layer, step):
        """The bits of every token and the bytes of every head, where the pass has packed."""
        import torch
        layer.repack()                                  # the end of the pass
        if f"{at}.head00.pats.regions" not in self.trace:
            return
        if f"pass{p:04}.pats.bits" in self.trace:
            self.same(f"pass{p:04}.pats.bits", layer.bits.tolist())
        for g in range(self.G):
            table, base = [], 0
            stream = [bytearray(), bytearray()]
            for (first, n, b), pair in zip(layer.regions, layer.packed):
                for kind in range(2):
                    stream[kind] += bytes(-len(stream[kind]) % 64)
                table.append([first, n, 16 - b, len(stream[0])])
                for kind in range(2):
                    stream[kind] += bytes(pair[kind][g].tolist())
            self.same(f"{at}.head{g:02}.pats.regions", table)
            for kind, name in enumerate("kv"):
                data = stream[kind] + bytes(-len(stream[kind]) % 8)
                wanted = self.trace[f"{at}.head{g:02}.pats.packed_{name}"]
                equal = torch.equal(wanted, torch.tensor(list(data), dtype=torch.uint8))
                expect(equal, f"{at}.head{g:02}: the packed bytes of {name} differ")

    def run(self):
        for p in self.passes:
            name = f"pass{p:04}"
            if self.trace[f"{name}.base"].item() < self.cache.get_seq_length(self.layers[-1]):
                self.cache.new_turn()                   # LoopServe: the answer's rows are gone
            expect(self.trace[f"{name}.base"].item() == self.cache.get_seq_length(self.layers[-1]), f"{name}: its base")
            if self.method == "lychee":
                self.cache.read(self.trace[f"{name}.tokens"][None])
            for l in self.layers:
                self.layer(p, l)


class SonicReplay(Replay):
    """SONIC's port makes passes of its own: they are the trace's, in its order."""

    def __init__(self, method, trace, cache, config):
        super().__init__(method, trace, cache, config)
        self.cache.forward = self.play_pass
        self.k_max, self.p, self.rows = len(self.cache.e_pos), 0, {}

    def play_pass(self, branch={}, **what):
        """In place of the cache's forward: the model's passes come from the trace."""
        import torch
        nexus = bool(branch)
        ids = what.get("input_ids")
        if nexus:
            turn, T = self.cache.turn - 1, what["inputs_embeds"].shape[1]
            ids = torch.tensor([[-1 - (turn * self.k_max + j) for j in range(T)]])
        self.play(ids[0].tolist(), what.get("attention_mask"))

    def play(self, ids, see=None):
        """A pass over these ids."""
        import torch
        from transformers.integrations.sdpa_attention import sdpa_attention_forward
        p, at = self.p, f"pass{self.p:04}"
        self.settle()
        self.same(f"{at}.tokens", ids)
        base, step = self.trace[f"{at}.base"].item(), self.trace[f"{at}.step"].item()
        first = self.cache.layers[0].position
        self.same(f"{at}.positions", list(range(first, first + len(ids))))
        for l in self.layers:
            q, k, v = self.qkv(p, l)
            old = self.rows.get(l, k[:, :, :0])[:, :, :base]
            self.rows[l] = torch.cat([old, k], 2)       # of every token, whether held or not
            key, value = self.cache.update(k, v, l)
            held, T = key.shape[2], q.shape[2]
            mask = see if see is not None else torch.ones(T, held, dtype=torch.bool).tril(held - T)[None, None]
            module = types.SimpleNamespace(num_key_value_groups=self.R, is_causal=True)
            out = sdpa_attention_forward(module, q, key, value, mask, scaling=q.shape[3] ** -.5)[0][0]
            near(f"{at}.layer{l:02}.out", out, self.trace[f"{at}.layer{l:02}.out"])
            if step >= 0:
                read = self.trace[f"{at}.layer{l:02}.qhead00.read"].tolist()
                expect(torch.equal(key, self.rows[l][:, :, read]), f"{at}.layer{l:02}: other rows are read")
        for l, layer in enumerate(self.cache.layers):   # layers without a trace count along
            if l not in self.layers:
                q, k, v = self.qkv(p, self.layers[0])
                self.cache.update(k, v, l)
        self.p += 1

    def settle(self):
        """The pass before is over, and the port has dropped what it drops."""
        import torch
        if not self.p:
            return
        at = f"pass{self.p - 1:04}"
        base = self.trace.get(f"pass{self.p:04}.base", torch.tensor([1 << 30])).item()
        for l in self.layers:
            kept = self.trace[f"{at}.layer{l:02}.head00.kept"].tolist()
            kept = [token for token in kept if token < base]            # the session was truncated since
            equal = torch.equal(self.cache.layers[l].keys, self.rows[l][:, :, kept])
            expect(equal, f"{at}.layer{l:02}: other rows are kept")
        cache, segments, nexus = self.cache, [], []
        for i, (n, K) in enumerate(zip(cache.body, cache.stand_in)):
            segments += [i] * (n + K)
            nexus += [0] * n + [1] * K
        found = self.trace[f"{at}.sonic.segments"].tolist()
        system = [-1] * min(cache.system, len(found))
        segments = (system + segments + [len(cache.body)] * len(found))[:len(found)]
        self.same(f"{at}.sonic.segments", segments)
        self.same(f"{at}.sonic.nexus", ([0] * len(system) + nexus + [0] * len(found))[:len(found)])

    def run(self):
        """The passes of the trace that are not the port's own are fed to it."""
        reply, count = [], len(self.passes)
        while self.p < count:
            at = f"pass{self.p:04}"
            step, tokens = self.trace[f"{at}.step"].item(), self.trace[f"{at}.tokens"].tolist()
            if step >= 0:
                self.cache.ids += tokens
                reply += tokens
                self.play(tokens)
                continue
            later = [p for p in self.passes if p >= self.p and self.trace[f"pass{p:04}.step"].item() < 0]
            prompt = later[0]
            if self.cache.turn >= 0:                    # a Nexus pass begins: the prompt comes behind the port's own
                prompt = next(p for p in later if self.trace.get(f"pass{p + 1:04}.step", [0])[0] >= 0)
            tokens = self.trace[f"pass{prompt:04}.tokens"].tolist()
            self.cache.begin_turn(tokens, reply=reply)
            reply = []
            self.play(tokens)
        self.settle()

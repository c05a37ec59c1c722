"""
Every rule of residuals.py against its equation, and against what all rules promise.

The first part writes each rule a second time, in numpy, for one token and with loops, from the paper and from the authors'
code. The second part walks RULES: a rule that joins it joins every test there.
"""

import math

import numpy as np
import pytest
import torch

import residuals
from configs import ModelConfig
from model import Transformer
from residuals import RULES, rule_of

L, B, T, d = 4, 2, 3, 8
every_rule = pytest.mark.parametrize("residual", RULES)


def small(residual, **changes):
    shape = dict(n_layer=L, d_model=d, n_head=2, n_kv_head=1, vocab_size=23, seq_len=16)
    return ModelConfig(residual=residual, **{**shape, **changes})


def noise(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@torch.no_grad()
def move_off_the_start(*modules):
    """Far enough that no gain is one, no query zero and no routing one-hot."""
    for i, p in enumerate({p: None for module in modules for p in module.parameters()}):
        p.mul_(0.3).add_(0.7 * noise(*p.shape, seed=i + 1))


# ---------------------------------------------------------------------------------------------------------------------
# The rules a second time. Each takes one token's embedding x, the parameters C[k] of each connection and C[-1] of the
# head's reader, the branches F, the rule for its options, and gives what each branch has read and what the head reads.


def rms(x, gain=1.0, eps=1e-6):
    return x / math.sqrt(sum(float(e) ** 2 for e in x) / len(x) + eps) * gain


def centred(x, gain):
    mean = sum(float(e) for e in x) / len(x)
    return rms(x - mean, gain)


def sigmoid(z):
    return 1 / (1 + math.exp(-z))


def softmax(a):
    e = [math.exp(s - max(a)) for s in a]
    return [s / sum(e) for s in e]


def preln(x, C, F, rule):
    reads, h = [], x
    for k in range(2 * L):
        reads.append(rms(h, C[k]["reader.norm.weight"]))
        h = h + F[k](reads[k])
    return [*reads, rms(h, C[-1]["norm.weight"])]


def postln(x, C, F, rule):
    reads, h = [], x
    for k in range(2 * L):
        reads.append(h)
        h = rms(h + F[k](h), C[k]["norm_out.weight"])
    return [*reads, rms(h, C[-1]["norm.weight"])]


def sandwichln(x, C, F, rule):
    reads, h = [], x
    for k in range(2 * L):
        reads.append(rms(h, C[k]["reader.norm.weight"]))
        h = h + rms(F[k](reads[k]), C[k]["norm_out.weight"])
    return [*reads, rms(h, C[-1]["norm.weight"])]


def lns(x, C, F, rule):
    reads, h = [], x
    for k in range(2 * L):
        layer = k // 2 + 1
        applies = rule.at in ("both", "attention" if k % 2 == 0 else "feedforward")
        reads.append(rms(h, C[k]["reader.norm.weight"]) / (math.sqrt(layer) if applies else 1))
        h = h + F[k](reads[k])
    return [*reads, rms(h, C[-1]["norm.weight"])]


def deepnorm(x, C, F, rule):
    reads, h = [], x
    for k in range(2 * L):
        reads.append(h)
        h = centred((2 * L) ** 0.25 * h + F[k](h), C[k]["norm_out.weight"])
    return [*reads, rms(h, C[-1]["norm.weight"])]


def keel(x, C, F, rule):
    reads, h = [], x
    for k in range(2 * L):
        reads.append(rms(h, C[k]["reader.norm.weight"]))
        a = 1 if k < 2 else 2 * L
        h = a * h + F[k](reads[k])
        if k > 0:
            h = rms(h, C[k]["norm_out.weight"])
    return [*reads, rms(h, C[-1]["norm.weight"])]


def layerrope(x, C, F, rule):
    def gain(site, layer):
        pairs = site["gain"][0::2] + 1j * site["gain"][1::2]
        for j in range(d // 2):
            if rule.magnitude:
                offset, slope = site["r"]
                pairs[j] *= math.exp(offset + slope * math.log(layer))
            if rule.rotate:
                offset, slope = site["theta"]
                angle = math.exp(offset + slope * math.log(layer)) * 100 ** (-2 * j / d)
                pairs[j] *= complex(math.cos(angle), math.sin(angle))
        return np.stack([pairs.real, pairs.imag], axis=-1).reshape(d)

    reads, h = [], x
    for k in range(2 * L):
        read, write = ({name: C[k].get(f"{site}.{name}") for name in ("gain", "r", "theta")} for site in ("read", "write"))
        reads.append(rms(h, gain(read, k // 2 + 1)))
        y = F[k](reads[k])
        h = h + gain(write, k // 2 + 1) * (rms(y) if rule.backbone == "peri" else y)
    return [*reads, rms(h, C[-1]["norm.weight"])]


def hc(x, C, F, rule):
    m, reads, streams = rule.m, [], [x] * rule.m
    for k in range(2 * L):
        p = C[k]
        alpha, A, beta = p["alpha"].copy(), p["A"].copy(), p["beta"].copy()
        if rule.dynamic:
            for s in range(m):
                normed = rms(streams[s], eps=1e-8)
                alpha[s] += p["s_in"] * math.tanh(normed @ p["W"][:, 0])
                for t in range(m):
                    A[s, t] += p["s_in"] * math.tanh(normed @ p["W"][:, 1 + t])
                beta[s] += p["s_out"] * math.tanh(normed @ p["W"][:, 1 + m])
        reads.append(rms(sum(alpha[s] * streams[s] for s in range(m)), p["reader.norm.weight"]))
        y = F[k](reads[k])
        streams = [sum(A[s, t] * streams[s] for s in range(m)) + beta[t] * y for t in range(m)]
    return [*reads, rms(sum(streams), C[-1]["norm.weight"])]


def birkhoff(logits, iterations):
    """Of a matrix [destination][source]: softmax of each row, then columns and rows in turn, the last step on columns."""
    H = np.array([softmax(row) for row in logits]) + 1e-6
    for i in range(iterations):
        if i > 0:
            for row in H:
                row /= sum(row) + 1e-6
        for column in H.T:
            column /= sum(column) + 1e-6
    return H


def mhc(x, C, F, rule):
    m, reads, streams = rule.m, [], [x] * rule.m
    for k in range(2 * L):
        p = C[k]
        z = rms(np.concatenate(streams)) @ p["W"]
        read = [sigmoid(p["s"][0] * z[s] + p["bias"][s]) for s in range(m)]
        write = [2 * sigmoid(p["s"][2] * z[t - m] + p["bias"][t - m]) for t in range(m)]  # the last m logits
        if rule.constraint == "identity":
            H = np.eye(m)
        else:  # the logit of what flows from a source to a destination stands at m + m source + destination
            H = [[p["s"][1] * z[m + m * s + t] + p["bias"][m + m * s + t] for s in range(m)] for t in range(m)]
        if rule.constraint == "doubly":
            H = birkhoff(H, rule.iterations)
        if rule.constraint == "row":
            H = [softmax(row) for row in H]
        reads.append(rms(sum(read[s] * streams[s] for s in range(m)), p["reader.norm.weight"]))
        y = F[k](reads[k])
        streams = [sum(H[t][s] * streams[s] for s in range(m)) + write[t] * y for t in range(m)]
    return [*reads, rms(sum(streams) / m, C[-1]["norm.weight"])]


def attnres(x, C, F, rule):
    b = math.ceil(2 * L / rule.n_blocks) if hasattr(rule, "n_blocks") else 1

    def mix(sources, w, key_gain, gain):
        p = softmax([w @ rms(v, key_gain, rule.eps) for v in sources])
        return rms(sum(p_i * v for p_i, v in zip(p, sources)), gain, rule.eps)

    reads, frozen, running = [rms(x, C[0]["reader.norm.weight"])], [x], F[0](rms(x, C[0]["reader.norm.weight"]))
    for k in range(1, 2 * L):
        sources = [*frozen, running]
        reads.append(mix(sources, C[k]["reader.mixture.w"], C[k]["reader.mixture.gain"], C[k]["reader.norm.weight"]))
        y = F[k](reads[k])
        if k % b == 0:
            frozen, running = sources, y
        else:
            running = running + y
    return [*reads, mix([*frozen, running], C[-1]["mixture.w"], C[-1]["mixture.gain"], C[-1]["norm.weight"])]


def mixln(x, C, F, rule):
    reads, h = [], x
    for k in range(2 * L):
        if k // 2 < L // 4:
            reads.append(h)
            h = rms(h + F[k](h), C[k]["norm_out.weight"])
        else:
            reads.append(rms(h, C[k]["reader.norm.weight"]))
            h = h + F[k](reads[k])
    return [*reads, rms(h, C[-1]["norm.weight"])]


def rezero(x, C, F, rule):
    reads, h = [], x
    for k in range(2 * L):
        reads.append(h)
        h = h + C[k]["a"] * F[k](h)
    return [*reads, rms(h, C[-1]["norm.weight"])]


def layerscale(x, C, F, rule):
    reads, h = [], x
    for k in range(2 * L):
        reads.append(rms(h, C[k]["reader.norm.weight"]))
        h = h + C[k]["g"] * F[k](reads[k])
    return [*reads, rms(h, C[-1]["norm.weight"])]


def denseformer(x, C, F, rule):
    reads, h, past = [], x, [x]
    for k in range(2 * L):
        reads.append(rms(h, C[k]["reader.norm.weight"]))
        h = h + F[k](reads[k])
        if k % 2 == 1:
            past.append(h)
            h = sum(a * v for a, v in zip(C[k]["a"], past))
    return [*reads, rms(h, C[-1]["norm.weight"])]


SECOND_FORM = dict(
    preln=preln, postln=postln, sandwichln=sandwichln, lns=lns, deepnorm=deepnorm, keel=keel, layerrope=layerrope, hc=hc, mhc=mhc,
    fullattnres=attnres, blockattnres=attnres, mixln=mixln, rezero=rezero, layerscale=layerscale, denseformer=denseformer,
)  # fmt: skip
VARIANTS = [
    *SECOND_FORM,
    *("lns:at=attention", "lns:at=feedforward", "layerrope:rotate=off", "layerrope:magnitude=off", "layerrope:shared=off"),
    *("layerrope:backbone=peri", "hc:m=1", "hc:m=2", "hc:dynamic=off", "mhc:m=2", "mhc:iterations=3", "mhc:init=uniform"),
    *("mhc:constraint=row", "mhc:constraint=identity", "mhc:constraint=free", "fullattnres:eps=0.01"),
    *("blockattnres:n_blocks=5", "blockattnres:n_blocks=3", "blockattnres:n_blocks=1"),
]


class Sides:
    """One rule, its parameters moved, from the connections of residuals.py and from the second form above."""

    def __init__(self, residual):
        self.rule, self.second_form = rule_of(residual), SECOND_FORM[residual.split(":")[0]]
        cfg = small(residual)
        self.modules = [*self.rule.connections(cfg), self.rule.head_reader(cfg)]
        for module in self.modules:
            module.double()
        move_off_the_start(*self.modules)
        self.matrices = [0.5 * noise(d, d, seed=100 + k) for k in range(2 * L)]
        self.x = noise(B, T, d, seed=99)

    def code(self):
        """What each branch and the head read, (2L + 1, B, T, d)."""
        reads = []

        def branch(M):
            def F(x):
                reads.append(x)
                return torch.tanh(x @ M)

            return F

        state = self.rule.enter(self.x)
        for connection, M in zip(self.modules, self.matrices):
            state = connection(state, branch(M))
        return torch.stack([*reads, self.modules[-1](state)])

    def numpy(self, moved=None, by=0.0):
        """The same from the second form, one parameter moved."""
        values = {p: p.detach().numpy() for module in self.modules for p in module.parameters()}
        x = self.x.detach().numpy()
        if moved is self.x:
            x = x + by
        elif moved is not None:
            values[moved] = values[moved] + by
        C = [{name: values[p] for name, p in module.named_parameters()} for module in self.modules]
        F = [lambda x, M=M.numpy(): np.tanh(x @ M) for M in self.matrices]
        tokens = [[self.second_form(x[i, t], C, F, self.rule) for t in range(T)] for i in range(B)]
        return np.moveaxis(np.array(tokens), 2, 0)


@pytest.mark.parametrize("residual", VARIANTS)
def test_each_rule_is_its_equation(residual):
    sides = Sides(residual)
    ours, theirs = sides.code().detach().numpy(), sides.numpy()
    for k in range(2 * L + 1):
        assert np.abs(ours[k] - theirs[k]).max() < 1e-10 * np.abs(theirs[k]).max(), f"what branch {k} reads"


@pytest.mark.parametrize("residual", VARIANTS)
def test_each_gradient_is_a_difference_quotient_of_the_equation(residual):
    sides = Sides(residual)
    sides.x.requires_grad_()
    weight = noise(2 * L + 1, B, T, d, seed=98)
    (sides.code() * weight).sum().backward()
    parameters = {p: name for module in sides.modules for name, p in module.named_parameters()}
    for i, (p, name) in enumerate({sides.x: "x", **parameters}.items()):
        u = noise(*p.shape, seed=200 + i).numpy()
        step = 1e-6
        difference = (weight.numpy() * (sides.numpy(p, step * u) - sides.numpy(p, -step * u))).sum() / (2 * step)
        slope = 0.0 if p.grad is None else (p.grad.numpy() * u).sum()
        assert slope == pytest.approx(difference, rel=1e-5, abs=1e-6), name


def rotated(x, t):
    """One head's query or key at position t: channel j turns with channel j + half."""
    half, y = len(x) // 2, x.copy()
    for j in range(half):
        angle = t * 10000.0 ** (-j / half)
        y[j] = x[j] * math.cos(angle) - x[j + half] * math.sin(angle)
        y[j + half] = x[j] * math.sin(angle) + x[j + half] * math.cos(angle)
    return y


def moda(X, C, branches, rule, n_head, n_kv_head):
    """MoDA on the tokens X (T, d) of one sequence, its branches a layer's weights: what each branch and the head read."""
    D, K = d // n_head, n_kv_head
    reads, h, slots = [], list(X), [[] for _ in X]
    for k in range(2 * L):
        W, p = branches[k], C[k]
        x = [h_t if rule.post else rms(h_t, p["reader.norm.weight"]) for h_t in h]
        reads.append(x)
        if k % 2 == 0:
            q, keys, values = ([(W[f"{name}.weight"] @ x_t).reshape(-1, D) for x_t in x] for name in "qkv")
            y = []
            for t in range(len(x)):
                heads = []
                for i in range(n_head):
                    g, query = i // (n_head // K), rotated(q[t][i], t)
                    before = [(rotated(keys[s][g], s), values[s][g]) for s in range(t + 1)]
                    depth = [(key[g], value[g]) for key, value in slots[t]]
                    weights = softmax([query @ key / math.sqrt(D) for key, _ in before + depth])
                    heads.append(sum(w * value for w, (_, value) in zip(weights, before + depth)))
                y.append(W["out.weight"] @ np.concatenate(heads))
            for t in range(len(x)):
                slots[t].append((keys[t], values[t]))
        else:
            gates = [W["gate.weight"] @ x_t for x_t in x]
            y = [W["out.weight"] @ (g / (1 + np.exp(-g)) * (W["up.weight"] @ x_t)) for g, x_t in zip(gates, x)]
            if k < 2 * L - 1:
                for t, x_t in enumerate(x):
                    slots[t].append(np.split((p["kv.weight"] @ x_t).reshape(2 * K, D), 2))
        h = [a + b for a, b in zip(h, y)]
        if rule.post:
            h = [rms(h_t, p["norm_out.weight"]) for h_t in h]
    return np.array([*reads, [rms(h_t, C[-1]["norm.weight"]) for h_t in h]])


@pytest.mark.parametrize("residual", ["moda", "moda:post=on"])
def test_moda_and_its_gradients_are_its_equation(residual):
    cfg = small(residual, n_head=4, n_kv_head=2)
    model, rule = Transformer(cfg).double(), rule_of(residual)
    move_off_the_start(model)
    weight, x = noise(2 * L + 1, T, d, seed=98), noise(1, T, d, seed=99).requires_grad_()
    reads, state = [], rule.enter(x)
    for connection, F in model.branches():
        entrance = "qkv" if hasattr(F, "qkv") else "forward"  # MoDA takes attention apart
        setattr(F, entrance, lambda x, inner=getattr(F, entrance): reads.append(x) or inner(x))
        state = connection(state, F)
    ours = torch.cat([*reads, model.reader(state)])
    (ours * weight).sum().backward()

    connections, branches = zip(*model.branches())
    modules = [*connections, model.reader, *branches]

    def theirs(moved=None, by=0.0):
        values = {p: p.detach().numpy() + (by if p is moved else 0.0) for module in modules for p in module.parameters()}
        C = [{name: values[p] for name, p in module.named_parameters()} for module in modules]
        return moda(x[0].detach().numpy() + (by if moved is x else 0.0), C[: 2 * L + 1], C[2 * L + 1 :], rule, 4, 2)

    ours = ours.detach().numpy()
    assert np.abs(ours - theirs()).max() < 1e-10 * np.abs(ours).max()
    for i, (p, name) in enumerate({x: "x", **{p: name for name, p in model.named_parameters() if p.shape[0] != 23}}.items()):
        u, step = noise(*p.shape, seed=200 + i).numpy(), 1e-6
        by = step * (u[0] if p is x else u)
        difference = (weight.numpy() * (theirs(p, by) - theirs(p, -by))).sum() / (2 * step)
        assert (p.grad.numpy() * u).sum() == pytest.approx(difference, rel=1e-5, abs=1e-6), name


def test_every_rule_has_a_second_form():
    assert {*SECOND_FORM, "moda"} >= set(RULES)


# ---------------------------------------------------------------------------------------------------------------------
# What all rules promise


TOKENS = torch.randint(23, (2, 7), generator=torch.Generator().manual_seed(0))


def build(residual, moved=True, **changes):
    """A model in float64, by default with all parameters off their starting points."""
    torch.manual_seed(0)
    model = Transformer(small(residual, **changes)).double()
    if moved:
        move_off_the_start(*(connection for connection, _ in model.branches()), model.reader)
        with torch.no_grad():
            model.embed.weight.mul_(50)
    return model


def logits(model, **changes):
    with torch.no_grad():
        return model(TOKENS, **changes)


@every_rule
def test_a_later_token_changes_no_earlier_logit(residual):
    model, other = build(residual), TOKENS.clone()
    other[:, 4] += 1
    other %= 23
    ours, theirs = logits(model), model(other)
    assert (ours[:, :4] - theirs[:, :4]).abs().max() < 1e-12
    assert (ours[:, 4:] - theirs[:, 4:]).abs().amax((0, 2)).min() > 1e-6


@every_rule
def test_every_parameter_has_a_gradient(residual):
    model = build(residual)
    model(TOKENS).square().sum().backward()
    for name, p in model.named_parameters():
        assert p.grad is not None and p.grad.isfinite().all() and p.grad.abs().max() > 0, name


@every_rule
def test_float64_is_float64_throughout(residual):
    model = build(residual, n_layer=2)
    exact = logits(model)
    assert exact.dtype == torch.float64
    rounded = logits(model.float())
    assert rounded.dtype == torch.float32
    assert 1e-12 < (exact - rounded).abs().max() / exact.abs().max() < 1e-4


@every_rule
def test_a_saved_model_loads_into_a_fresh_one(residual, tmp_path):
    model, fresh = build(residual), build(residual, moved=False)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    fresh.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
    assert torch.equal(logits(model), logits(fresh))


@every_rule
def test_greedy_generation_is_the_argmax_of_one_pass(residual):
    model, prompt = build(residual), TOKENS[0].tolist()
    new = model.generate(prompt, 4, temperature=0)
    scores = model(torch.tensor([prompt + new]))
    assert scores[0, len(prompt) - 1 : -1].argmax(-1).tolist() == new


@every_rule
def test_the_whole_model_compiles_without_a_graph_break(residual):
    torch._dynamo.reset()
    model = build(residual, n_layer=3)
    y = logits(torch.compile(model, fullgraph=True, backend="aot_eager"))
    assert (y - logits(model)).abs().max() < 1e-12 * y.abs().max()


@pytest.mark.parametrize("residual", ["hc", "mhc:iterations=2", "fullattnres", "moda"])
def test_a_compiled_backward_pass_gives_the_same_gradients(residual):
    torch._dynamo.reset()
    model, gradients = build(residual, n_layer=2), []
    for forward in model, torch.compile(model, fullgraph=True, backend="aot_eager"):
        gradients.append(torch.autograd.grad(forward(TOKENS).square().sum(), [*model.parameters()]))
    for (name, _), eager, compiled in zip(model.named_parameters(), *gradients):
        assert (eager - compiled).abs().max() <= 1e-10 * eager.abs().max(), name


@every_rule
def test_in_bf16_tables_stay_exact(residual):
    model, tables = build(residual), lambda model: [m.value for m in model.modules() if isinstance(m, residuals.Table)]
    before = [table.clone() for table in tables(model)]
    model.bfloat16()
    assert before and all(torch.equal(a, b) for a, b in zip(before, tables(model)))
    y = model(TOKENS)
    y.float().square().sum().backward()
    assert y.dtype == torch.bfloat16 and y.isfinite().all()


@every_rule
def test_a_step_in_bf16_with_its_float32_parameters_is_near_the_exact_one(residual):
    model = build(residual, moved=False, d_model=32)
    exact = logits(model)
    keep_precision(model.float())
    y = model(TOKENS)
    y.float().square().sum().backward()
    assert y.dtype == torch.bfloat16
    assert (y - exact).norm() < 0.05 * exact.norm()
    assert all(p.grad.dtype == p.dtype and p.grad.isfinite().all() for p in model.parameters())


def keep_precision(model):
    """bf16 as --precision=bf16 has it: all but what a rule wants to stay float32."""
    kept = {id(getattr(m, name)) for m in model.modules() for name in getattr(m, "keep_float32", ())}
    for p in model.parameters():
        if id(p) not in kept:
            p.data = p.data.bfloat16()


@every_rule
def test_names_of_exempted_parameters_exist(residual):
    named = [(m, name) for m in build(residual).modules() for key in ("no_decay", "keep_float32") for name in getattr(m, key, ())]
    there = {(type(m), name) for m, name in named if isinstance(getattr(m, name), torch.nn.Parameter)}
    assert {(type(m), name) for m, name in named} == there  # a module may hold None in the place of one


@pytest.mark.parametrize(
    ("residual", "no_decay", "keep_float32"),
    [
        ("preln", set(), set()),
        ("hc", {"alpha", "A", "beta"}, set()),
        ("mhc", {"bias", "s"}, {"bias", "s"}),
        ("fullattnres", set(), {"w", "gain"}),
        ("blockattnres", set(), {"w", "gain"}),
        ("moda", set(), set()),
        ("layerrope", {"gain", "r", "theta"}, {"gain", "r", "theta"}),
    ],
)
def test_what_is_exempt_is_what_the_papers_exempt(residual, no_decay, keep_float32):
    modules = list(build(residual).modules())
    assert {name for m in modules for name in getattr(m, "no_decay", ())} == no_decay
    assert {name for m in modules for name in getattr(m, "keep_float32", ())} == keep_float32


# ---------------------------------------------------------------------------------------------------------------------
# Initialisation


STARTS_AS_PRELN = {"preln", "hc", "mhc", "fullattnres", "blockattnres", "denseformer"}


def beside_preln(residual, **shape):
    """How far logits at initialisation are from those of a Pre-LN model with the same branches, relative."""
    model, plain = build(residual, moved=False, **shape), build("preln", moved=False, **shape)
    theirs, own = model.state_dict(), plain.state_dict()
    plain.load_state_dict({name: theirs.get(name, w) for name, w in own.items()})
    for module in [*model.modules(), *plain.modules()]:
        if hasattr(module, "eps") and residuals.EPS == 0:
            module.eps = 0.0
    return ((logits(model) - logits(plain)).norm() / logits(plain).norm()).item()


@pytest.fixture
def without_eps(monkeypatch):
    monkeypatch.setattr(residuals, "EPS", 0.0)
    monkeypatch.setattr(residuals.FullAttnRes, "eps", 0.0)
    monkeypatch.setattr(residuals, "sinkhorn", lambda logits, n, sinkhorn=residuals.sinkhorn: sinkhorn(logits, n, eps=0.0))


@every_rule
def test_a_rule_says_truly_whether_it_starts_as_preln(residual, without_eps):
    difference = beside_preln(residual)
    if RULES[residual].starts_as_preln:
        assert difference < 1e-10
    else:
        assert difference > 1e-3


def test_these_rules_start_as_preln():
    assert {residual for residual in RULES if RULES[residual].starts_as_preln} == STARTS_AS_PRELN



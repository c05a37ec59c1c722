"""
Every rule of residuals.py against its equation, and against what all rules promise.

The first part writes each rule a second time, in numpy, for one token and with loops, from the paper and from the authors'
code. The second part walks RULES: a rule that joins it joins every test there.
"""

import math

import numpy as np
import pytest
import torch
from torch.nn.functional import normalize

import residuals
from configs import Mistake, ModelConfig
from model import Attention, Transformer, rotary
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
        z = rms(np.concatenate(streams)) @ p["W"] if rule.dynamic else np.zeros(m * m + 2 * m)
        scale = p["s"] if rule.dynamic else np.zeros(3)
        read = [sigmoid(scale[0] * z[s] + p["bias"][s]) for s in range(m)]
        write = [2 * sigmoid(scale[2] * z[t - m] + p["bias"][t - m]) for t in range(m)]  # the last m logits
        if rule.constraint == "identity":
            H = np.eye(m)
        else:  # the logit of what flows from a source to a destination stands at m + m source + destination
            H = [[scale[1] * z[m + m * s + t] + p["bias"][m + m * s + t] for s in range(m)] for t in range(m)]
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
    *("mhc:dynamic=off", "mhc:constraint=row", "mhc:constraint=identity", "mhc:constraint=free", "fullattnres:eps=0.01"),
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
        F = [lambda x, M=M: np.tanh(x @ M.numpy()) for M in self.matrices]
        tokens = [[self.second_form(x[i, t], C, F, self.rule) for t in range(T)] for i in range(B)]
        return np.moveaxis(np.array(tokens), 2, 0)


@pytest.mark.parametrize("residual", VARIANTS)
def test_each_rule_is_its_equation(residual):
    sides = Sides(residual)
    ours, theirs = sides.code().detach().numpy(), sides.numpy()
    for k in range(2 * L + 1):
        assert np.abs(ours[k] - theirs[k]).max() < 1e-10 * np.abs(theirs[k]).max(), f"what branch {k} reads"


@pytest.mark.parametrize("residual", [v for v in VARIANTS if not any(f":{o}=" in v for o in ("m", "iterations", "init", "at", "eps"))])
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
        inner = getattr(F, entrance)
        setattr(F, entrance, lambda x, inner=inner: reads.append(x) or inner(x))
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
        with torch.no_grad():  # and branches that count
            for w in [model.embed.weight, *(w for _, F in model.branches() for w in F.parameters())]:
                w.mul_(20)
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


@pytest.mark.parametrize("residual", [key if key != "mhc" else "mhc:iterations=3" for key in RULES])  # 20 take long
def test_the_whole_model_compiles_without_a_graph_break(residual):
    torch._dynamo.reset()
    model = build(residual, n_layer=3)
    y = logits(torch.compile(model, fullgraph=True, backend="aot_eager"))
    assert (y - logits(model)).abs().max() < 1e-12 * y.abs().max()


@pytest.mark.parametrize(("residual", "layers"), [("mhc:iterations=2", 1), ("fullattnres", 1), ("moda", 2)])
def test_a_compiled_backward_pass_gives_the_same_gradients(residual, layers):
    if residual == "moda" and torch.__version__ < "2.13":
        pytest.skip("torch 2.11 compiles this function of many inputs to a wrong gradient; --compile does not compile it")
    torch._dynamo.reset()
    model, gradients = build(residual, n_layer=layers), []
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
@pytest.mark.parametrize("precision", ["amp", "bf16"])
def test_a_step_in_half_precision_is_near_the_exact_one(residual, precision):
    model = build(residual, moved=False, d_model=32)
    exact = logits(model)
    model.float()
    if precision == "bf16":
        keep_precision(model)
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "amp"):
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
def test_on_the_meta_device_a_step_needs_no_numbers(residual):
    with torch.device("meta"):
        model = Transformer(small(residual))
        y = model(TOKENS.to("meta"))
        y.sum().backward()
    assert y.shape == (2, 7, 23) and all(p.grad.shape == p.shape for p in model.parameters())


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


SHALLOW = dict(n_layer=8, d_model=64, n_head=4, n_kv_head=4)


@pytest.mark.parametrize(
    ("residual", "measured", "with_the_weights_of_torch_2_11"),  # which draws others from the same seed
    [
        ("hc", 4.5e-4, 4.5e-4),
        ("mhc", 9.3e-6, 6.55e-6),
        ("fullattnres", 0.342, 0.294),
        ("fullattnres:eps=1e-6", 0.0455, 0.0396),
        ("blockattnres", 0.124, 0.104),
        ("denseformer", 0, 0),
    ],
)
def test_with_eps_a_small_model_starts_as_far_from_preln_as_measured(residual, measured, with_the_weights_of_torch_2_11):
    expected = with_the_weights_of_torch_2_11 if torch.__version__ < "2.13" else measured
    assert beside_preln(residual, **SHALLOW) == pytest.approx(expected, rel=0.05, abs=1e-12)


@pytest.mark.parametrize("residual", ["fullattnres", "blockattnres"])
def test_queries_are_zero_after_all_initialisation(residual):
    model = build(residual, moved=False)
    mixtures = [module for module in model.modules() if isinstance(module, residuals.Mixture)]
    assert len(mixtures) == 2 * L  # the first attention has none, the head has one
    assert all(m.w.abs().max() == 0 and torch.equal(m.gain, torch.ones_like(m.gain)) for m in mixtures)


@pytest.mark.parametrize("m", [1, 2, 4, 8])
def test_hc_starts_reading_stream_k_mod_m_and_writing_to_all(m):
    for k, connection in enumerate(rule_of(f"hc:m={m}").connections(small(f"hc:m={m}"))):
        assert connection.alpha.tolist() == [float(s == k % m) for s in range(m)]
        assert torch.equal(connection.A, torch.eye(m)) and torch.equal(connection.beta, torch.ones(m))
        assert connection.W.abs().max() == 0 and connection.s_in == connection.s_out == torch.tensor(0.01)


def test_mhc_starts_with_the_coefficients_that_the_authors_code_has():
    for k, connection in enumerate(rule_of("mhc").connections(small("mhc"))):
        alpha, A, beta = connection.double().route(noise(1, 1, 4, d))
        read, off = alpha[0, 0], ~torch.eye(4, dtype=bool)
        assert connection.W.abs().max() == 0 and connection.s.tolist() == pytest.approx([0.01] * 3)
        assert read[k % 4].item() == pytest.approx(0.99966, abs=5e-6)
        assert read[torch.arange(4) != k % 4].tolist() == pytest.approx([0.000335] * 3, abs=5e-7)
        assert beta[0, 0].tolist() == [1.0] * 4
        assert A[0, 0].diagonal().tolist() == pytest.approx([0.99899] * 4, abs=5e-6)
        assert A[0, 0][off].tolist() == pytest.approx([0.000336] * 12, abs=5e-7)
    for maps, diagonal in (48, 0.953), (64, 0.938), (140, 0.871):
        product = torch.linalg.matrix_power(A[0, 0], maps)
        assert product.diagonal().tolist() == pytest.approx([diagonal] * 4, abs=5e-4)
    assert product.sum(0).tolist() == pytest.approx([0.99986] * 4, abs=5e-6)


def test_the_uniform_start_of_mhc_mixes_nearly_evenly():
    torch.manual_seed(0)
    connection = Transformer(small("mhc:init=uniform", d_model=64)).blocks[0].attn_residual.double()
    alpha, A, beta = connection.route(noise(B, T, 4, 64))
    assert connection.W.std().item() == pytest.approx(0.02, rel=0.05) and connection.bias.abs().max() == 0
    for coefficient, value in (alpha, 0.5), (A, 0.25), (beta, 1.0):
        assert (coefficient - value).abs().max() < 0.01


def test_layerrope_starts_with_offsets_zero_and_slopes_minus_a_half():
    cfg = small("layerrope", d_model=2048, n_head=16, n_layer=24)
    first = RULES["layerrope"].connections(cfg)
    for layer in (1, 2, 24):
        gain = first[2 * layer - 2].read.double()().detach()
        assert gain.norm().item() == pytest.approx((2048 / layer) ** 0.5)
        if layer == 1:
            assert (gain < 0).sum() == 54  # as the article counts them


def test_branches_start_as_each_paper_has_them():
    drawn = {F: p for F, p in build("preln", moved=False).state_dict().items() if "residual" not in F and "norm" not in F}
    for residual in "hc", "mhc", "hc:m=2", "deepnorm", "keel", "fullattnres":
        for name, w in build(residual, moved=False).state_dict().items():
            factor = 1.0
            if residual[:2] in ("hc", "mh") and name.endswith("out.weight"):
                factor = 2**-0.5 if "m=2" in residual else 0.5
            if residual == "deepnorm" and any(f".{part}.weight" in name for part in ("v", "out", "gate", "up")):
                factor = (8 * L) ** -0.25
            if name in drawn:
                assert torch.allclose(w, factor * drawn[name], rtol=1e-6), (residual, name)
    for name, w in drawn.items():
        assert w.abs().max() <= 0.06 and w.std() > 0.01, name


@pytest.mark.parametrize(("layers", "post"), [(3, 0), (4, 1), (7, 1), (8, 2), (24, 6)])
def test_the_first_quarter_of_mixln_is_postln(layers, post):
    kinds = [type(c).__name__ for c in RULES["mixln"].connections(small("mixln", n_layer=layers))]
    assert kinds == ["PostLN"] * 2 * post + ["PreLN"] * 2 * (layers - post)


# ---------------------------------------------------------------------------------------------------------------------
# Parameters


@pytest.mark.parametrize(
    ("residual", "millions", "more"),
    [
        ("preln", 405.41, 0),
        ("lns", 405.41, 0),
        ("deepnorm", 405.41, 0),
        ("sandwichln", 405.46, 49_152),
        ("keel", 405.45, 48_128),
        ("fullattnres", 405.51, 98_304),
        ("blockattnres", 405.51, 98_304),
        ("hc", 405.70, 296_160),
        ("mhc", 410.13, 4_719_888),
        ("moda", 453.64, 48_234_496),
    ],
)
def test_parameters_are_table_6(residual, millions, more):
    n = count(ModelConfig(residual=residual, n_layer=24, d_model=1024, n_head=16))
    assert round(n / 1e6, 2) == millions and n == 405_406_720 + more


def test_layerrope_has_fewer_gains_than_preln():
    shape = dict(n_layer=24, d_model=2048, n_head=16, vocab_size=64)
    assert count(ModelConfig(residual="preln", **shape)) - count(ModelConfig(residual="layerrope", **shape)) == 90_096


def test_free_gains_of_layerrope_are_as_many_as_the_paper_says():
    shape = dict(n_layer=12, d_model=768, n_head=12, vocab_size=64)
    shared, free = (count(ModelConfig(residual=f"layerrope:shared={option}", **shape)) for option in ("on", "off"))
    assert free - shared == 33_792


def count(cfg):
    with torch.device("meta"):
        return sum(p.numel() for p in Transformer(cfg).parameters())


# ---------------------------------------------------------------------------------------------------------------------
# The books balance


@every_rule
def test_what_a_branch_reads_is_the_sum_of_its_paths(residual):
    model, paths = build(residual), None
    state = model.enter(model.embed(TOKENS))
    outputs = [model.embed(TOKENS)]  # the embedding, then what each branch has written
    for connection, F in model.branches():
        if type(connection).route is residuals.Residual.route:
            with pytest.raises(NotImplementedError, match=f"{type(connection).title} has no"):
                connection.route(state)
            return
        alpha, A, beta = (x.expand(2, 7, *x.shape[-r:]) for x, r in zip(connection.route(state), (1, 2, 1)))
        if paths is None:
            paths = torch.ones(2, 7, 1, alpha.shape[-1], dtype=torch.float64)  # (B, T, outputs so far, slots)
        read = connection.norm(torch.einsum("btis,bts,ibtd->btd", paths, alpha, torch.stack(outputs)))

        def checked(x, F=F, read=read):  # up to a factor that does not depend on what is read: LNS has one
            assert (normalize(x, dim=-1) - normalize(read, dim=-1)).abs().max() < 1e-12
            outputs.append(F(x))
            return outputs[-1]

        state = connection(state, checked)
        paths = torch.cat([torch.einsum("btis,btsr->btir", paths, A), beta.unsqueeze(-2)], -2)
    slots = paths.shape[-1]
    if "attnres" in residual:
        weights = model.reader.weights(state)
    else:  # the head reads the sum of streams, their mean, or the last slot
        weights = {"hc": torch.ones(slots), "mhc": torch.full((slots,), 1 / slots)}.get(residual, torch.eye(slots)[-1]).double()
    read = torch.einsum("btis,bts,ibtd->btd", paths, weights.expand(2, 7, -1), torch.stack(outputs))
    assert (read - model.reader.read(state)).abs().max() < 1e-12 * read.abs().max()


def test_these_rules_have_a_route():
    cfg = small("preln")
    routed = {key for key in RULES if all(type(c).route is not residuals.Residual.route for c in RULES[key].connections(cfg))}
    assert routed == {"preln", "lns", "hc", "mhc", "fullattnres", "blockattnres", "rezero", "denseformer"}


@pytest.mark.parametrize("residual", ["preln", "hc", "lns"])
def test_who_mixes_no_sources_has_no_mixing_weights(residual):
    model = build(residual)
    with pytest.raises(NotImplementedError, match="mixes no sources"):
        model.reader.weights(model.enter(model.embed(TOKENS)))


# ---------------------------------------------------------------------------------------------------------------------
# Streams


def test_zero_branches_and_a_cyclic_map_permute_the_streams():
    connection = rule_of("hc:dynamic=off")(small("hc"), 0).double()
    with torch.no_grad():
        connection.A.copy_(torch.eye(4).roll(1, 1))  # from stream s to stream s + 1
    H = noise(B, T, 4, d)
    assert torch.equal(connection(H, torch.zeros_like), H.roll(1, 2))
    assert not torch.equal(H.roll(1, 2), H.roll(-1, 2))


@pytest.mark.parametrize("residual", ["hc", "mhc"])
def test_streams_persist_and_collapse_once(residual, monkeypatch):
    model = build(residual, moved=False)
    with torch.no_grad():  # write to the first stream alone
        if residual == "hc":
            model.blocks[0].attn_residual.beta[1:] = 0
        else:
            model.blocks[0].attn_residual.bias[-3:] = -30
    states, collapses, read = [], [], model.reader.read
    for block in model.blocks:
        block.register_forward_hook(lambda block, args, H: states.append(H))
    monkeypatch.setattr(model.reader, "read", lambda H: collapses.append(H) or read(H))
    for connection, _ in model.branches():
        monkeypatch.setattr(connection.reader, "read", lambda H: collapses.append(H) or read(H))
    logits(model)
    assert len(collapses) == 1 and collapses[0].shape == (2, 7, 4, d)
    for H in states:
        assert (H[..., 0, :] - H[..., 1, :]).abs().max() > 1e-6
        assert (H[..., 1, :] - H[..., 2, :]).abs().max() < 1e-6


@pytest.mark.parametrize(("spread", "columns", "rows"), [(1, 1e-5, 1e-5), (5, 1e-5, 0.06), (30, 1e-5, 1.0)])
def test_sinkhorn_is_as_near_to_doubly_stochastic_as_20_iterations_get(spread, columns, rows):
    connection = rule_of("mhc")(small("mhc"), 0)
    logits = spread * (2 * torch.rand(10_000, 16, generator=torch.Generator().manual_seed(0)) - 1)
    A = connection.constrain(logits)
    assert A.isfinite().all() and A.min() >= 0
    assert (A.sum(-1) - 1).abs().max() < columns  # what leaves a source: a column of the paper's matrix
    assert (A.sum(-2) - 1).abs().max() < rows  # what reaches a destination
    if spread == 5:  # not for want of precision
        assert ((A.sum(-2) - 1).abs().amax(-1) > 1e-4).double().mean() > 0.3


@pytest.mark.parametrize("constraint", ["row", "identity", "free", "doubly"])
def test_each_constraint_of_mhc_holds_what_it_names(constraint):
    connection = rule_of(f"mhc:constraint={constraint}")(small("mhc"), 0).double()
    H = noise(B, T, 4, d)
    _, start, _ = connection.route(H)
    assert (start - torch.eye(4)).abs().max() < 2e-3
    move_off_the_start(connection)
    _, A, _ = connection.route(H)
    reaches = (A.sum(-2) - 1).abs().max()
    assert reaches < {"row": 1e-12, "identity": 1e-12, "doubly": 0.06, "free": math.inf}[constraint]
    leaves = (A.sum(-1) - 1).abs().max()
    assert leaves < 1e-5 if constraint in ("identity", "doubly") else leaves > 0.1
    assert constraint != "free" or reaches > 0.1


def test_residual_logits_of_mhc_have_gradients_from_the_first_step_on():
    model = build("mhc", moved=False)
    with torch.no_grad():  # while streams are equal, it matters to no one how they mix
        for connection, _ in model.branches():
            connection.bias[-4:] += noise(4)
    model(TOKENS).square().sum().backward()
    for k, (connection, _) in enumerate(model.branches()):
        grad = connection.bias.grad[4:20]
        assert grad.isfinite().all() and (k == 0 or grad.abs().max() > 0)


@pytest.mark.parametrize("precision", ["amp", "bf16"])
def test_routing_of_mhc_is_float32_whatever_the_streams(precision):
    connection, H = rule_of("mhc")(small("mhc"), 0), noise(B, T, 4, d)
    move_off_the_start(connection)
    if precision == "bf16":
        keep_precision(connection)
        H = H.bfloat16()
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "amp"):
        coefficients = connection.route(H.float() if precision == "amp" else H)
    for ours, exact in zip(coefficients, connection.double().route(H.double())):
        assert ours.dtype == torch.float32 and (ours - exact).abs().max() < 1e-5


@pytest.mark.parametrize(("residual", "precision"), [("hc", "amp"), ("mhc", "amp"), ("mhc", "bf16")])
def test_streams_are_mixed_in_float32_and_rounded_once(residual, precision):
    connection, H = rule_of(residual)(small(residual), 0), noise(B, T, 4, d).float()
    move_off_the_start(connection)
    if precision == "bf16":
        keep_precision(connection)
        H = H.bfloat16()
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "amp"), torch.no_grad():
        _, A, _ = connection.route(H)
        mixed = connection(H, torch.zeros_like)
    exact = torch.einsum("btsr,btsd->btrd", A.double(), H.double())
    half_a_step = torch.finfo(H.dtype).eps / 2 * exact.abs()
    assert mixed.dtype == H.dtype and (mixed - exact).abs().sub(half_a_step).max() < 1e-6


# ---------------------------------------------------------------------------------------------------------------------
# Sources


@pytest.mark.parametrize("n_blocks", [8, 7, 3, 1])
@pytest.mark.parametrize("layers", [4, 12, 14, 16, 20, 24, 28, 32])
def test_a_branch_of_block_attnres_mixes_as_many_sources_as_the_authors_code(layers, n_blocks):
    counts = source_counts(f"blockattnres:n_blocks={n_blocks}", layers)
    b = math.ceil(2 * layers / n_blocks)
    assert counts[0] == 1 and counts[1:-1] == [2 + (k - 1) // b for k in range(1, 2 * layers)]
    assert counts[-1] == 1 + math.ceil(2 * layers / b)
    if n_blocks == 8 and layers >= 16:
        assert sum(counts[1:-1]) == {16: 167, 20: 211, 24: 255, 28: 299, 32: 343}[layers] and counts[-1] == 9


def test_full_attnres_mixes_the_embedding_and_all_earlier_outputs():
    counts = source_counts("fullattnres", 24)
    assert counts == [1, *range(2, 2 * 24 + 2)] and sum(counts[1:]) == 24 * (2 * 24 + 3) == 1224


def source_counts(residual, layers):
    cfg, rule = small(residual, n_layer=layers, d_model=2, n_head=1), rule_of(residual)
    state, counts = rule.enter(torch.ones(1, 1, 2)), []
    for connection in rule.connections(cfg):
        counts.append(connection.reader.weights(state).shape[-1])
        state = connection(state, torch.zeros_like)
    return [*counts, rule.head_reader(cfg).weights(state).shape[-1]]


def attnres_by_hand(model, b, eps=1e-5, skip=None):
    """Logits and the states z_0 ... z_L that the probes compare, from the parameters alone, layer `skip` left out."""

    def normed(x, eps):
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt()

    def mix(sources, mixture):
        p = torch.stack([normed(v, eps) @ (mixture.w * mixture.gain) for v in sources]).softmax(0)
        return (p.unsqueeze(-1) * torch.stack(sources)).sum(0)

    frozen, running, newest, z = [], model.embed(TOKENS), False, []
    for k, (connection, F) in enumerate(model.branches()):
        sources = [*frozen, running]
        h = running if k == 0 or newest else mix(sources, connection.reader.mixture)
        if k % 2 == 0:
            z.append(h if k % b == 0 else running)
        if k // 2 == skip:
            if k == 0:
                frozen = [running]
            newest = k % 2 == 1 and ((k + 1) % b == 0 or k == 2 * len(model.blocks) - 1)
            continue
        y = F(normed(h, 1e-6 if k == 0 else eps) * connection.norm.weight)
        if k % b == 0:
            frozen, running = sources, y
        else:
            running = running + y
        newest = False
    h = running if newest else mix([*frozen, running], model.reader.mixture)
    return model.head(normed(h, eps) * model.reader.norm.weight), [*z, h]


@pytest.mark.parametrize("residual", ["fullattnres", "blockattnres", "blockattnres:n_blocks=4", "blockattnres:n_blocks=2"])
@pytest.mark.parametrize("skip", [None, 0, 1, 2, 3, 4, 5])
def test_states_and_skips_of_attnres_are_those_of_the_authors_probes(residual, skip):
    model = build(residual, n_layer=6)
    b = math.ceil(12 / int(residual[-1])) if residual[-1].isdigit() else {"fullattnres": 1, "blockattnres": 2}[residual]
    expected, states = attnres_by_hand(model, b, skip=skip)
    h, z = model.enter(model.embed(TOKENS)), []
    for i, block in enumerate(model.blocks):
        z.append(block.attn_residual.reader.vector(h))
        h = block.skip(h) if i == skip else block(h)
    z.append(model.reader.vector(h))
    for i, (ours, theirs) in enumerate(zip(z, states, strict=True)):
        assert (ours - theirs).abs().max() < 1e-12 * theirs.abs().max(), f"z_{i}"
    ours = model.head(model.reader(h))
    assert (ours - expected).abs().max() < 1e-12 * expected.abs().max()


# ---------------------------------------------------------------------------------------------------------------------
# Skip and swap


@pytest.mark.parametrize(
    "residual", ["preln", "postln", "sandwichln", "lns", "deepnorm", "keel", "layerrope", "hc", "mhc", "mixln", "rezero"]
)
def test_without_a_layer_the_stream_goes_past_it_unchanged(residual):
    model = build(residual)
    h = noise(2, 7, 4, d) if residual in ("hc", "mhc") else noise(2, 7, d)
    assert all(torch.equal(block.skip(h), h) for block in model.blocks)


def test_slots_of_a_skipped_layer_of_moda_are_zeros_that_softmax_sees():
    model = build("moda")
    h, C = model.blocks[0](model.enter(model.embed(TOKENS)))
    for i, block in enumerate(list(model.blocks)[1:], 1):
        x, slots = block.skip((h, C))
        assert x is h and slots[: len(C)] == C and len(slots) == len(C) + (2 if i < L - 1 else 1)
        assert all(pair[0].shape == C[0][0].shape and not pair[0].any() and not pair[1].any() for pair in slots[len(C) :])
    silent = build("moda")
    with torch.no_grad():  # a layer that adds nothing, and leaves zeros
        for w in silent.blocks[1].attn.out, silent.blocks[1].mlp.out, silent.blocks[1].attn.k, silent.blocks[1].attn.v:
            w.weight.zero_()
        silent.blocks[1].mlp_residual.kv.weight.zero_()
    h = model.enter(model.embed(TOKENS))
    for i, block in enumerate(model.blocks):
        h = block.skip(h) if i == 1 else block(h)
    assert (model.head(model.reader(h)) - logits(silent)).abs().max() < 1e-12


def test_a_skipped_layer_of_denseformer_still_has_its_place_in_the_averages():
    model = build("denseformer")
    h, v = model.blocks[0](model.enter(model.embed(TOKENS)))
    x, sources = model.blocks[1].skip((h, v))
    assert sources == [*v, h]
    assert torch.allclose(x, torch.einsum("i,ibtd->btd", model.blocks[1].mlp_residual.a, torch.stack(sources)))


def snapshot(model):
    return {name: p.clone() for name, p in model.named_parameters(remove_duplicate=False)}


@every_rule
@pytest.mark.parametrize(("i", "j"), [(0, 1), (1, 2), (0, 3), (3, 1)])
def test_two_swaps_restore_every_bit_and_one_exchanges_each_weight_once(residual, i, j):
    model = build(residual)
    before, y = snapshot(model), logits(model)
    RULES[residual].swap(model, i, j)
    after = snapshot(model)
    partner = {name: name for name in before}
    for name in before:
        if name.startswith(f"blocks.{i}."):
            other = name.replace(f"blocks.{i}.", f"blocks.{j}.", 1)
            if other in before and before[other].shape == before[name].shape:
                partner[name], partner[other] = other, name
    if "attnres" in residual:  # mixtures before the two attentions stay, those after the two layers move
        place = [f"blocks.{n}.attn_residual.reader.mixture." for n in range(L)] + ["reader.mixture."]
        for part in "w", "gain":
            at = [f"{name}{part}" for name in place]
            moved = dict(zip(at, at))
            moved[at[i + 1]], moved[at[j + 1]] = at[j + 1], at[i + 1]
            partner.update({name: other for name, other in moved.items() if name in before})
    for name in before:
        assert torch.equal(after[name], before[partner[name]]), name
    assert (logits(model) - y).abs().max() > 1e-6
    RULES[residual].swap(model, i, j)
    assert all(torch.equal(p, before[name]) for name, p in snapshot(model).items())
    assert torch.equal(logits(model), y)


@pytest.mark.parametrize(
    "residual", ["preln", "postln", "sandwichln", "lns", "lns:at=attention", "deepnorm", "keel", "hc", "mhc", "layerscale"]
)
def test_to_swap_two_layers_is_to_run_them_in_the_other_order(residual):
    model = build(residual)
    a, b, c, e = model.blocks
    expected = logits(model, blocks=[a, e, c, b])
    rule_of(residual).swap(model, 1, 3)
    assert torch.equal(logits(model), expected)


def test_the_first_layer_of_keel_still_lacks_a_norm_after_a_swap():
    model = build("keel")
    theirs = model.blocks[2].attn_residual.norm_out.weight.clone()
    RULES["keel"].swap(model, 0, 2)
    assert torch.equal(model.blocks[2].attn_residual.norm_out.weight, theirs)
    assert not hasattr(model.blocks[0].attn_residual.norm_out, "weight")
    assert model.blocks[0].mlp_residual.a.value == 1 and model.blocks[2].mlp_residual.a.value == 2 * L


# ---------------------------------------------------------------------------------------------------------------------
# Attention, of the sequence and of depth


@pytest.mark.parametrize("d_head", [34, 38, 42, 48, 50, 56, 62, 64, 66, 70, 76, 78, 84, 94, 108, 128])
def test_attention_is_right_at_every_head_width_of_the_paper(d_head):
    cfg = small("preln", n_head=16, n_kv_head=8, d_model=16 * d_head, seq_len=127)
    rope = residuals.Table(rotary(127, d_head, 10000.0))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        attention = Attention(cfg, rope)
    x = noise(1, 127, 16 * d_head).float()
    with torch.no_grad():
        y = attention(x)
        q, k, v = ((w.weight @ x[0].T).double().unflatten(0, (-1, d_head)).mT for w in (attention.q, attention.k, attention.v))
        frequencies = 10000.0 ** (-torch.arange(d_head // 2).double() / (d_head // 2))
        turn = torch.polar(torch.ones(()).double(), torch.outer(torch.arange(127), frequencies))
        q, k = (torch.view_as_real(torch.complex(*z.chunk(2, -1)) * turn).mT.flatten(-2) for z in (q, k))
        k, v = (z.repeat_interleave(2, dim=0) for z in (k, v))
        scores = (q @ k.mT / d_head**0.5).masked_fill(torch.ones(127, 127).triu(1).bool(), -math.inf)
        expected = attention.out.weight @ (scores.softmax(-1) @ v).transpose(0, 1).flatten(1).float().T
        assert (y[0] - expected.T).abs().max() < 1e-5 * y.abs().max()
        for length in (1, 2, 3):
            assert (attention(x[:, :length]) - y[:, :length]).abs().max() < 1e-5 * y.abs().max()


def depth_attention_by_hand(q, k, v, C):
    """One softmax over all earlier positions and over the pairs in C at the same position."""
    G, y = q.shape[1] // k.shape[1], torch.zeros_like(q)
    for b, i, t in np.ndindex(*q.shape[:3]):
        keys = torch.stack([*k[b, i // G, : t + 1], *(key[b, i // G, t] for key, _ in C)])
        values = torch.stack([*v[b, i // G, : t + 1], *(value[b, i // G, t] for _, value in C)])
        y[b, i, t] = (keys @ q[b, i, t] / q.shape[-1] ** 0.5).softmax(0) @ values
    return y


@pytest.mark.parametrize("length", [1, 2, 3, 13])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (3, 1)])
def test_depth_attention_is_one_softmax_over_sequence_and_depth(length, heads, kv_heads):
    d_head, pairs = 6, 3
    draws = (noise(2, n, length, d_head, seed=i).requires_grad_() for i, n in enumerate([heads] + [kv_heads] * (2 + 2 * pairs)))
    q, k, v, *C = draws
    pairs = list(zip(C[::2], C[1::2]))
    weight = noise(2, heads, length, d_head, seed=50)
    outputs = [form(q, k, v, pairs) for form in (residuals.depth_attention, depth_attention_by_hand, by_scores)]
    gradients = [torch.autograd.grad((y * weight).sum(), [q, k, v, *C]) for y in outputs]
    for y, grads in zip(outputs[1:], gradients[1:]):
        assert (outputs[0] - y).abs().max() < 1e-12
        for ours, theirs in zip(gradients[0], grads):
            assert (ours - theirs).abs().max() < 1e-12


def by_scores(q, k, v, C):
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    return residuals.depth_attention_by_scores(q, k, v, *zip(*C))


def test_depth_attention_does_not_care_how_its_arguments_lie_in_memory():
    q, k, v, key, value = (noise(1, 2, 5, 4, seed=i) for i in range(5))
    expected = residuals.depth_attention(q, k, v, [(key, value)])
    scattered = (x.mT.contiguous().mT for x in (q, k, v))
    assert (residuals.depth_attention(*scattered, [(key, value)]) - expected).abs().max() < 1e-12


# ---------------------------------------------------------------------------------------------------------------------
# Memory


@pytest.fixture(scope="module")
def of_preln():
    return residuals.saved_bytes("preln")


def test_saved_bytes_has_at_least_what_preln_must_keep(of_preln):
    vectors = 2 * 2 + 3 + 1  # of both branches the input, normed and not; queries, keys, values; what attention gives
    assert of_preln > 4 * (vectors * 256 + 4 * 688) / 2  # of SwiGLU the gate before and after its curve, what it lets through, the product


@every_rule
def test_no_rule_keeps_more_for_the_backward_pass_than_it_may(residual, of_preln):
    limit = 1.2 if residual in ("fullattnres", "blockattnres") else 2.5
    assert residuals.saved_bytes(residual) < limit * of_preln


def test_moda_keeps_no_scores_of_a_long_sequence():
    moda, preln = (residuals.saved_bytes(residual, L=2, d=64, T=2048, n_head=2) for residual in ("moda", "preln"))
    assert moda < 2.5 * preln


# ---------------------------------------------------------------------------------------------------------------------
# Options, and rules that a reader adds


def test_without_options_a_rule_is_the_one_of_the_paper():
    assert RULES["hc"].m == RULES["mhc"].m == 4 and RULES["mhc"].iterations == 20 and RULES["blockattnres"].n_blocks == 8
    assert RULES["fullattnres"].eps == RULES["blockattnres"].eps == 1e-5
    best = dict(
        preln=2e-3, sandwichln=2e-3, lns=1e-2, deepnorm=1e-3, keel=2e-3, moda=2e-3, fullattnres=2e-3, blockattnres=2e-3, hc=2e-3, mhc=2e-3
    )
    assert {key: RULES[key].lr for key in best} == best  # Table 4


def test_the_table_of_rules_has_a_row_for_each():
    rows = {row.split("`")[1]: row for row in residuals.table(measure=False).splitlines()[2:]}
    assert list(rows) == list(RULES)
    assert "| 296,160 | 0.002 | yes |" in rows["hc"] and "arXiv:2409.19606" in rows["hc"]
    assert "| 0 | 0.01 | no |" in rows["lns"]


def test_an_option_makes_a_subclass_and_leaves_the_rule_alone():
    rule = rule_of("hc:m=2:dynamic=off")
    assert issubclass(rule, RULES["hc"]) and (rule.m, rule.dynamic) == (2, False)
    assert (RULES["hc"].m, RULES["hc"].dynamic) == (4, True) and rule_of("hc") is RULES["hc"]
    assert rule_of("moda:post=True").post is True and rule_of("fullattnres:eps=1e-6").eps == 1e-6


@pytest.mark.parametrize(
    ("residual", "line"),
    [
        ("hcc", "no residual rule 'hcc'; did you mean hc?"),
        ("full_attnres", "did you mean fullattnres?"),
        ("hc:streams=2", "hc has no option 'streams' (it has m, dynamic)"),
        ("hc:dynamc=off", "hc has no option 'dynamc'; did you mean dynamic?"),
        ("preln:m=2", "preln has no option 'm' (it has none)"),
        ("hc:m=two", "hc:m=two: expected a positive int, as in hc:m=4"),
        ("hc:m=0", "hc:m=0: expected a positive int"),
        ("hc:m=2:m=3", "hc:m is given twice in hc:m=2:m=3"),
        ("hc:m", "hc:m=: expected a positive int"),
        ("hc:dynamic=maybe", "expected on or True or off or False"),
        ("mhc:constraint=rows", "expected doubly or row or identity or free"),
        ("fullattnres:eps=-1", "expected a positive float"),
        ("fullattnres:eps=nan", "expected a positive float"),
    ],
)
def test_a_mistake_in_an_option_has_its_line(residual, line):
    with pytest.raises(Mistake) as mistake:
        rule_of(residual)
    assert line in str(mistake.value) and "\n" not in str(mistake.value)


@every_rule
def test_at_one_seed_the_backbone_is_that_of_all_rules(residual):
    """But for scales: HC and mHC shrink what branches give, DeepNorm shrinks some of their weights."""
    ours, plain = build(residual, moved=False), build("preln", moved=False)
    for (_, F), (_, G) in zip(ours.branches(), plain.branches()):
        for w, v in zip(F.parameters(), G.parameters()):
            assert torch.allclose(w / w.norm(), v / v.norm(), atol=1e-6)
    assert torch.equal(ours.embed.weight, plain.embed.weight) and torch.equal(ours.head.weight, plain.head.weight)


def test_options_of_a_rule_may_be_annotated_by_text(monkeypatch):
    mine = type("Mine", (residuals.HC,), {"__doc__": "", "__annotations__": {"share": "float"}, "share": 0.5, "__module__": "residuals"})
    monkeypatch.setitem(RULES, "mine", mine)
    assert rule_of("mine:share=2:m=3").share == 2.0


def test_a_rule_that_a_reader_adds_works_by_being_in_rules(monkeypatch):
    class Half(residuals.Residual):
        """h' = h + F(LN(h)) / 2"""

        share: float = 0.5

        def forward(self, h, F):
            return h + self.share * F(self.norm(h))

    monkeypatch.setitem(RULES, "half", Half)
    ours, plain = build("half:share=1", moved=False), build("preln", moved=False)
    assert torch.equal(logits(ours), logits(plain)) and not torch.equal(logits(build("half", moved=False)), logits(plain))
    first = ours.blocks[0].attn_residual
    h = noise(1, 1, d)
    assert first.skip(h) is h and torch.equal(first.reader.vector(h), h)
    with pytest.raises(NotImplementedError, match="Half has no scalar weights from branch to branch"):
        first.route(h)
    with pytest.raises(NotImplementedError, match="mixes no sources"):
        first.reader.weights(h)
    test_two_swaps_restore_every_bit_and_one_exchanges_each_weight_once("half", 0, 2)
    with pytest.raises(Mistake, match="did you mean half?"):
        rule_of("hal")


@every_rule
def test_the_first_line_of_a_rule_is_its_equation(residual):
    line = RULES[residual].__doc__.splitlines()[0]
    assert RULES[residual].title and ("=" in line or residual in ("blockattnres", "mixln"))

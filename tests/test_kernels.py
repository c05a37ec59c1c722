"""
Fast is right: the kernels of kernels.py and kernels_hc.py, in Triton's interpreter, against autograd of residuals.py in float64.

What they need of a GPU is in kernel_compile.py, which compiles them in a process of its own: a kernel that was imported
for the interpreter cannot be compiled.
"""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import bench_kernels
import numpy as np
import pytest
import torch
from torch.nn.functional import rms_norm
from triton.runtime import interpreter

import kernels
import kernels_hc
import residuals
from configs import ModelConfig
from model import Transformer

ROOT = Path(__file__).parent.parent
F32, BF16 = torch.float32, torch.bfloat16


@pytest.fixture(scope="module", autouse=True)
def quick_and_rounding_interpreter():
    """It re-patches the language at each call of a function, checks each integer sum for overflow, and cuts bf16 off."""
    assert kernels.INTERPRETED, "Triton was imported before tests/conftest.py had set TRITON_INTERPRET=1"
    patch = pytest.MonkeyPatch()
    patched = {"kernels", "kernels_hc"}  # by the launch

    def call(self, *args, **kwargs):
        if self.fn.__module__ not in patched:
            interpreter._patch_lang(self.fn)
            patched.add(self.fn.__module__)
        return self.rewrite()(*args, **kwargs)

    patch.setattr(interpreter.InterpretedFunction, "__call__", call)
    object.__setattr__(interpreter.interpreter_builder.options, "sanitize_overflow", False)
    convert = interpreter._convert_float

    def nearest(data, source, target, mode):
        if target == interpreter.tl.bfloat16 and data.dtype == np.float32:
            return torch.from_numpy(np.ascontiguousarray(data)).bfloat16().view(torch.uint16).numpy()
        return convert(data, source, target, mode)

    patch.setattr(interpreter, "_convert_float", nearest)
    yield
    patch.undo()


@pytest.fixture
def poisoned(monkeypatch):
    """All memory that the kernels ask for is NaN at first and has a guard behind it. Returns a check that no guard was touched."""
    guards = []

    def allocate(shape, dtype):
        flat = torch.full((math.prod(shape) + 64,), torch.nan).to(dtype)
        flat[-64:] = 77
        guards.append(flat[-64:])
        return flat[:-64].view(shape)

    plain = torch.Tensor.new_empty

    def new_empty(self, *shape, dtype=None, **more):
        if more:  # the interpreter's own
            return plain(self, *shape, dtype=dtype, **more)
        return allocate(shape[0] if isinstance(shape[0], tuple) else shape, dtype or self.dtype)

    monkeypatch.setattr(torch.Tensor, "new_empty", new_empty)
    monkeypatch.setattr(torch, "empty_like", lambda x: allocate(x.shape, x.dtype))
    return lambda: all((guard == 77).all() for guard in guards) and len(guards)


def error(a, b):
    return ((a.double() - b).norm() / b.norm()).item()


# ---------------------------------------------------------------------------------------------------------------------
# Depth mixing

EPS, KEY_EPS = 1e-5, 1e-6


def stack_inputs(T, D, M, seed=0):
    g = torch.Generator().manual_seed(seed)
    noise = lambda *shape: torch.randn(*shape, generator=g)  # noqa: E731
    x, A, Q, W = noise(1, T, D), noise(M - 1, D, D) / D**0.5, noise(M, D) * 2 / D**0.5, 1 + 0.3 * noise(M, D)
    Q[0] = 0  # the first branch reads the embedding
    return [x, A, Q, W], noise(1, T, D)


def by_definition(x, A, Q, W, b, dtype=torch.float64):
    """A stack of branches tanh(y A_m), b of which make a source, with the functions of residuals.py."""
    source = lambda x: (x, residuals.rstd(x, KEY_EPS))  # noqa: E731
    v = [source(x)]
    for m in range(len(Q)):
        y = rms_norm(residuals.depth_mix(v, Q[m]), W.shape[1:], W[m].to(dtype), EPS)
        if m < len(A):
            out = (y.to(A.dtype) @ A[m]).tanh().to(dtype)
            v = v + [source(out)] if m % b == 0 else v[:-1] + [source(v[-1][0] + out)]
    return y


def by_kernels(x, A, Q, W, b, G=None):
    bank = kernels.Bank(x, Q, KEY_EPS, b, G)
    for m in range(len(Q)):
        y = bank.read(W[m], EPS)
        if m < len(A):
            bank = bank.add((y.to(A.dtype) @ A[m]).tanh().to(x.dtype))
    return y


def outputs_and_gradients(f, inputs, dy, b, dtype, *more):
    x, *weights = (p.clone().requires_grad_() for p in inputs)
    y = f(x.to(dtype), *(p.double() if dtype == torch.float64 else p for p in weights), b, *more)
    values = [y.detach().clone()]  # on the way back kernels.py uses the memory of y for the gradient of the mixture
    y.backward(dy.to(y.dtype))
    dx, dA, dQ, dW = x.grad, *(p.grad for p in weights)
    return [*values, dx, dA, dQ[1:], dW]


def stack_errors(T, D, M, b, G, dtype=F32):
    inputs, dy = stack_inputs(T, D, M)
    exact = outputs_and_gradients(by_definition, [p.double() for p in inputs], dy, b, torch.float64)
    fast = outputs_and_gradients(by_kernels, inputs, dy, b, dtype, G)
    return [error(a, b) for a, b in zip(fast, exact)]


@pytest.mark.parametrize("T,D,M,b,G", [
    (3, 40, 7, 1, 1), (3, 64, 9, 1, 4), (2, 152, 9, 1, 8), (2, 640, 7, 1, 3), (2, 40, 20, 1, 16), (3, 64, 3, 1, 8),
    (3, 64, 7, 2, None), (2, 40, 12, 5, None), (1, 40, 24, 20, None), (1, 40, 38, 2, None), (2, 640, 6, 2, None),
])  # fmt: skip
def test_a_stack_and_its_gradients_are_those_of_the_definition(T, D, M, b, G, poisoned):
    assert max(stack_errors(T, D, M, b, G)) < 1e-5
    assert poisoned() > 10


def test_141_sources_are_mixed_as_by_the_definition():
    assert max(stack_errors(1, 40, 141, 1, None)) < 4e-5


def test_the_size_of_the_groups_does_not_change_the_result():
    inputs, dy = stack_inputs(1, 40, 18)
    alone, *groups = (outputs_and_gradients(by_kernels, inputs, dy, 1, F32, G) for G in (1, 4, 8, 16))
    for grouped in groups:
        assert max(error(a, b.double()) for a, b in zip(grouped, alone)) < 5e-6


def test_in_bf16_the_error_is_at_most_twice_that_of_pytorch():
    inputs, dy = stack_inputs(4, 152, 13)
    inputs = [p.bfloat16().float() for p in inputs]
    dy = dy.bfloat16().float()
    exact = outputs_and_gradients(by_definition, [p.double() for p in inputs], dy, 1, torch.float64)
    plain = outputs_and_gradients(lambda *a: by_definition(*a, dtype=BF16), inputs, dy, 1, BF16)
    fast = outputs_and_gradients(by_kernels, inputs, dy, 1, BF16, 8)
    for a, b, c in zip(fast, plain, exact):
        assert error(a, c) < 2 * error(b, c) < 0.5


def test_to_autograd_the_mixtures_are_a_chain():
    inputs, _ = stack_inputs(1, 40, 6)
    y = by_kernels(*(p.requires_grad_() for p in inputs), 1)
    node, names = y.grad_fn, []
    while node is not None:
        parents = [parent for parent, _ in node.next_functions if parent is not None]
        inner = [parent for parent in parents if parent.name() not in LEAVES]
        assert len(inner) <= 1, "a second way back would be a gradient for autograd to add"
        names.append(node.name())
        node = inner[0] if inner else None
    assert sum("mix" in name for name in names) == 6
    assert not any("Add" in name for name in names)


LEAVES = {"torch::autograd::AccumulateGrad", "SelectBackward0"}  # a row of Q, W or A


def test_a_second_backward_pass_is_refused():
    inputs, dy = stack_inputs(1, 40, 4)
    y = by_kernels(*(p.requires_grad_() for p in inputs), 1)
    y.backward(dy, retain_graph=True)
    with pytest.raises(RuntimeError, match="goes back once from the last mixture to the first"):
        y.backward(dy)


def test_a_backward_pass_from_the_middle_is_refused():
    (x, _, Q, W), _ = stack_inputs(1, 40, 3)
    bank = kernels.Bank(x.requires_grad_(), Q, KEY_EPS)
    y = bank.read(W[0], EPS)
    bank.add(y.clone()).read(W[1], EPS)
    with pytest.raises(RuntimeError, match="goes back once from the last mixture to the first"):
        y.sum().backward()


def test_a_mixture_cannot_be_read_before_its_sources_are_there():
    (x, _, Q, W), _ = stack_inputs(1, 40, 3)
    with pytest.raises(RuntimeError, match="mixture 2 was read before mixture 0"):
        kernels.Bank(x, Q, KEY_EPS).add(x).add(x).read(W[2], EPS)


@pytest.mark.parametrize("b", [1, 2])
def test_a_bank_shows_the_sources_of_the_list_it_stands_for(b):
    (x, _, Q, W), _ = stack_inputs(2, 40, 6)
    v, bank = [x], kernels.Bank(x, Q, KEY_EPS, b)
    for m in range(6):
        assert len(bank) == len(v)
        for _ in "before", "after":
            for (a, r), u in zip(bank, v):
                assert torch.allclose(a, u, atol=1e-6) and torch.allclose(r, residuals.rstd(u, KEY_EPS))
            bank.read(W[m], EPS)
        out = torch.randn(1, 2, 40, generator=torch.Generator().manual_seed(m))
        v = v + [out] if m % b == 0 else v[:-1] + [v[-1] + out]
        bank = bank.add(out)


def test_without_gradients_the_result_is_the_same_and_the_branches_inputs_are_not_kept():
    inputs, _ = stack_inputs(2, 40, 9)
    with torch.no_grad():
        y = by_kernels(*inputs, 1, 4)
        assert kernels.Bank(inputs[0], inputs[2], KEY_EPS).arena.Y is None
    assert torch.equal(y, by_kernels(*inputs, 1, 4))


def test_two_runs_agree_to_the_bit():
    inputs, dy = stack_inputs(3, 40, 9)
    for a, b in zip(*(outputs_and_gradients(by_kernels, inputs, dy, 1, F32, 4) for _ in range(2))):
        assert torch.equal(a, b)


# ---------------------------------------------------------------------------------------------------------------------
# Hyper-connections


@pytest.mark.parametrize("gap,most", [(0, 1e-6), (8, 1e-5)])
def test_sinkhorn_and_its_gradient_are_those_of_the_twenty_iterations(gap, most, poisoned):
    """At a gap of 8, where mHC starts, they are far from converged, and the gradient of the limit would be wrong by its own size."""
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(133, 4, 4, generator=g) * 0.8 - gap * (1 - torch.eye(4))
    dA = torch.randn(133, 4, 4, generator=g)
    x, exact = logits.flatten(1).requires_grad_(), logits.double().requires_grad_()
    A = kernels.sinkhorn(x, 20, 1e-6)
    A.backward(dA.flatten(1))
    B = residuals.sinkhorn(exact.movedim(0, -1), 20, 1e-6).movedim(-1, 0)
    B.backward(dA.double())
    assert error(A.detach().view(-1, 4, 4), B.detach()) < 1e-6
    assert error(x.grad.view(-1, 4, 4), exact.grad) < most
    assert poisoned()


def coefficients(rule, P, q, bias, sinkhorn):
    """A, beta of a token and alpha, of its streams' projections P (B, T, 24), alpha's first, and squares q."""
    d = 40
    if rule == "mhc":
        logits = P * (q.sum(-1, keepdim=True) / (4 * d) + 1e-6).rsqrt() + bias
        alpha, A, beta = logits.split((4, 16, 4), -1)
        return sinkhorn(A), 2 * beta.sigmoid(), alpha.sigmoid()
    z = P.unflatten(-1, (6, 4)).mT * (q / d + 1e-6).rsqrt().unsqueeze(-1)
    alpha, A, beta = bias.split((4, 16, 4))
    return A.view(4, 4) + z[..., 1:5].tanh(), beta + z[..., 5].tanh(), alpha + 0.7 * (1.3 * z[..., 0] + 0.2).tanh()


def connections_by_definition(rule, x, W, F, gain, bias):
    sinkhorn = lambda A: residuals.sinkhorn(A.unflatten(-1, (4, 4)).movedim((-2, -1), (0, 1)), 20).movedim((0, 1), (-2, -1))  # noqa: E731
    H = x.unsqueeze(-2).expand(*x.shape[:2], 4, x.shape[-1])
    for k in range(len(W)):
        P = torch.einsum("btmd,mdc->btc", H, W[k])
        A, beta, alpha = coefficients(rule, P, H.square().sum(-1), bias[k], sinkhorn)
        x, mixed = residuals.read_and_mix(H, alpha, A)
        H = residuals.write(mixed, (rms_norm(x, gain.shape[1:], gain[k], 1e-6) @ F[k]).tanh(), beta)
    return H


def connections_by_kernels(rule, x, W, F, gain, bias):
    sinkhorn = lambda A: kernels.sinkhorn(A.contiguous(), 20, 1e-6).unflatten(-1, (4, 4))  # noqa: E731
    streams = kernels_hc.Streams.enter(x)
    for k in range(len(W)):
        alpha, half = bias[k][:4], torch.full((4,), 0.5)
        if rule == "mhc":
            read = torch.cat([half, alpha / 2, half[:1], half[:1]])  # the sigmoid, by a tanh
        else:
            read = torch.cat([alpha, torch.full((4,), 0.2), torch.tensor([0.7, 1.3])])
        streams, y, P, q = streams.connect(W[k], read, gain[k], 1e-6, 1e-6, rule == "mhc")
        A, beta, _ = coefficients(rule, P, q, bias[k], sinkhorn)
        streams = streams.then((y.to(F.dtype) @ F[k]).tanh(), A, beta)
    return streams.finish()


def connection_inputs(rule, T, K, d=40):
    g = torch.Generator().manual_seed(0)
    noise = lambda *shape: torch.randn(*shape, generator=g)  # noqa: E731
    return [noise(1, T, d), noise(K, 4, d, 24) / d**0.5, noise(K, d, d) / d**0.5, 1 + 0.3 * noise(K, d), noise(K, 24)], noise(1, T, 4, d)


@pytest.mark.parametrize("rule", ["hc", "mhc"])
@pytest.mark.parametrize("dtype,most", [(F32, 3e-6), (BF16, 2e-2)])
def test_connections_of_four_streams_and_their_gradients_are_those_of_the_definition(rule, dtype, most, poisoned):
    inputs, dH = connection_inputs(rule, T=17, K=3)
    exact = [p.double().requires_grad_() for p in inputs]
    H = connections_by_definition(rule, *exact)
    H.backward(dH.double())
    fast = [p.clone().requires_grad_() for p in inputs]
    N = connections_by_kernels(rule, fast[0].to(dtype), *fast[1:])
    N.backward(dH.to(dtype))
    assert max(error(a, b) for a, b in zip([N.detach(), *(p.grad for p in fast)], [H.detach(), *(p.grad for p in exact)])) < most
    assert poisoned()


def test_the_last_write_is_summed_in_float32_and_rounded_once():
    g = torch.Generator().manual_seed(0)
    noise = lambda *shape: torch.randn(*shape, generator=g)  # noqa: E731
    H, y, A = noise(1, 3, 4, 8).bfloat16(), noise(1, 3, 8).bfloat16(), noise(1, 3, 5, 4)
    expected = (A[..., :4, :].double().mT @ H.double() + A[..., 4, :, None].double() * y[..., None, :].double()).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(kernels_hc.Streams(H, y, A).finish(), expected)


# ---------------------------------------------------------------------------------------------------------------------
# In a model

RULES = ["fullattnres", "blockattnres:n_blocks=3", "hc", "hc:dynamic=off", "mhc:iterations=4", "mhc:constraint=identity"]


def models(residual, dtype=torch.float64, n_layer=3):
    """The same model twice, its parameters off their starting point: as it is written, and for the kernels."""
    cfg = ModelConfig(residual=residual, n_layer=n_layer, d_model=32, n_head=2, vocab_size=17, seq_len=8)
    torch.manual_seed(0)
    model = Transformer(cfg)
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            p.mul_(0.5).add_(0.3 * torch.randn(p.shape, generator=torch.Generator().manual_seed(i)))
    fast = Transformer(cfg)
    fast.load_state_dict(model.state_dict())
    assert kernels.accelerate(fast, "triton") is None
    return model.to(dtype), fast


def loss(model, tokens):
    return torch.nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).double(), tokens[:, 1:].flatten())


@pytest.mark.parametrize("residual", RULES)
def test_a_model_and_its_gradients_are_the_same_on_kernels(residual):
    exact, fast = models(residual)
    plain, _ = models(residual, torch.float32)
    tokens = torch.randint(17, (2, 4), generator=torch.Generator().manual_seed(0))
    for m in exact, fast, plain:
        loss(m, tokens[:, :3]).backward()
        loss(m, tokens[:1]).backward()  # a second micro-batch, on a bank of its own
    assert error(fast(tokens).detach(), exact(tokens).detach()) < 1e-5
    for (name, p), q, r in zip(exact.named_parameters(), fast.parameters(), plain.parameters()):
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None:  # HC's alpha: what the norm leaves of large numbers, in plain PyTorch too
            assert (q.grad - p.grad).norm() < 3e-5 * p.grad.norm() + 10 * (r.grad - p.grad).norm(), name


@pytest.mark.parametrize("residual", RULES)
def test_on_kernels_a_model_has_the_same_state_and_generates_the_same(residual):
    model, fast = models(residual, torch.float32)
    assert fast.state_dict().keys() == model.state_dict().keys()
    assert fast.generate([1, 2], 2, temperature=0) == model.generate([1, 2], 2, temperature=0)


@pytest.mark.parametrize("residual", ["fullattnres", *RULES[2:3]])
def test_what_the_kernels_cannot_serve_runs_as_it_is_written(residual):
    model, fast = models(residual)
    tokens = torch.tensor([[3, 1, 2]])
    assert torch.equal(fast.double()(tokens), model(tokens))


@pytest.mark.parametrize("residual", ["fullattnres", *RULES[2:3], *RULES[4:5]])
def test_under_autocast_the_bank_is_in_bf16(residual):
    model, fast = models(residual)
    tokens = torch.tensor([[3, 1, 2, 5]])
    with torch.autocast("cpu", torch.bfloat16):
        a = fast(tokens)
    a.float().sum().backward()
    assert error(a.detach(), model(tokens).detach()) < 0.1
    assert all(p.grad.dtype == p.dtype and p.grad.isfinite().all() for p in fast.parameters() if p.grad is not None)


@pytest.mark.parametrize("residual", ["preln", "layerrope", "deepnorm", "moda", "hc:m=2"])
def test_rules_without_kernels_are_left_alone(residual):
    model = Transformer(ModelConfig(residual=residual, n_layer=1, d_model=32, n_head=2, vocab_size=17))
    assert kernels.accelerate(model, "triton") is None
    assert "forward" not in vars(model.blocks[0].attn_residual)


@pytest.mark.parametrize("base", [residuals.HC, residuals.MHC, residuals.FullAttnRes, residuals.BlockAttnRes])
def test_a_rule_that_builds_on_one_with_kernels_is_left_alone(base, monkeypatch):
    monkeypatch.setitem(residuals.RULES, "mine", type("Mine", (base,), {"__doc__": base.__doc__}))
    model = Transformer(ModelConfig(residual="mine", n_layer=1, d_model=32, n_head=2, vocab_size=17))
    assert kernels.accelerate(model, "triton") is None
    assert "forward" not in vars(model.blocks[0].attn_residual)


@pytest.mark.parametrize("version,served", [("2.3.1", False), ("3.3.1", False), ("3.4.0", True), ("3.10.0+git", True)])
def test_an_older_triton_than_the_kernels_compile_with_is_named(version, served, monkeypatch):
    model = Transformer(ModelConfig(residual="hc", n_layer=1, d_model=32, n_head=2, vocab_size=17))
    monkeypatch.setattr(kernels.triton, "__version__", version)
    problem = kernels.accelerate(model, "triton")
    assert isinstance(model.enter.__self__, Transformer) == served
    assert problem is None if served else "no Triton of 3.4 or later" in problem


@pytest.mark.parametrize("residual", ["fullattnres", "blockattnres:n_blocks=1", "hc", "mhc:iterations=2"])
def test_a_compiled_model_sees_operators_and_gives_the_same(residual):
    _, model = models(residual, n_layer=1)
    tokens, results = torch.tensor([[3, 1, 2, 5]]), []
    for compiled in False, True:
        model.zero_grad()
        f = torch.compile(loss, backend="aot_eager", fullgraph=True) if compiled else loss
        value = f(model, tokens)
        value.backward()
        results.append([value.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
    torch._dynamo.reset()
    for a, b in zip(*results):
        assert torch.allclose(a, b, rtol=1e-6, atol=1e-7)


# ---------------------------------------------------------------------------------------------------------------------
# Bytes


@pytest.fixture
def traffic(monkeypatch):
    """Counts what the kernels load and store. Arrays of T d numbers count at each access, in units of T d; scores and
    statistics stay in cache and count once for each launch, in bytes of a token; weights are not of a token. "memory" are the
    vectors without what a program reads again that it has read or written before, and may find in the cache."""
    count = {"vectors": 0, "memory": 0, "scalars": 0}
    seen = {}
    load, store = interpreter.InterpreterBuilder.create_masked_load, interpreter.InterpreterBuilder.create_masked_store
    call = interpreter.GridExecutor.__call__
    large, weights, small = [], [], []
    monkeypatch.setattr(kernels, "PROGRAMS", 1)  # so that sums over tokens are not as large as the tokens

    def note(pointers, mask, kind):
        at = np.broadcast_to(pointers.data, mask.data.shape)[mask.data.astype(bool)]
        if not at.size:
            return
        for begin, end, unit in large:
            if begin <= at.flat[0] < end:
                count["vectors"] += at.size / unit
                own = seen.setdefault(interpreter.interpreter_builder.grid_idx, set())
                new = set(at.ravel().tolist())
                count["memory"] += len(new - own if kind == "load" else new) / unit
                own |= new
                return
        if not any(begin <= at.flat[0] < end for begin, end in weights):
            small.append((kind, at.ravel(), pointers.get_element_ty().primitive_bitwidth // 8))

    def counted_load(self, pointers, mask, *more):
        note(pointers, mask, "load")
        return load(self, pointers, mask, *more)

    def counted_store(self, pointers, value, mask, *more):
        note(pointers, mask, "store")
        return store(self, pointers, value, mask, *more)

    def launch(self, *args, **kwargs):
        T, D = count["T"], kwargs.get("D", 0)
        arrays = [(a, a.data_ptr(), a.data_ptr() + a.nbytes) for a in args if torch.is_tensor(a) and a.shape[-1] == D]
        large[:] = [(begin, end, T * D) for a, begin, end in arrays if a.shape[-2:] == (T, D) or a.shape == (T, 4, D)]
        weights[:] = [(begin, end) for a, begin, end in arrays if a.shape[-2:] != (T, D) and a.shape != (T, 4, D)]
        small.clear()
        seen.clear()
        result = call(self, *args, **kwargs)
        for kind in "load", "store":
            parts = [(at, size) for k, at, size in small if k == kind]
            for size in {size for _, size in parts}:
                count["scalars"] += size * len(np.unique(np.concatenate([at for at, s in parts if s == size]))) / T
        return result

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_masked_load", counted_load)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_masked_store", counted_store)
    monkeypatch.setattr(interpreter.GridExecutor, "__call__", launch)
    return count


def moved(traffic, T, D, L, b, G):
    """(T, d) arrays that the kernels move forward and backward."""
    M, traffic["T"] = 2 * L + 1, T
    (x, _, Q, W), dy = stack_inputs(T, D, M)
    bank, results = kernels.Bank(x.bfloat16().requires_grad_(), Q, KEY_EPS, b, G), []
    for m in range(M):
        y = bank.read(W[m], EPS)
        bank = bank.add(y.clone())
    results.append(traffic["vectors"])
    y.backward(dy.bfloat16())
    return results[0], traffic["vectors"] - results[0]


@pytest.mark.parametrize("L,b,G", [(4, 1, 2), (7, 1, 8), (8, 1, 16), (7, 5, None), (17, 17, None), (5, 1, 1)])
def test_the_kernels_move_the_arrays_that_the_table_counts(traffic, L, b, G):
    forward, backward = moved(traffic, 3, 40, L, b, G)
    by_matrix_products = bench_kernels.query_gradient_reads(L, b)
    assert (forward, backward + by_matrix_products) == pytest.approx(bench_kernels.depth_mixing_traffic(L, b, G), abs=1e-9)


@pytest.mark.parametrize("L,d,full,block", [(16, 1216, 2.2, 1.5), (32, 896, 3.9, 1.9), (70, 640, 8.1, 2.7)])
def test_a_whole_stack_moves_at_most_a_tenth_more_than_the_least(L, d, full, block):
    """The least: the best size of groups for the forward and for the backward pass, with 40 bytes of scalars for each score."""
    assert bench_kernels.depth_mixing_bytes(L, d) / 1e6 < 1.1 * full
    assert bench_kernels.depth_mixing_bytes(L, d, b=math.ceil(2 * L / 8)) / 1e6 < 1.1 * block


def test_the_scalars_are_no_more_than_the_table_says(traffic):
    L = 10
    moved(traffic, 4, 8, L, 1, 8)
    assert 0.5 * bench_kernels.SCALAR_BYTES * L * (2 * L + 3) < traffic["scalars"] <= bench_kernels.SCALAR_BYTES * L * (2 * L + 3)


def test_a_row_kernel_moves_its_sources_once_and_little_else(traffic):
    T, D, M = 2, 640, 9
    traffic["T"] = T
    (x, _, Q, W), _ = stack_inputs(T, D, M)
    bank = kernels.Bank(x.bfloat16().requires_grad_(), Q, KEY_EPS, 1, 16)
    for m in range(M):
        before = dict(traffic)
        y = bank.read(W[m], EPS)
        bank = bank.add(y.clone())
    logits = 0 if m == M - 1 else 1
    vectors, scalars = traffic["vectors"] - before["vectors"] - logits, traffic["scalars"] - before["scalars"]
    least = M + 2  # each source, the newest written to the bank, and y
    assert vectors == least
    assert scalars < 0.02 * least * 2 * D


def test_a_connection_moves_the_arrays_that_the_table_counts(traffic):
    """Streams are four arrays of (T, d). All but the first connection: two more than one."""
    T, totals = 3, []
    traffic["T"] = T
    for K in 1, 3:
        inputs, dH = connection_inputs("mhc", T, K)
        before = dict(traffic)
        N = connections_by_kernels("mhc", *(p.requires_grad_() for p in inputs))
        forward = dict(traffic)
        N.backward(dH)
        totals.append([(b[kind] - a[kind]) / 2 for kind in ("memory", "vectors") for a, b in ((before, forward), (forward, traffic))])
    by_matrix_products = 4
    forward, backward, accesses_forward, accesses_backward = (b - a for a, b in zip(*totals))
    assert (forward, backward + by_matrix_products) == pytest.approx(bench_kernels.CONNECTOR_TRAFFIC)
    rereads = accesses_forward - forward, accesses_backward - backward
    assert rereads == pytest.approx(bench_kernels.CONNECTOR_REREADS), "a second pass reads what the first one did, no more"


@pytest.mark.parametrize("L,d,most", [(16, 1216, 2.0), (32, 896, 2.9), (70, 640, 4.5)])
def test_hyper_connections_move_at_most_a_sixth_more_than_the_least(L, d, most):
    """The least, 10 + 15 arrays for each connection, leaves out the gradient of the routing matrix, which needs the streams once more."""
    assert bench_kernels.hyper_connection_bytes(L, d) / 1e6 < 7 / 6 * most


class Silent:
    """Stands for a kernel and does nothing."""

    def __getitem__(self, grid):
        return lambda *args, **constants: None


@pytest.mark.parametrize("L,b,most", [(70, 1, 1.13), (32, 1, 1.05), (70, 18, 1.05), (32, 8, 1.05)])
def test_little_more_is_kept_for_the_backward_pass_than_in_preln(L, b, most, monkeypatch):
    """Pre-LN keeps two vectors for each branch: the stream, and what the branch reads."""
    T, D, M = 4, {70: 640, 32: 896}[L], 2 * L + 1
    for name in "row_mix", "group_mix", "source_logits":  # only what is kept matters, not what is in it
        monkeypatch.setitem(vars(kernels), name, Silent())
    bank = kernels.Bank(torch.zeros(1, T, D, dtype=BF16, requires_grad=True), torch.zeros(M, D), KEY_EPS, b)
    for _ in range(M):
        bank = bank.add(bank.read(torch.zeros(D), EPS).clone())
    queries = bank.arena.Q.nbytes
    kept = {a.untyped_storage().data_ptr(): a.untyped_storage().nbytes() for a in vars(bank.arena).values() if torch.is_tensor(a)}
    assert (sum(kept.values()) - queries) / (2 * M * T * D * 2) < most


def test_autograd_keeps_nothing_beside_the_bank():
    inputs, _ = stack_inputs(2, 40, 6)
    x, A, Q, W = (p.requires_grad_() for p in inputs)
    own = {p.untyped_storage().data_ptr() for p in (x, A, Q, W)}
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        bank = kernels.Bank(x, Q, KEY_EPS)
        for m in range(6):
            y = bank.read(W[m], EPS)
            bank = bank.add(y.clone())
    own.add(bank.arena.Y.untyped_storage().data_ptr())
    beside = {t.untyped_storage().data_ptr(): t.numel() for t in kept if t.untyped_storage().data_ptr() not in own}
    assert kept and list(beside.values()) == [1], "the handle of the bank, one number"


# ---------------------------------------------------------------------------------------------------------------------
# Without a GPU, for a GPU


def run(script, *args, **env):
    clean = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"OMP_NUM_THREADS": "1"} | env
    done = subprocess.run([sys.executable, *script, *args], capture_output=True, text=True, env=clean, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def compiled():
    return json.loads(run(["tests/kernel_compile.py"], "896", "--once", "--json"))


def test_kernels_compile_for_a100_without_spills_and_within_their_registers(compiled):
    most = dict.fromkeys(["row_mix", "row_pull"], 168)
    most |= dict.fromkeys(["source_logits", "group_mix", "pair_dot", "group_pull"], 128)
    for k in compiled:
        assert k["spills"] <= (0 if k["arch"] == 80 else 16), k
        assert k["arch"] != 80 or k["registers"] <= most.get(k["kernel"], 255), k
        assert k["shared"] <= 48 * 1024, k


def test_kernels_read_rows_in_pieces_of_128_bits(compiled):
    """But for Sinkhorn, which has no rows, and the connectors on the way back, which take 64 bits: with more they spill."""
    for k in compiled:
        assert k["wide_loads"] >= 10 or k["kernel"].startswith("sinkhorn") or k["kernel"] == "connect_backward", k


def test_sinkhorn_keeps_a_matrix_in_one_lane(compiled):
    for k in compiled:
        if k["kernel"].startswith("sinkhorn"):
            assert k["shuffles"] == k["barriers"] == k["shared"] == 0 and k["registers"] <= 96, k


def test_there_are_at_most_ten_compilations_for_each_width(compiled):
    for k in compiled:
        assert k["compilations"] <= 10, k


def test_importing_touches_no_driver():
    untouched = "not torch.cuda.is_initialized() and driver._active is None"
    run(["-c", f"import kernels, kernels_hc, torch; from triton.runtime import driver; assert {untouched}"])


def test_where_triton_is_missing_the_import_works_and_nothing_is_usable():
    run(["-c", "import sys; sys.modules['triton'] = None; import kernels, torch; assert not kernels.usable(torch.zeros(1, 8))"])


# ---------------------------------------------------------------------------------------------------------------------
# The kernels of others, by stand-ins that have their signatures: what they are given makes the function that ours compute


def fused_attnres(query, residuals, rms_weight, output_rms_weight=None, rms_eps=1e-6, scale=1.0, return_weights=False, checkpoint_level=1):
    keys = torch.stack([rms_norm(v, v.shape[-1:], rms_weight, rms_eps) for v in residuals], -2)
    mixture = ((scale * keys @ query).softmax(-1).unsqueeze(-2) @ torch.stack(list(residuals), -2)).squeeze(-2)
    return rms_norm(mixture, mixture.shape[-1:], output_rms_weight, rms_eps)


class BlockAttentionResiduals:
    @staticmethod
    def apply(inputs, pseudo_queries, layers, BLOCK_SIZE, eps, *flat_layer_params):
        assert [id(p) for p in flat_layer_params] == [id(p) for layer in layers for p in layer.parameters()]
        mix = lambda v, q: residuals.depth_mix([(x, residuals.rstd(x, eps)) for x in v], q.float())  # noqa: E731
        v = [inputs]
        for k, layer in enumerate(layers):
            y = layer(mix(v, pseudo_queries[k]))
            v = v + [y] if k % BLOCK_SIZE == 0 else v[:-1] + [v[-1] + y]
        return mix(v, pseudo_queries[-1])


class LigerMHC(torch.nn.Module):
    def __init__(self, layer, *, hc, c, tmax=20, rms_eps=1e-6, pre_eps=0.0, sinkhorn_eps=1e-6, post_mult=2.0, phi_dtype=torch.float16):
        super().__init__()
        self.layer, self.tmax, self.eps = layer, tmax, rms_eps
        self.phi = torch.nn.Parameter(torch.zeros(hc * c, hc * hc + 2 * hc, dtype=phi_dtype))
        self.b = torch.nn.Parameter(torch.zeros(hc * hc + 2 * hc))
        self.alpha_pre, self.alpha_post, self.alpha_res = (torch.nn.Parameter(torch.ones(())) for _ in range(3))

    def forward(self, x):
        mix = rms_norm(x.flatten(-2).float(), (x[0, 0].numel(),), None, self.eps) @ self.phi.float()
        pre, post, res = ((z + a) for z, a in zip((mix * self.scales()).split((4, 4, 16), -1), self.b.split((4, 4, 16))))
        A = residuals.sinkhorn(res.unflatten(-1, (4, 4)).movedim((-1, -2), (0, 1)), self.tmax).movedim((0, 1), (-1, -2))
        y = self.layer((pre.sigmoid().unsqueeze(-2) @ x.float()).squeeze(-2).to(x.dtype))
        return (A @ x.float() + 2 * post.sigmoid().unsqueeze(-1) * y.unsqueeze(-2)).to(x.dtype)

    def scales(self):
        return torch.cat([a.expand(n) for a, n in ((self.alpha_pre, 4), (self.alpha_post, 4), (self.alpha_res, 16))])


MODULES = {
    "fla.ops.attnres": SimpleNamespace(fused_attnres=fused_attnres),
    "flash_attn_res.experimental.autograd": SimpleNamespace(BlockAttentionResiduals=BlockAttentionResiduals),
    "liger_kernel.transformers.mhc": SimpleNamespace(LigerMHC=LigerMHC),
}
SERVED = [(peer, rule) for peer, (rules, *_) in bench_kernels.PEERS.items() for rule in rules]


def stand_ins(monkeypatch, modules):
    for name, module in modules.items():
        for parent in "fla", "fla.ops", "flash_attn_res", "flash_attn_res.experimental", "liger_kernel", "liger_kernel.transformers":
            monkeypatch.setitem(sys.modules, parent, SimpleNamespace())
        monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.parametrize("peer,rule", SERVED)
def test_the_kernels_of_others_are_given_the_same_work(peer, rule, monkeypatch):
    stand_ins(monkeypatch, MODULES)
    torch.manual_seed(0)
    model = bench_kernels.stack(rule if rule != "blockattnres" else "blockattnres:n_blocks=3", 3, 64, "cpu")
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith(("norm.weight", "bias")):  # so that streams part, and it matters which goes where
                p.normal_(std=2)
    x, results = torch.randn(1, 3, 64).bfloat16(), []
    for form, dtype in (bench_kernels.ours, F32), (peer, BF16):  # in this order: peers round the norms
        leaf = x.to(dtype).requires_grad_()
        y = form(model)(leaf)
        y.sum().backward()
        results.append((y.detach().double(), leaf.grad.double()))
    (y, dx), (z, dz) = results
    assert z.dtype == y.dtype and error(z, y) < 2e-2 and error(dz, dx) < 4e-2


@pytest.mark.parametrize("peer,rule", SERVED)
def test_where_others_are_not_installed_or_fail_the_benchmark_says_so(peer, rule, monkeypatch):
    stand_ins(monkeypatch, dict.fromkeys(MODULES))
    assert bench_kernels.beside(peer, rule, 1, 32, 2, False, "cpu") == "not installed"

    def fails(*_, **__):
        raise ValueError("no such number of sources\nand more")

    theirs = SimpleNamespace(fused_attnres=fails, LigerMHC=fails, BlockAttentionResiduals=SimpleNamespace(apply=fails))
    stand_ins(monkeypatch, dict.fromkeys(MODULES, theirs))
    assert bench_kernels.beside(peer, rule, 1, 32, 2, True, "cpu") == "failed: ValueError: no such number of sources"


# ---------------------------------------------------------------------------------------------------------------------
# MoDA on a GPU, with a stand-in for the one operator that is not here


@pytest.fixture
def stand_in(monkeypatch):
    """Takes the place of the CPU's operator and is as hard to please as the GPU's: heads of a multiple of 8 channels, and their scale."""
    widths = []

    def attention(q, k, v, scale):
        assert q.shape[-1] % 8 == 0 and all(x.stride(-1) == 1 for x in (q, k, v))
        widths.append(q.shape[-1])
        scores = (q @ k.mT * scale).float().masked_fill(torch.ones(q.shape[-2], q.shape[-2]).triu(1).bool(), -torch.inf)
        return (scores.softmax(-1).to(v.dtype) @ v), scores.logsumexp(-1), "seed"

    def gradients(g, q, k, v, o, lse, seed, scale):
        assert all(x.shape[-1] % 8 == 0 for x in (g, q, k, v, o)) and seed == "seed"
        future = torch.ones(q.shape[-2], q.shape[-2]).triu(1).bool()
        p = ((q @ k.mT * scale).float() - lse.unsqueeze(-1)).exp().masked_fill(future, 0.0).to(q.dtype)
        ds = p * (g @ v.mT - (g * o).sum(-1, keepdim=True)) * scale
        return ds @ k, ds.mT @ q, p.mT @ g

    monkeypatch.setitem(residuals.FUSED_ATTENTION, "cpu", (attention, gradients, 8))
    return widths


@pytest.mark.parametrize("d_head", [76, 70, 60, 40, 25, 8])
@pytest.mark.parametrize("dtype,most", [(F32, 2e-6), (BF16, 2e-2)])
def test_attention_over_depth_is_exact_around_an_operator_that_wants_other_heads(d_head, dtype, most, stand_in):
    g = torch.Generator().manual_seed(d_head)
    q, dy = torch.randn(2, 2, 4, 9, d_head, generator=g)
    k, v, *C = torch.randn(8, 2, 2, 9, d_head, generator=g)
    results = []
    for form, kind in (residuals.depth_attention, dtype), (by_all_scores, torch.float64):
        inputs = [x.to(dtype).to(kind).clone().requires_grad_() for x in (q, k, v, *C)]
        y = form(*inputs[:3], list(zip(inputs[3::2], inputs[4::2])))
        y.backward(dy.to(dtype).to(kind))
        assert y.dtype == kind and all(x.grad.dtype == kind for x in inputs)
        results.append([y.detach(), *(x.grad for x in inputs)])
    assert stand_in == [d_head + -d_head % 8]
    assert max(error(a, b) for a, b in zip(*results)) < most


def by_all_scores(q, k, v, C):
    k, v = (x.repeat_interleave(2, dim=1) for x in (k, v))
    return residuals.depth_attention_by_scores(q, k, v, *zip(*C))

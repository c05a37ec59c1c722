"""
Every probe a second time, with loops over layers and tokens, and where a model has a known answer, that answer.

The first part has answers in closed form. The second recomputes all numbers from the definitions: states, skips and swaps are
written out here, from the parameters alone. The third walks RULES and asks what every probe owes to every rule.
"""

import copy
import math
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import probe
from configs import Mistake, ModelConfig
from model import Transformer
from residuals import RULES, Residual

V, d = 20, 8
EOT = V - 1
PROBES = "angular causal permutation paths pruning lens share transport health".split()
every_rule = pytest.mark.parametrize("residual", RULES)
every_probe = pytest.mark.parametrize("name", PROBES)


def noise(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def sample(windows=3, T=5, seed=0):
    return torch.randint(EOT, (windows, T + 1), generator=torch.Generator().manual_seed(seed))


TOKENS = sample()


def build(residual="preln", n_layer=3, **changes):
    """A model in float64 whose every parameter is off its starting point: no gain one, no query zero, no routing one-hot."""
    shape = dict(d_model=d, n_head=2, vocab_size=V, seq_len=16)
    torch.manual_seed(0)
    model = Transformer(ModelConfig(residual=residual, n_layer=n_layer, **{**shape, **changes})).double()
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            p.mul_(0.3).add_(0.6 * noise(*p.shape, seed=i + 1))
    return model


class Give(nn.Module):
    """A branch of one's own; some rules look for the last matrix of a branch, none at what it is made of."""

    def __init__(self, F):
        super().__init__()
        self.F = F

    def forward(self, x):
        return self.F(x)


def of_branches(residual, *branches, embedding=None, **changes):
    """One layer for each F: its attention is F, its feed-forward gives zero. All gains are at their start."""
    torch.manual_seed(0)
    cfg = ModelConfig(residual=residual, n_layer=len(branches), d_model=changes.pop("d_model", d), n_head=1, vocab_size=V, seq_len=16)
    model = Transformer(cfg).double()
    with torch.no_grad():
        model.embed.weight.copy_(noise(*model.embed.weight.shape) if embedding is None else embedding.expand_as(model.embed.weight))
        for block, F in zip(model.blocks, branches):
            block.attn, block.mlp = Give(F), Give(torch.zeros_like)
            if residual == "rezero":
                block.attn_residual.a.fill_(1.0)
    return model


@torch.no_grad()
def silence(block):
    block.attn.out.weight.zero_()
    block.mlp.out.weight.zero_()


def close(ours, theirs, tolerance=1e-11):
    __tracebackhide__ = True
    ours, theirs = np.asarray(ours), np.asarray(theirs)
    assert ours.shape == theirs.shape
    assert np.abs(ours - theirs).max() <= tolerance * max(1.0, np.abs(theirs).max()), np.abs(ours - theirs).max()


def has_no_answer(name, model):
    """Weights from branch to branch need a route, shares a mixture, and maps of streams need streams."""
    connections = [connection for connection, _ in model.branches()]
    if name == "paths":
        return any(type(c).route is Residual.route for c in connections)
    if name == "share":
        return not hasattr(model.reader, "mixture")
    return name in ("transport", "health") and getattr(connections[0], "m", 1) == 1


# ---------------------------------------------------------------------------------------------------------------------
# Known answers


def test_angles_between_known_states():
    points = torch.tensor([[1.0, 0], [1, 1], [0, 2], [-3, 0], [1, 0]], dtype=torch.float64)
    steps = [lambda x, step=step: step.expand_as(x) for step in points[1:] - points[:-1]]
    model = of_branches("preln", *steps, embedding=points[0], d_model=2)
    degrees = [0, 45, 90, 180, 0]
    expected = [[min(abs(a - b), 360 - abs(a - b)) / 180 for a in degrees] for b in degrees]
    ours = probe.measure("angular", model, TOKENS)["distance"]
    close(ours, expected, 1e-7)
    assert ours[0, 3] == ours[4, 3] == 1.0  # of opposite states, whatever the last bit of the cosine


@pytest.mark.parametrize("precision", [torch.float64, torch.float32])
def test_a_state_is_at_no_distance_from_itself(precision):
    model = build("hc", n_layer=5).to(precision)
    ours = probe.measure("angular", model, TOKENS)["distance"]
    assert not np.diag(ours).any() and (ours + np.eye(6) > 0).all()
    close(ours, ours.T, 1e-15 if precision == torch.float64 else 1e-7)


def test_parallel_states_are_at_no_distance():
    """Rounded, some of their cosines are above one."""
    model = of_branches("rezero", *(lambda h, c=c: c * h for c in (0.1, 0.7, 1.3, 2.9)))
    for window in sample(4, 16):
        assert probe.measure("angular", model, window[None])["distance"].max() < 1e-7


def test_causal_score_of_layers_that_scale():
    """Layer l makes (1 + c_l) h of h. Without layer s, all that follows is smaller by 1 + c_s."""
    c = [0.5, -0.5, 3.0, 1.0]
    model = of_branches("rezero", *(lambda h, c=c: c * h for c in c))
    expected = [[abs(1 / (1 + c[s]) - 1) if l > s else 0 for l in range(4)] for s in range(4)]
    close(probe.measure("causal", model, TOKENS)["score"], expected)


def test_causal_score_of_layers_that_do_not_look():
    model = of_branches("preln", *(lambda x, i=i: noise(d, seed=i).expand_as(x) for i in range(4)))
    assert probe.measure("causal", model, TOKENS)["score"].max() < 1e-14


def test_where_a_layer_makes_no_update_the_causal_score_is_over_1e_minus_8():
    x, step = torch.zeros(d, dtype=torch.float64), torch.full((d,), 3e-9, dtype=torch.float64)
    model = of_branches("rezero", lambda h: step.expand_as(h), lambda h: h - step, embedding=x)  # the second undoes a missing first
    close(probe.measure("causal", model, TOKENS)["score"], [[0, math.sqrt(d) * 0.3], [0, 0]])


@pytest.mark.parametrize("residual", ["preln", "hc", "layerscale"])
def test_a_layer_that_adds_nothing(residual):
    """It depends on nothing, nothing depends on it, and to pass it is to change nothing: 0 1 2 3 = 1 0 2 3 = 0 2 1 3."""
    model = build(residual, n_layer=4)
    silence(model.blocks[1])
    for connection in (model.blocks[1].attn_residual, model.blocks[1].mlp_residual) if residual == "hc" else ():
        connection.A.data.copy_(torch.eye(4))
        connection.s_in.data.zero_()
    causal = probe.measure("causal", model, TOKENS)["score"]
    assert max(causal[1].max(), causal[:, 1].max()) < 1e-12 < 1e-3 < min(causal[0, 2], causal[0, 3], causal[2, 3])
    swapped = probe.measure("permutation", model, TOKENS)["score"]
    assert max(swapped[0, 1], swapped[1, 2]) < 1e-12 < 1e-4 < min(swapped[0, 2], swapped[0, 3], swapped[1, 3], swapped[2, 3])
    pruned = probe.measure("pruning", model, TOKENS)
    assert abs(pruned["without"][1] - pruned["base"]) < 1e-12 < 1e-4 < np.abs(np.delete(pruned["without"], 1) - pruned["base"]).min()


@pytest.mark.parametrize("residual", ["preln", "deepnorm", "keel", "layerrope", "hc", "mhc", "fullattnres", "moda", "denseformer"])
def test_equal_layers_are_interchangeable(residual):
    model = build(residual, n_layer=4)
    copy_parameters(model.blocks[1], model.blocks[2])
    if residual == "fullattnres":  # with a layer goes the mixture after it
        copy_parameters(*(block.attn_residual.reader.mixture for block in model.blocks[2:]))
    ours = probe.measure("permutation", model, TOKENS)
    assert ours["score"][1, 2] == 0
    assert sorted(zip(*np.nonzero(ours["score"] > 1e-5))) == [(0, 1), (0, 2), (0, 3), (1, 3), (2, 3)]


@torch.no_grad()
def copy_parameters(a, b):
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        if p.shape == q.shape:
            q.copy_(p)


def test_paths_of_preln_are_one():
    ours = probe.measure("paths", build("preln", n_layer=4), TOKENS)
    assert np.array_equal(ours["weight"], np.triu(np.ones((8, 8)))) and not ours["spread"].any()


def test_paths_of_a_fresh_attnres_are_uniform():
    model = Transformer(ModelConfig(residual="fullattnres", n_layer=4, d_model=d, n_head=2, vocab_size=V, seq_len=16)).double()
    ours = probe.measure("paths", model, TOKENS)
    close(ours["weight"], [[1 / (k + 1) if i <= k else 0 for k in range(8)] for i in range(8)], 1e-14)
    close(ours["spread"], np.zeros((8, 8)), 1e-14)


def test_paths_of_attnres_are_convex():
    weight = probe.measure("paths", build("fullattnres", n_layer=4), TOKENS)["weight"]
    close(weight.sum(0), np.ones(8), 1e-13)
    assert (weight[np.triu_indices(8)] > 0).all() and not np.tril(weight, -1).any()
    assert np.abs(weight[:, -1] - 1 / 8).max() > 0.01


def test_paths_of_constant_hyper_connections_are_products_of_matrices():
    model = build("hc:m=3:dynamic=off", n_layer=3)
    c = [[p.detach().numpy() for p in (c.alpha, c.A, c.beta)] for c, _ in model.branches()]
    expected = np.zeros((6, 6))
    for i in range(6):
        along = np.ones(3) if i == 0 else c[i - 1][2]  # the embedding is in all streams
        for k in range(i, 6):
            expected[i, k] = along @ c[k][0]
            along = along @ c[k][1]
    ours = probe.measure("paths", model, TOKENS)
    close(ours["weight"], expected, 1e-13)
    close(ours["spread"], np.zeros((6, 6)), 1e-13)


def test_layers_of_a_lens_that_has_seen_all():
    """After the last layer that adds something, the early exit is the prediction."""
    model = build("preln", n_layer=4)
    silence(model.blocks[2])
    silence(model.blocks[3])
    ours = probe.measure("lens", model, TOKENS)
    assert ours["kl"][4] == 0 and abs(ours["kl"][2]) < 1e-14 and abs(ours["kl"][3]) < 1e-14 and ours["kl"][:2].min() > 1e-3
    close(ours["loss"][2:], [probe.measure("pruning", model, TOKENS)["base"]] * 3)


@pytest.mark.parametrize("residual", RULES)
def test_the_last_state_of_the_lens_is_the_prediction_itself(residual):
    ours = probe.measure("lens", build(residual), TOKENS)
    assert ours["kl"][-1] == 0 and (ours["kl"][:-1] > 0).all()


# Transport: maps put in the place of those of the connections


def routed(maps, residual="hc:m=4", tokenwise=False):
    """A model whose connection k mixes its streams by maps[k], or by maps[k](H) if tokenwise."""
    model = build(residual, n_layer=len(maps) // 2)
    ones = torch.ones(model.blocks[0].attn_residual.m, dtype=torch.float64)
    for (connection, _), A in zip(model.branches(), maps):
        if tokenwise:
            connection.route = lambda H, A=A: (ones.expand(*H.shape[:2], -1), A(H), ones.expand(*H.shape[:2], -1))
        else:
            connection.route = lambda H, A=A: (ones, A, ones)
    return model


I, U = torch.eye(4).double(), torch.full((4, 4), 0.25).double()


@pytest.mark.parametrize("A", [I, I.roll(1, 0), I[[2, 0, 3, 1]]], ids=["identity", "cyclic", "permutation"])
def test_permutations_keep_all_streams_apart(A):
    ours = probe.measure("transport", routed([A] * 6), TOKENS)
    close(ours["rank"], [4] * 6)
    close(ours["singular"], [1] * 4)
    close(ours["cosine"], np.eye(4))
    assert np.array_equal(ours["rank"], ours["rank_low"]) or np.abs(ours["rank"] - ours["rank_low"]).max() < 1e-12


@pytest.mark.parametrize("e", [0.05, 0.5])
def test_uniform_mixing_contracts_all_but_one_direction(e):
    ours = probe.measure("transport", routed([(1 - e) * I + e * U] * 6), TOKENS)
    for n in range(1, 7):  # singular values of the product of n maps: 1, q, q, q
        q = (1 - e) ** n
        shares = [s / (1 + 3 * q) for s in (1, q, q, q)]
        assert ours["rank"][n - 1] == pytest.approx(math.prod(p**-p for p in shares), abs=1e-11)
    close(ours["singular"], [1, q, q, q])
    dot = 2 * q * (1 - q) / 4 + (1 - q) ** 2 / 4  # of two rows of q I + (1 - q) U
    close(ours["cosine"], np.full((4, 4), dot / (dot + q * q)) + np.eye(4) * q * q / (dot + q * q))


def test_uniform_maps_leave_one_stream():
    ours = probe.measure("transport", routed([U] * 4), TOKENS)
    close(ours["rank"], [1] * 4, 1e-9)
    close(ours["singular"], [1, 0, 0, 0], 1e-9)
    close(ours["cosine"], np.ones((4, 4)))


def test_transport_takes_the_maps_in_their_order_and_the_angles_of_sources():
    """A row of A is what becomes of one source. Opposite directions count as one."""
    X = torch.tensor([[1.0, 0], [-1, 1]]).double()
    Y = torch.tensor([[2.0, 0], [0, 1]]).double()
    ours = probe.measure("transport", routed([X, Y], "hc:m=2"), TOKENS)
    rows = np.array([[2.0, 0], [-2, 1]])  # X Y; that of Y X would be [[2, 0], [-1, 1]]
    close(ours["cosine"], [[1, 2 / math.sqrt(5)], [2 / math.sqrt(5), 1]])
    s = np.linalg.svd(rows, compute_uv=False)
    close(ours["singular"], s / s[0])
    assert ours["rank"][1] == pytest.approx(math.exp(-sum(p * math.log(p) for p in s / s.sum())), abs=1e-11)


def test_effective_rank():
    s = torch.tensor([[1, 1, 1, 1], [5, 0, 0, 0], [2, 2, 0, 0], [3, 1, 0, 0]], dtype=torch.float64)
    expected = np.array([4, 1, 2, math.exp(-0.75 * math.log(0.75) - 0.25 * math.log(0.25))])
    close(probe.effective_rank(s), expected, 1e-13)
    close(probe.effective_rank(1e-3 * s.view(2, 2, 4)), expected.reshape(2, 2), 1e-13)


# Documents


def rank_of(x):
    """Of diag(1, x)."""
    return math.prod(p**-p for p in (1 / (1 + x), x / (1 + x)))


def documents(tokens, **options):
    """Transport of a model whose first map is diag(1, x) at a token that is embedded as x, and whose second is one."""

    def A(H):
        return torch.stack([torch.ones_like(H[..., 0, 0]), H[..., 0, 0]], -1).diag_embed()

    model = routed([A, lambda H: torch.eye(2).double().expand(*H.shape[:2], 2, 2)], "hc:m=2", tokenwise=True)
    x = torch.linspace(0.02, 0.98, V, dtype=torch.float64)
    with torch.no_grad():
        model.embed.weight[:, 0] = x
    return probe.measure("transport", model, torch.tensor(tokens), **options), [rank_of(e.item()) for e in x]


@pytest.mark.parametrize("batch", [1, 8])
def test_of_two_documents_the_interval_ends_at_their_means(batch, monkeypatch):
    """A quarter of the bootstrap draws one document twice, a quarter the other: more than 2.5 %."""
    monkeypatch.setattr(probe, "BATCH", batch)
    first, second, target = [1, 18, 4, EOT], [12, 15], [7]
    ours, rank = documents([first + second + target], eot=EOT)
    means = sorted(np.mean([rank[t] for t in document]) for document in (first, second))
    close(ours["rank"], [np.mean([rank[t] for t in first + second])] * 2, 1e-12)
    close(ours["rank_low"], [means[0]] * 2, 1e-12)
    close(ours["rank_high"], [means[1]] * 2, 1e-12)


@pytest.mark.parametrize("options", [{}, {"eot": EOT}])
def test_a_window_ends_a_document(options):
    first, second, target = [1, 18, 4], [12, 15, 9], [7]
    ours, rank = documents([first + target, second + target], **options)
    means = sorted(np.mean([rank[t] for t in document]) for document in (first, second))
    close([ours["rank_low"][0], ours["rank_high"][0]], means, 1e-12)


@pytest.mark.parametrize("row", [[EOT, 3, 4, 5, 6, 7], [3, EOT, EOT, 5, 6, 7], [3, 4, 5, 6, EOT, 7], [EOT] * 6, [3, 4, 5, 6, 7, EOT]])
def test_no_document_is_empty(row):
    ours, rank = documents([row, [1, 2, 3, 4, 5, 6]], eot=EOT)
    assert ours["rank"][0] == pytest.approx(np.mean([rank[t] for t in row[:-1] + [1, 2, 3, 4, 5]]), abs=1e-12)
    assert np.isfinite(ours["rank_low"]).all() and (ours["rank_low"] <= ours["rank"]).all() and (ours["rank"] <= ours["rank_high"]).all()


def test_the_interval_of_equal_documents_has_no_width():
    ours, _ = documents([[1, 18, 4, 9]] * 5)
    assert (ours["rank_high"] - ours["rank_low"]).max() < 1e-12 and np.abs(ours["rank"] - ours["rank_low"]).max() < 1e-12


def test_the_interval_is_that_of_the_binomial_distribution():
    """Of 16 documents of two kinds, 95 % of the bootstrap have 4 to 12 of the first: half the width that two documents have."""
    kinds = [[1, 1, 1, 1], [15, 15, 15, 15]]
    two, sixteen = documents(kinds)[0], documents(kinds * 8)[0]
    assert 0.4 < (sixteen["rank_high"] - sixteen["rank_low"])[0] / (two["rank_high"] - two["rank_low"])[0] < 0.6
    assert two["rank"][0] == pytest.approx(sixteen["rank"][0])


def test_late_pairs():
    pairs = np.triu(np.ones((32, 32)), 1)
    for s in range(32):
        for l in range(s + 1, 32):
            one = np.zeros((32, 32))
            one[s, l] = 0.46
            assert probe.late_fraction(one, 0.45) == pytest.approx((s >= 8) / 276, abs=1e-15)
    assert probe.late_fraction(pairs, 0.99) == 1 and probe.late_fraction(pairs, 1.0) == 0  # above, not at, the threshold
    assert probe.late_fraction(np.ones((32, 32)) - pairs, 0.5) == 0  # l > s alone
    assert math.isnan(probe.late_fraction(np.where(pairs, np.nan, 0), 0.5))


@pytest.mark.parametrize(("layers", "first", "pairs"), [(4, 1, 3), (5, 2, 3), (6, 2, 6), (8, 2, 15), (9, 3, 15)])
def test_late_is_from_a_quarter_on_rounded_up(layers, first, pairs):
    score = np.zeros((layers, layers))
    score[first, layers - 1] = 1
    assert probe.late_fraction(score, 0.5) == pytest.approx(1 / pairs)
    score[first - 1] = 1
    assert probe.late_fraction(score, 0.5) == pytest.approx(1 / pairs)


# ---------------------------------------------------------------------------------------------------------------------
# The definitions. `run` gives the states z_0 ... z_L, what is read from each by who comes next, the logits, and, of mixtures,
# their weights p; layer `skip` is left out.


def normed(x, gain=1.0, eps=1e-6):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * gain


def one_stream(model, X, skip):
    z = [model.embed(X)]
    for l, block in enumerate(model.blocks):
        z.append(z[-1] if l == skip else block(z[-1]))
    return z, z


def several_streams(model, X, skip):
    m = model.blocks[0].attn_residual.m
    H = [torch.stack([model.embed(X)] * m, -2)]
    for l, block in enumerate(model.blocks):
        H.append(H[-1] if l == skip else block(H[-1]))
    total = sum if "bias" not in dict(model.blocks[0].attn_residual.named_parameters()) else lambda streams: sum(streams) / m
    return [torch.cat(x.unbind(-2), -1) for x in H], [total(x.unbind(-2)) for x in H]


def with_slots(model, X, skip):
    """MoDA: the slots of a skipped layer hold zeros. It has two, the last layer one."""
    state, z, L = (model.embed(X), []), [], len(model.blocks)
    for l, block in enumerate(model.blocks):
        z.append(state[0])
        heads = block.attn.k.out_features // block.attn.d_head
        zeros = torch.zeros(X.shape[0], heads, X.shape[1], block.attn.d_head, dtype=torch.float64)
        state = (state[0], state[1] + [(zeros, zeros)] * (2 if l < L - 1 else 1)) if l == skip else block(state)
    z.append(state[0])
    return z, z


def with_averages(model, X, skip):
    """DenseFormer: the average after a skipped layer is still taken."""
    z = [model.embed(X)]
    v = [z[0]]
    for l, block in enumerate(model.blocks):
        if l == skip:
            v = [*v, z[-1]]
            z.append(sum(a * x for a, x in zip(block.mlp_residual.a, v)))
        else:
            h, v = block((z[-1], v))
            z.append(h)
    return z, z


def with_sources(model, X, skip, b, p):
    """Attention Residuals, a block of b branches: frozen sources, and a running value that is the last of them."""
    L, eps = len(model.blocks), 1e-5
    mixtures = [connection.reader.mixture for connection, _ in model.branches()] + [model.reader.mixture]

    def mix(k):
        sources = torch.stack([*frozen, running])
        if k == 0:
            p.append(torch.ones(*X.shape, 1))
            return running
        p.append((normed(sources, mixtures[k].gain, eps) @ mixtures[k].w).movedim(0, -1).softmax(-1))
        return torch.einsum("bti,ibtd->btd", p[-1], sources)

    frozen, running, after_gap, z, read = [], model.embed(X), False, [], []
    for l in range(L + 1):
        x = mix(2 * l)
        newest_alone = after_gap and (l == L or 2 * l % b == 0)
        x = running if newest_alone else x
        read.append(x)
        z.append(x if l in (0, L) or 2 * l % b == 0 else running)
        after_gap = l == skip
        if l == skip and l == 0:
            frozen = [running]
        if l in (L, skip):
            continue
        block = model.blocks[l]
        for k, connection, F in (2 * l, block.attn_residual, block.attn), (2 * l + 1, block.mlp_residual, block.mlp):
            x = mix(k) if k % 2 else x
            y = F(normed(x, connection.norm.weight, eps if k else 1e-6))
            if k % b == 0:
                frozen, running = [*frozen, running], y
            else:
                running = running + y
    return z, read


def block_size(model, residual):
    if not residual.startswith("blockattnres"):
        return 1
    return math.ceil(2 * len(model.blocks) / int(residual.partition("n_blocks=")[2] or 8))


@torch.no_grad()
def run(model, residual, X, skip=None):
    key, p, eps = residual.split(":")[0], [], 1e-6
    if "attnres" in key:
        z, read = with_sources(model, X, skip, block_size(model, residual), p)
        eps = 1e-5
    else:
        form = {"hc": several_streams, "mhc": several_streams, "moda": with_slots, "denseformer": with_averages}.get(key, one_stream)
        z, read = form(model, X, skip)
    exits = [(normed(x, model.reader.norm.weight, eps) @ model.head.weight.T).numpy() for x in read]
    return SimpleNamespace(z=[x.numpy() for x in z], exits=exits, logits=exits[-1], p=[x.numpy() for x in p])


def log_softmax(row):
    top = max(row)
    return row - top - math.log(sum(math.exp(e - top) for e in row))


def loss_of(logits, Y):
    return np.mean([-log_softmax(logits[i, t])[Y[i, t]] for i in range(Y.shape[0]) for t in range(Y.shape[1])])


LOOPS = [
    *("preln", "postln", "sandwichln", "lns", "deepnorm", "keel", "layerrope", "hc", "mhc", "fullattnres", "blockattnres", "moda"),
    *("mixln", "rezero", "layerscale", "denseformer", "hc:m=2", "mhc:m=2", "moda:post=on", "lns:at=attention"),
    *("blockattnres:n_blocks=2", "blockattnres:n_blocks=3", "blockattnres:n_blocks=4"),
]
every_form = pytest.mark.parametrize("residual", LOOPS)


def for_loops(residual, **changes):
    """Five layers: two blocks are of five branches, three of four, four of three."""
    model = build(residual, n_layer=5, n_kv_head=1, **changes)
    return model, TOKENS[:, :-1], TOKENS[:, 1:].numpy()


def tokens_of(*arrays):
    """Token by token, the vectors of each array (n, T, D)."""
    return zip(*(x.reshape(-1, x.shape[-1]) for x in arrays))


def length(x):
    return math.sqrt(sum(e * e for e in x))


@every_form
def test_the_forms_are_the_model(residual):
    model, X, _ = for_loops(residual)
    with torch.no_grad():
        close(run(model, residual, X).logits, model(X))


@every_form
def test_angular_distance(residual):
    model, X, _ = for_loops(residual)
    z = run(model, residual, X).z
    expected = np.zeros((6, 6))
    for i in range(6):
        for j in range(6):
            cosines = [x @ y / (length(x) * length(y)) for x, y in tokens_of(z[i], z[j])]
            expected[i, j] = 0 if i == j else np.mean([math.acos(min(1, max(-1, c))) for c in cosines]) / math.pi
    close(probe.measure("angular", model, TOKENS)["distance"], expected, 1e-9)


@every_form
def test_causal_score(residual):
    model, X, _ = for_loops(residual)
    z, expected = run(model, residual, X).z, np.zeros((5, 5))
    for s in range(5):
        y = run(model, residual, X, skip=s).z
        for l in range(s + 1, 5):
            ratios = []
            for a, b, a_, b_ in tokens_of(z[l], z[l + 1], y[l], y[l + 1]):
                ratios.append(length((b_ - a_) - (b - a)) / max(length(b - a), 1e-8))
            expected[s, l] = np.mean(ratios)
    close(probe.measure("causal", model, TOKENS)["score"], expected, 1e-10)


def with_layers_exchanged(model, residual, i, j):
    """A copy in which each tensor of layer i has the values of its namesake in layer j. Of attention over depth, the mixture
    before a layer stays and that after it, maybe the head's, is exchanged; the scales of LNS move, being no tensors."""
    other, old = copy.deepcopy(model), model.state_dict()
    new, L = dict(old), len(model.blocks)
    pairs = [(name, name.replace(f"blocks.{i}.", f"blocks.{j}.", 1)) for name in old if name.startswith(f"blocks.{i}.")]
    if "attnres" in residual:
        mixture = [f"blocks.{l}.attn_residual.reader.mixture." for l in range(L)] + ["reader.mixture."]
        pairs = [pair for pair in pairs if mixture[i] not in pair[0]]
        pairs += [(mixture[i + 1] + part, mixture[j + 1] + part) for part in ("w", "gain")]
    for a, b in pairs:
        if b in old and old[a].shape == old[b].shape:
            new[a], new[b] = old[b], old[a]
    other.load_state_dict(new)
    if residual.startswith("lns"):
        for part in "attn_residual", "mlp_residual":
            a, b = getattr(other.blocks[i], part), getattr(other.blocks[j], part)
            a.scale, b.scale = b.scale, a.scale
    return other


@every_form
def test_permutation_score(residual):
    model, X, Y = for_loops(residual)
    base, expected = loss_of(run(model, residual, X).logits, Y), np.zeros((5, 5))
    for i in range(5):
        for j in range(i + 1, 5):
            swapped = with_layers_exchanged(model, residual, i, j)
            expected[i, j] = abs(loss_of(run(swapped, residual, X).logits, Y) - base) / base
    ours = probe.measure("permutation", model, TOKENS)
    close(ours["base"], base)
    close(ours["score"], expected)
    assert expected[np.triu_indices(5, 1)].min() > 1e-6  # in each pair there is something to see


@every_form
def test_pruning(residual):
    model, X, Y = for_loops(residual)
    ours = probe.measure("pruning", model, TOKENS)
    close(ours["base"], loss_of(run(model, residual, X).logits, Y))
    close(ours["without"], [loss_of(run(model, residual, X, skip=s).logits, Y) for s in range(5)])


@every_form
def test_logit_lens(residual):
    model, X, Y = for_loops(residual)
    exits = run(model, residual, X).exits
    kl = []
    for logits in exits:
        both = [(log_softmax(p), log_softmax(q)) for p, q in tokens_of(exits[-1], logits)]
        kl.append(np.mean([sum(math.exp(a) * (a - b) for a, b in zip(p, q)) for p, q in both]))
    ours = probe.measure("lens", model, TOKENS)
    close(ours["kl"], kl)
    close(ours["loss"], [loss_of(logits, Y) for logits in exits])


@pytest.mark.parametrize("residual", [v for v in LOOPS if "attnres" in v])
def test_share_of_the_newest_source(residual):
    model, X, _ = for_loops(residual)
    p, b = run(model, residual, X).p, block_size(model, residual)
    ours = probe.measure("share", model, TOKENS)
    close(ours["newest"], [np.mean([row[-1] for (row,) in tokens_of(x)]) for x in p])
    close(ours["others"], [np.mean([sum(row[:-1]) for (row,) in tokens_of(x)]) for x in p])
    close(ours["newest"] + ours["others"], np.ones(11), 1e-12)
    close(ours["opens"], [k % b == 0 for k in range(10)] + [0], 0)
    assert ours["newest"][0] == 1 and len({*np.round(ours["newest"], 3)}) > 5


def dyed(residual):
    """A model that never touches channel 0: it is empty, no branch sees it, no routing depends on it but through a norm."""
    model = build(residual, n_layer=3, d_model=16)
    with torch.no_grad():
        for p in model.parameters():
            for axis in range(p.ndim):
                if p.shape[axis] % 16 == 0:
                    p.movedim(axis, 0)[::16] = 0
    return model


PATHS = [key for key in RULES if not has_no_answer("paths", build(key))]


@pytest.mark.parametrize("residual", [*PATHS, "hc:m=2", "hc:dynamic=off", "mhc:constraint=free", "blockattnres:n_blocks=2"])
def test_paths_are_what_arrives_of_a_dye(residual):
    """A drop of it in channel 0 of what branch i has written, and how much of it is in what branch k reads before its norm."""
    model, drop = dyed(residual), 1e-5
    branches = list(model.branches())
    sources = [model.embed, *(F for _, F in branches[:-1])]
    mean, std = np.zeros((6, 6)), np.zeros((6, 6))
    for i, source in enumerate(sources):
        arrived = {}
        hooks = [source.register_forward_hook(lambda module, args, y: y + drop * torch.eye(16)[0].double())]
        for k, (connection, F) in enumerate(branches):
            entrance = F if isinstance(connection.norm, nn.Identity) else connection.norm
            catch = lambda module, args, k=k, arrived=arrived: arrived.update({k: args[0][..., 0] / drop})
            hooks.append(entrance.register_forward_pre_hook(catch))
        with torch.no_grad():
            model(TOKENS[:, :-1])
        for hook in hooks:
            hook.remove()
        for k in range(6):
            mean[i, k], std[i, k] = arrived[k].mean(), arrived[k].std(correction=0)
    assert not np.tril(mean, -1).any() and (mean[np.triu_indices(6)] != 0).all()
    ours = probe.measure("paths", model, TOKENS)
    close(ours["weight"], mean, 1e-8)
    close(ours["spread"], std, 1e-8)


STREAMS = "hc mhc hc:m=2 hc:dynamic=off mhc:constraint=row mhc:constraint=free mhc:constraint=identity mhc:dynamic=off".split()


@torch.no_grad()
def maps(model, X):
    """A of each connection, (n T, m, m), as the connection has it for the streams that reach it."""
    H, found = model.enter(model.embed(X)), []
    for connection, F in model.branches():
        A = connection.route(H)[1]
        found.append(A.expand(*X.shape, *A.shape[-2:]).flatten(0, 1).numpy())
        H = connection(H, F)
    return found


@pytest.mark.parametrize("residual", STREAMS)
def test_transport(residual):
    model, X, _ = for_loops(residual)
    A = maps(model, X)
    m, tokens = A[0].shape[-1], X.numel()
    ranks, cosine, singular = np.zeros((10, tokens)), np.zeros((m, m)), np.zeros(m)
    for t in range(tokens):
        product = np.eye(m)
        for k in range(10):
            product = product @ A[k][t]
            s = np.linalg.svd(product, compute_uv=False)
            ranks[k, t] = math.exp(-sum(p * math.log(p) for p in s / s.sum()))
        singular += s / s[0] / tokens
        for i in range(m):
            for j in range(m):
                cosine[i, j] += abs(product[i] @ product[j]) / (length(product[i]) * length(product[j])) / tokens
    ours = probe.measure("transport", model, TOKENS)
    close(ours["rank"], ranks.mean(1), 1e-10)
    close(ours["cosine"], cosine, 1e-10)
    close(ours["singular"], singular, 1e-10)
    windows = ranks.reshape(10, *X.shape).mean(-1)  # of three documents, 1 bootstrap in 27 has but the lowest
    close(ours["rank_low"], windows.min(1), 1e-10)
    close(ours["rank_high"], windows.max(1), 1e-10)


@pytest.mark.parametrize("residual", STREAMS)
def test_health_of_the_maps(residual):
    model, X, _ = for_loops(residual)
    ours = probe.measure("health", model, TOKENS)
    for k, A in enumerate(maps(model, X)):
        m = A.shape[-1]
        assert ours["rows"][k] == pytest.approx(np.mean([max(abs(sum(a[s]) - 1) for s in range(m)) for a in A]), abs=1e-12)
        assert ours["columns"][k] == pytest.approx(np.mean([max(abs(sum(a[:, t]) - 1) for t in range(m)) for a in A]), abs=1e-12)
        off = [sum(abs(a[s, t]) for s in range(m) for t in range(m) if s != t) / sum(abs(e) for e in a.flat) for a in A]
        assert ours["off_diagonal"][k] == pytest.approx(np.mean(off), abs=1e-12)


@pytest.mark.parametrize("residual", ["hc:m=2", "mhc:m=2", "mhc:m=3", "hc:m=2:dynamic=off", "mhc:m=2:constraint=row"])
def test_health_of_the_gradient(residual):
    """By differences of the loss, one logit after the other."""
    model = build(residual, n_layer=2)
    X, Y, step = TOKENS[:, :-1], TOKENS[:, 1:], 1e-5

    @torch.no_grad()
    def loss():
        return cross_entropy(model(X).flatten(0, 1), Y.flatten()).item()

    expected = []
    for connection, _ in model.branches():
        m = connection.m
        logits = connection.A.data.view(-1) if residual.startswith("hc") else connection.bias.data[m : m + m * m]
        slopes = []
        for i in range(m * m):
            there = logits[i].item()
            logits[i] = there + step
            up = loss()
            logits[i] = there - step
            slopes.append((up - loss()) / (2 * step))
            logits[i] = there
        expected.append(length(slopes))
    ours = probe.measure("health", model, TOKENS)["gradient"]
    assert min(expected[1:-1]) > 1e-4  # the first map of mHC mixes streams that are still equal, the last is followed by their mean
    assert ours == pytest.approx(expected, rel=1e-5, abs=1e-8)


def test_maps_of_mhc_are_normed_by_rows_last():
    ours = probe.measure("health", build("mhc"), TOKENS)
    assert ours["rows"].max() < 1e-5 < 1e-4 < ours["columns"].max() < 0.05
    assert probe.measure("health", build("hc"), TOKENS)["rows"].min() > 0.1


# Likelihood of continuations


PAIRS = [([1, 2, 3], [4, 5]), ([6], [7]), ([8] * 5, [9, 10, 11, 12]), ([3, 1], [4, 1, 5, 9, 2, 6]), ([6], [8]), ([1, 2, 3], [4, 5])]


@torch.no_grad()
def nll_by_hand(model, context, target, blocks=None):
    ids = (context + target)[-(model.seq_len + 1) :]
    logits = model(torch.tensor([ids[:-1]]), blocks=blocks)[0].numpy()
    rows = logits[len(ids) - 1 - len(target) :]
    return sum(-log_softmax(row)[id] for row, id in zip(rows, target, strict=True))


@pytest.mark.parametrize("residual", ["preln", "hc", "fullattnres", "moda"])
def test_continuations_are_scored_as_one_by_one(residual):
    model = build(residual)
    one_by_one = [nll_by_hand(model, *pair) for pair in PAIRS]
    for times in 1, 200:  # in one batch, and in several
        ours = probe.continuation_nll(model, PAIRS * times)
        assert ours.dtype == np.float64
        close(ours, one_by_one * times)


def test_a_long_context_is_cut_on_the_left():
    model, long = build("preln"), sample(1, 40)[0].tolist()
    pairs = [(long[:n], target) for n in (13, 14, 15, 16, 17, 40) for target in (long[:1], long[:3], long[:15], long[:16])]
    close(probe.continuation_nll(model, pairs), [nll_by_hand(model, *pair) for pair in pairs])
    other = [([0] * 30 + context, target) for context, target in pairs[-4:]]
    close(probe.continuation_nll(model, other), probe.continuation_nll(model, pairs[-4:]))


def test_a_target_that_does_not_fit_has_its_line():
    model = build("preln")
    probe.continuation_nll(model, [([1], [2] * 16)])
    with pytest.raises(Mistake, match="17") as mistake:
        probe.continuation_nll(model, [([1], [2]), ([1], [2] * 17)])
    assert "16" in str(mistake.value) and "\n" not in str(mistake.value)


@pytest.mark.parametrize("residual", ["preln", "fullattnres"])
def test_continuations_without_a_layer(residual):
    model = build(residual)
    blocks = [block.skip if l == 1 else block for l, block in enumerate(model.blocks)]
    ours = probe.continuation_nll(model, PAIRS, blocks=blocks)
    close(ours, [nll_by_hand(model, *pair, blocks=blocks) for pair in PAIRS])
    assert np.abs(ours - probe.continuation_nll(model, PAIRS)).min() > 1e-4


# ---------------------------------------------------------------------------------------------------------------------
# What every probe owes to every rule


def shapes(name, L, m):
    return {
        "angular": dict(distance=(L + 1, L + 1)),
        "causal": dict(score=(L, L)),
        "permutation": dict(base=(), score=(L, L)),
        "paths": dict(weight=(2 * L, 2 * L), spread=(2 * L, 2 * L)),
        "pruning": dict(base=(), without=(L,)),
        "lens": dict(kl=(L + 1,), loss=(L + 1,)),
        "share": dict.fromkeys(("newest", "others", "opens"), (2 * L + 1,)),
        "transport": {**dict.fromkeys(("rank", "rank_low", "rank_high"), (2 * L,)), "cosine": (m, m), "singular": (m,)},
        "health": dict.fromkeys(("rows", "columns", "off_diagonal", "gradient"), (2 * L,)),
    }[name]


def snapshot(model):
    """All that a probe might leave behind in the model."""
    found = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        found[name] = p.detach().clone(), p.requires_grad, None if p.grad is None else p.grad.clone()
    for name, x in model.named_buffers(remove_duplicate=False):
        found[name] = x.clone(), False, None
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    modules = {name: (m.training, sorted(vars(m)), [len(getattr(m, hook)) for hook in hooks]) for name, m in model.named_modules()}
    with torch.no_grad():
        logits = model(TOKENS[:, :-1])
    return found, modules, logits


def same(a, b):
    return a is b or (a is not None and b is not None and torch.equal(a, b))


def check_untouched(model, before):
    __tracebackhide__ = True
    tensors, modules, logits = before
    now_tensors, now_modules, now_logits = snapshot(model)
    assert now_modules == modules and now_tensors.keys() == tensors.keys()
    for name, (value, needs, grad) in tensors.items():
        now_value, now_needs, now_grad = now_tensors[name]
        assert torch.equal(now_value, value) and now_needs == needs and same(now_grad, grad), name
    assert torch.equal(now_logits, logits)
    assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()


@every_rule
@every_probe
def test_a_probe_has_an_answer_or_says_that_it_has_none(name, residual):
    model = build(residual, n_layer=2)
    if has_no_answer(name, model):
        with pytest.raises(NotImplementedError, match=r"\w+ .*\w+"):
            probe.measure(name, model, TOKENS)
        return
    exact, m = probe.measure(name, model, TOKENS), getattr(model.blocks[0].attn_residual, "m", None)
    rounded = probe.measure(name, model.float(), TOKENS)
    for key, shape in shapes(name, 2, m).items():
        x = exact[key]
        assert x.shape == shape and x.dtype == rounded[key].dtype == np.float64 and np.isfinite(x).all(), key
        assert np.abs(rounded[key] - x).max() <= 1e-3 * max(0.1, np.abs(x).max()), key


def test_who_has_an_answer():
    models = {key: build(key, n_layer=4) for key in RULES}
    answers = {name: {key for key in RULES if not has_no_answer(name, models[key])} for name in ("paths", "share", "transport")}
    assert answers["paths"] >= {"preln", "lns", "hc", "mhc", "fullattnres", "blockattnres", "rezero", "denseformer"}
    assert not answers["paths"] & {"postln", "sandwichln", "deepnorm", "keel", "layerrope", "moda", "mixln", "layerscale"}
    assert answers["share"] >= {"fullattnres", "blockattnres"} and not answers["share"] & {"preln", "hc", "mhc", "moda", "denseformer"}
    assert answers["transport"] >= {"hc", "mhc"} and not answers["transport"] & {"preln", "fullattnres", "blockattnres", "denseformer"}


@every_rule
@every_probe
def test_a_probe_leaves_no_trace(name, residual):
    model = build(residual, n_layer=2)
    model.train(residual != "preln")
    model.embed.weight.requires_grad_(False)
    if residual in ("hc", "mhc", "keel"):  # in the middle of a training step
        model(TOKENS[:, :-1]).sum().backward()
    before, states = snapshot(model), (torch.get_rng_state(), np.random.get_state()[1].copy())
    tokens = TOKENS.clone()
    try:
        first = probe.measure(name, model, tokens)
    except NotImplementedError:
        assert has_no_answer(name, model)
    else:
        again = probe.measure(name, model, tokens)
        assert all(np.array_equal(first[key], again[key]) for key in first)
    check_untouched(model, before)
    assert torch.equal(states[0], torch.get_rng_state()) and np.array_equal(states[1], np.random.get_state()[1])
    assert torch.equal(tokens, TOKENS)


@every_rule
@every_probe
def test_a_probe_that_is_interrupted_leaves_no_trace(name, residual):
    model = build(residual, n_layer=3)
    if has_no_answer(name, model):
        return
    calls = interrupted(name, model, at=None)
    before = snapshot(model)
    for at in {1, calls // 2 + 1, calls}:
        with pytest.raises(KeyboardInterrupt):
            interrupted(name, model, at)
        check_untouched(model, before)


def interrupted(name, model, at):
    """Ctrl-C at the at-th call of a branch in the middle of the model; gives how many calls there were."""
    calls = 0

    def count(module, args):
        nonlocal calls
        calls += 1
        if calls == at:
            raise KeyboardInterrupt

    with model.blocks[1].mlp.register_forward_pre_hook(count):
        probe.measure(name, model, TOKENS)
    return calls


@every_rule
@every_probe
def test_numbers_do_not_depend_on_the_micro_batch(name, residual, monkeypatch):
    model, tokens = build(residual, n_layer=2), sample(5, 6)
    tokens[1, 2] = tokens[3, 0] = tokens[4, 5] = EOT
    if has_no_answer(name, model):
        return
    options, found = {"eot": EOT} if name == "transport" else {}, []
    for batch in 1, 2, 3:
        monkeypatch.setattr(probe, "BATCH", batch)
        found.append(probe.measure(name, model, tokens, **options))
    for other in found[:-1]:
        for key, x in found[-1].items():
            close(other[key], x, 1e-12)


@pytest.mark.parametrize("name", ["permutation", "lens", "paths", "health"])
def test_numbers_depend_on_every_token(name):
    """The last of a window is only a target, and paths have none."""
    model = build("hc")
    base = probe.measure(name, model, TOKENS)
    for column in range(6):
        other = TOKENS.clone()
        other[1, column] = (other[1, column] + 1) % V
        changed = probe.measure(name, model, other)
        different = any(np.abs(changed[key] - base[key]).max() > 1e-6 for key in base)
        assert different == (column < 5 or name != "paths")


# Results that are kept when a probe is stopped, to go on with


def go_on(name, model, tokens, out, steps=None):
    """Some steps of a probe, by default all that are left; what it has found so far is copied, as a file would."""
    with torch.no_grad():
        for n, _ in enumerate(probe.PROBES[name].measure(probe.Subject(model, tokens), out), 1):
            if n == steps:
                break
    return {key: np.array(value) for key, value in out.items()}


@every_probe
def test_a_stopped_probe_goes_on_to_the_same_numbers(name, monkeypatch):
    monkeypatch.setattr(probe, "BATCH", 2)
    model = build("fullattnres" if name == "share" else "hc")
    whole, steps = probe.measure(name, model, TOKENS), 0
    while steps < 4:  # also after the last: its numbers are there, but nobody has noted that it is done
        steps += 1
        kept = go_on(name, model, TOKENS, {}, steps)
        resumed = go_on(name, model, TOKENS, kept)
        for key, x in whole.items():
            assert np.array_equal(resumed[key], x), (steps, key)


@pytest.mark.parametrize("name", ["permutation", "paths", "pruning", "lens", "transport", "health"])
def test_wherever_a_probe_is_interrupted_it_goes_on_to_the_same_numbers(name, monkeypatch):
    """Ctrl-C before each line of a function that has the results in its hands, one line after the other."""
    monkeypatch.setattr(probe, "BATCH", 1)
    monkeypatch.setattr(probe.Transport, "RESAMPLES", 10)
    model, tokens = build("hc:m=2", n_layer=2 if name == "permutation" else 1), TOKENS[:2]
    whole, at, interrupted = probe.measure(name, model, tokens), 0, True
    while interrupted:
        at += 1
        out, interrupted = {}, False
        before = sys.gettrace()
        try:
            sys.settrace(interrupter(at))
            go_on(name, copy.deepcopy(model), tokens, out)
        except KeyboardInterrupt:
            interrupted = True
        finally:
            sys.settrace(before)
        resumed = go_on(name, model, tokens, {key: np.array(value) for key, value in out.items()})
        for key, x in whole.items():
            assert np.array_equal(resumed[key], x), (at, key)
    assert at > 5


def interrupter(at):
    lines = 0

    def trace(frame, event, arg):
        nonlocal lines
        code = frame.f_code
        if code.co_filename != probe.__file__ or "out" not in code.co_varnames:
            return None
        if event == "line":
            lines += 1
            if lines == at:
                raise KeyboardInterrupt
        return trace

    return trace

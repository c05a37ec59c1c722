"""
Residual connections: what each branch of a Transformer reads from depth, and how it writes back.

A Transformer is a stack of branches F: attention, feed-forward, attention, and so on. A residual connection carries the
*depth state* h across one branch:

    h = residual(h, F)

Every class below is one row of Table 1 of DepthBench (arXiv:2609.32534). The first line of its docstring is the equation,
its `forward` is the equation again, and no other file knows which rule is running. `python residuals.py` prints the table.

Notation
    F        one branch, (B, T, d) -> (B, T, d)
    LN       RMSNorm with a gain, unless a rule says otherwise
    h, h'    depth state before and after the branch; of one stream: (B, T, d)
    H        depth state of m streams: (B, T, m, d)
    v        depth state that is a list of n sources, each (B, T, d)
    k        branch, counted from 0: the first attention is 0, the first feed-forward is 1
    l, L     layer, counted from 1, and their number; branches 2l-2 and 2l-1 make up layer l
"""

import inspect
import math
from contextlib import nullcontext
from typing import Literal, get_args, get_origin

import torch
from torch import nn
from torch.nn.functional import layer_norm, one_hot, pad, rms_norm, scaled_dot_product_attention
from torch.nn.utils import skip_init
from torch.utils.checkpoint import checkpoint

from configs import Mistake, rule_option, split_rule, suggest

EPS = 1e-6


def wide(x):
    """x in float32, or as it is if that is float64: the precision of norms and routing, whatever that of the run."""
    return x if x.dtype == torch.float64 else x.float()


def no_autocast(x):
    """Inside, what is in float32 stays in float32 also in a run in mixed precision."""
    return nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight, in float32 or better, given back in the precision of x."""

    def __init__(self, d, eps=EPS, gain=True):
        super().__init__()
        self.shape, self.eps = (d,), eps
        self.weight = nn.Parameter(torch.ones(d)) if gain else None

    def forward(self, x):
        y = wide(x)
        return rms_norm(y, self.shape, None if self.weight is None else self.weight.to(y.dtype), self.eps).to(x.dtype)


class LayerNorm(RMSNorm):
    """The same around the mean, without a bias."""

    def forward(self, x):
        y = wide(x)
        return layer_norm(y, self.shape, self.weight.to(y.dtype), None, self.eps).to(x.dtype)


def init_weight(w, std):
    """Normal, cut at three standard deviations, as all weights of the paper's runs."""
    nn.init.trunc_normal_(w, std=std, a=-3 * std, b=3 * std)


def rstd(x, eps):
    """1 / RMS of each vector: (..., d) -> (...). LN(x) without its gain is x * rstd(x)."""
    return (wide(x).square().mean(-1) + eps).rsqrt()


class Table(nn.Module):
    """A constant that goes where the model goes but keeps its precision: angles cast to bf16 are off by radians."""

    def __init__(self, value):
        super().__init__()
        self.register_buffer("value", value, persistent=False)

    def _apply(self, fn, recurse=True):
        exact = self.value
        super()._apply(fn, recurse)
        self.value = exact.to(self.value.device)
        return self


class Reader(nn.Module):
    """How one vector is read from the depth state, LN(h): by the head, by a probe, and by a branch unless its rule routes."""

    def __init__(self, cfg, eps=EPS):
        super().__init__()
        self.norm = RMSNorm(cfg.d_model, eps)

    def forward(self, h):
        return self.norm(self.read(h))

    def read(self, h):
        """What is normed: depth state -> (B, T, d)."""
        return h

    def vector(self, h):
        """All of the depth state as one vector for each token, for the probes to compare."""
        return self.read(h)

    def weights(self, h):
        """The weights p of a mixture of sources, (B, T, n)."""
        raise NotImplementedError("the rule mixes no sources")


class Raw(Reader):
    """Of the rules that norm the sum: the branch reads it as it is."""

    def __init__(self, cfg):
        super().__init__(cfg)
        self.norm = nn.Identity()


class Residual(nn.Module):
    """The connection around branch k. A rule overrides `forward`, and of the rest only what it changes.

    An annotated class attribute, `m: int = 4`, is an option that a config may vary: hc:m=2.
    """

    title = ""  # as the paper writes the name
    lr = None  # best peak learning rate (Table 4)
    starts_as_preln = False  # the same function as Pre-LN at initialisation, but for the eps of norms
    Reader = Reader  # of every branch; the head has one more
    no_decay = ()  # names of own parameters that weight decay leaves alone
    keep_float32 = ()  # names of own parameters that are float32 whatever the precision of the run

    def __init__(self, cfg, k):
        super().__init__()
        self.reader = self.Reader(cfg)

    @property
    def norm(self):
        return self.reader.norm

    @classmethod
    def connections(cls, cfg):
        """The connections of all 2L branches, first to last."""
        return [cls(cfg, k) for k in range(2 * cfg.n_layer)]

    @classmethod
    def head_reader(cls, cfg):
        return cls.Reader(cfg)

    @classmethod
    def enter(cls, x):
        """Token embedding (B, T, d) -> the first depth state."""
        return x

    def forward(self, h, F):
        """Depth state before branch F -> depth state after it."""
        raise NotImplementedError

    def init_branch(self, F):
        """Change the initial weights of the branch, after the backbone has drawn them."""

    def skip(self, h):
        """The depth state after this branch, had the branch not been there."""
        return h

    @classmethod
    def swap(cls, model, i, j):
        """Put layers i and j of the model in each other's place. Done twice, it restores every bit."""
        exchange(model.blocks[i], model.blocks[j])

    def route(self, h):
        """The coefficients of the update, where depth is s slots before the branch and r after it:

            x = LN(H alpha),    H' = H A + F(x) beta^T,    alpha (..., s), A (..., s, r), beta (..., r)

        One stream is one slot, m streams are m, and a list of sources has a slot for each.
        """
        raise NotImplementedError(f"{type(self).title or type(self).__name__} has no scalar weights from branch to branch")

    def map_constants(self):
        """The learned constants behind A: a parameter, and the slice that they are of its entries."""
        raise NotImplementedError(f"{type(self).title or type(self).__name__} has no residual map to learn")


def exchange(a, b):
    """Give each parameter of module a the value of its namesake in b, and the other way round."""
    theirs = dict(b.named_parameters())
    for name, p in a.named_parameters():
        q = theirs.get(name)
        if q is not None and q.shape == p.shape:
            p.data, q.data = q.data, p.data


# ---------------------------------------------------------------------------------------------------------------------
# One stream


class PreLN(Residual):
    """h' = h + F(LN(h))                                                      Xiong et al. 2020, arXiv:2002.04745"""

    title, lr, starts_as_preln = "Pre-LN", 2e-3, True

    def forward(self, h, F):
        return h + F(self.norm(h))

    def route(self, h):
        one = wide(h.new_ones(1))
        return one, one[:, None], one


class PostLN(Residual):
    """h' = LN(h + F(h))                                                    Vaswani et al. 2017, arXiv:1706.03762

    As in the authors' code, LN is RMSNorm here too, and the head norms the last state once more.
    """

    title, lr = "Post-LN", 1e-3

    def __init__(self, cfg, k):
        super().__init__(cfg, k)
        self.reader = Raw(cfg)
        self.norm_out = RMSNorm(cfg.d_model)

    def forward(self, h, F):
        return self.norm_out(h + F(h))


class SandwichLN(Residual):
    """h' = h + LN(F(LN(h)))                                                  Ding et al. 2021, arXiv:2105.13290

    Also Peri-LN (Kim et al. 2025, arXiv:2502.02732).
    """

    title, lr = "Sandwich-LN", 2e-3

    def __init__(self, cfg, k):
        super().__init__(cfg, k)
        self.norm_out = RMSNorm(cfg.d_model)

    def forward(self, h, F):
        return h + self.norm_out(F(self.norm(h)))


class LNS(PreLN):
    """h' = h + F(LN(h) / sqrt(l))                                             Sun et al. 2025, arXiv:2502.05795"""

    title, lr, starts_as_preln = "LNS", 1e-2, False
    at: Literal["both", "attention", "feedforward"] = "both"  # the branches that are scaled

    def __init__(self, cfg, k):
        super().__init__(cfg, k)
        scaled = self.at in ("both", "feedforward" if k % 2 else "attention")
        self.scale = Table(torch.tensor((k // 2 + 1) ** (-0.5 * scaled), dtype=torch.float64))

    def forward(self, h, F):
        return h + F(self.norm(h) * self.scale.value)

    @classmethod
    def swap(cls, model, i, j):
        """The scale goes with the weights, as in the authors' probe."""
        super().swap(model, i, j)
        for a, b in zip(model.blocks[i].children(), model.blocks[j].children()):
            if isinstance(a, LNS):
                a.scale, b.scale = b.scale, a.scale


class DeepNorm(Residual):
    """h' = LN(a h + F(h)),   a = (2L)^(1/4)                                  Wang et al. 2022, arXiv:2203.00555

    LN is a mean-centring LayerNorm here. All matrices of the branch but queries and keys start out smaller by
    b = (8L)^(-1/4).
    """

    title, lr = "DeepNorm", 1e-3

    def __init__(self, cfg, k):
        super().__init__(cfg, k)
        self.reader = Raw(cfg)
        self.norm_out = LayerNorm(cfg.d_model)
        self.a = (2 * cfg.n_layer) ** 0.25
        self.b = (8 * cfg.n_layer) ** -0.25

    def forward(self, h, F):
        return self.norm_out(self.a * h + F(h))

    def init_branch(self, F):
        for name, w in F.named_parameters():
            if name not in ("q.weight", "k.weight"):
                w.mul_(self.b)


class KEEL(Residual):
    """h' = LN(a h + F(LN(h))),   a = 2L                                       Chen & Wei 2026, arXiv:2601.19895

    The first layer starts softly: its attention is Pre-LN, and neither of its branches scales the stream up.
    """

    title, lr = "KEEL", 2e-3

    def __init__(self, cfg, k):
        super().__init__(cfg, k)
        self.a = Table(torch.tensor(2 * cfg.n_layer if k >= 2 else 1, dtype=torch.float64))
        self.norm_out = RMSNorm(cfg.d_model) if k >= 1 else nn.Identity()

    def forward(self, h, F):
        return self.norm_out(self.a.value * h + F(self.norm(h)))


class LayerRoPE(Residual):
    """h' = h + g_w(l) * F(g_r(l) * RMS(h)),   g(l) = exp(r(l)) R(theta(l)) g        Srivastava & Kanan 2026

    One vector of gains g for all layers, scaled and rotated by how deep the layer is. Four sites share one each: the
    read and the write of attention, the read and the write of the feed-forward. RMS is RMSNorm without a gain.
    That gains and scalars are exempt from weight decay is our choice: the paper's runs use none. A probe that exchanges two
    layers leaves the schedule in its place.
    """

    title, lr = "LayerRoPE", 8e-3
    rotate: bool = True
    magnitude: bool = True
    shared: bool = True  # one vector of gains for all layers, or one for each
    backbone: Literal["pre", "peri"] = "pre"  # peri: RMS of what F gives, too, before its gain

    def __init__(self, cfg, k):
        super().__init__(cfg, k)
        self.reader.norm = RMSNorm(cfg.d_model, gain=False)
        self.read, self.write = (PolarGain(cfg, k // 2 + 1, self.rotate, self.magnitude) for _ in range(2))

    @classmethod
    def connections(cls, cfg):
        connections = super().connections(cfg)
        for k in range(2, len(connections)):
            connections[k].share(connections[k % 2])
        return connections

    def share(self, first):
        for mine, its in (self.read, first.read), (self.write, first.write):
            mine.r, mine.theta = its.r, its.theta
            if self.shared:
                mine.gain = its.gain

    def forward(self, h, F):
        x = (wide(self.norm(h)) * self.read()).to(h.dtype)
        y = F(x)
        if self.backbone == "peri":
            y = self.norm(y)
        return h + (wide(y) * self.write()).to(h.dtype)


class PolarGain(nn.Module):
    """exp(r) R(theta) g with r and log theta linear in log l, theta spread over neighbouring channels as in RoPE."""

    no_decay = keep_float32 = ("gain", "r", "theta")

    def __init__(self, cfg, l, rotate, magnitude):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(cfg.d_model))
        self.r = nn.Parameter(torch.tensor([0.0, -0.5])) if magnitude else None
        self.theta = nn.Parameter(torch.tensor([0.0, -0.5])) if rotate else None
        self.log_l = Table(torch.tensor(l, dtype=torch.float64).log())
        self.freq = Table(100 ** (-torch.arange(0, cfg.d_model, 2, dtype=torch.float64) / cfg.d_model))

    def forward(self):
        g = self.gain
        if self.theta is not None:
            theta = (self.theta[0] + self.theta[1] * self.log_l.value).exp() * self.freq.value.to(g.dtype)
            a, b = g.view(-1, 2).unbind(-1)
            g = torch.stack([a * theta.cos() - b * theta.sin(), a * theta.sin() + b * theta.cos()], -1).flatten()
        return g if self.r is None else (self.r[0] + self.r[1] * self.log_l.value).exp() * g


# ---------------------------------------------------------------------------------------------------------------------
# Many streams


class SumStreams(Reader):
    def read(self, H):
        return H.sum(-2)

    def vector(self, H):
        return H.flatten(-2)


class HC(Residual):
    """H' = H A + F(LN(H alpha)) beta^T                                        Zhu et al. 2024, arXiv:2409.19606

    Hyper-Connections keep m streams. alpha says which of them the branch reads, A how they mix on the way past, beta
    which of them the output is written to. Each is a learned constant plus a small correction that the token makes:

        alpha = alpha_0 + s tanh(RMS(H) W)        and likewise A and beta

    They start as m copies of a Pre-LN stream: branch k reads stream k mod m and writes to all.
    """

    title, lr, starts_as_preln = "HC", 2e-3, True
    Reader = SumStreams
    m: int = 4
    dynamic: bool = True
    no_decay = ("alpha", "A", "beta")

    def __init__(self, cfg, k):
        super().__init__(cfg, k)
        m = self.m
        self.alpha = nn.Parameter(one_hot(torch.tensor(k % m), m).float())
        self.A = nn.Parameter(torch.eye(m))  # [source, destination]
        self.beta = nn.Parameter(torch.ones(m))
        if self.dynamic:
            self.W = nn.Parameter(torch.zeros(cfg.d_model, 1 + m + 1))  # columns for alpha, A and beta
            self.s_in = nn.Parameter(torch.tensor(0.01))
            self.s_out = nn.Parameter(torch.tensor(0.01))

    @classmethod
    def enter(cls, x):
        return x.unsqueeze(-2).expand(*x.shape[:-1], cls.m, x.shape[-1])

    def forward(self, H, F):
        alpha, A, beta = self.route(H)
        x, mixed = read_and_mix(H, alpha, A)
        return write(mixed, F(self.norm(x)), beta)

    def route(self, H):
        return self.coefficients(normed_product(H, self.W, 1e-8) if self.dynamic else None)

    def coefficients(self, product):
        """alpha, A, beta of RMS(H) W, (B, T, m, 1 + m + 1)."""
        if not self.dynamic:
            return self.alpha, self.A, self.beta
        a, A, b = product.tanh().split((1, self.m, 1), -1)
        alpha = self.alpha + self.s_in * a.squeeze(-1)  # (B, T, m)
        A = self.A + self.s_in * A  # (B, T, m, m)
        beta = self.beta + self.s_out * b.squeeze(-1)  # (B, T, m)
        return alpha, A, beta

    def map_constants(self):
        return self.A, slice(None)

    def init_branch(self, F):
        F.out.weight.mul_(self.m**-0.5)


def normed_product(x, W, eps):
    """RMS(x) W, the norm taken out of the product so that no normed copy of x is made: (..., d) -> (..., n)."""
    with no_autocast(x):
        return NormedProduct.apply(x, W, eps)


def read_and_mix(H, alpha, A):
    """H alpha and H A in one product: (B, T, d) and (B, T, m, d)."""
    with no_autocast(H):  # rounded to bf16, what mHC's A sends on sums to 1.001
        X = (wide(torch.cat([alpha.unsqueeze(-1), A], -1)).mT @ wide(H)).to(H.dtype)  # (B, T, 1 + m, d)
    x, mixed = X.split((1, H.shape[-2]), -2)
    return x.squeeze(-2), mixed


def write(H, y, beta):
    """H + y beta^T: one vector into m streams."""
    beta = beta.unsqueeze(-1).to(H.dtype).expand(*H.shape[:-1], 1)
    with no_autocast(H):
        return torch.baddbmm(H.flatten(0, 1), beta.flatten(0, 1), y.flatten(0, 1).unsqueeze(-2).to(H.dtype)).view(H.shape)


class MeanStreams(SumStreams):
    def read(self, H):
        return H.mean(-2)


class MHC(HC):
    """H' = H A + F(LN(H alpha)) beta^T,   A doubly stochastic, alpha, beta > 0    Xie et al. 2025, arXiv:2512.24880

    Hyper-Connections on a manifold: the update is HC's, the coefficients are sigmoids and a Sinkhorn projection of
    logits  s x W + bias  that all streams of the token, x = RMS(H) as one vector, decide together.
    """

    title, lr = "mHC", 2e-3
    Reader = MeanStreams
    iterations: int = 20
    init: Literal["gap8", "uniform"] = "gap8"  # uniform: the earlier one, of the paper's learning-rate sweep
    constraint: Literal["doubly", "row", "identity", "free"] = "doubly"  # what the residual map A is held to
    no_decay = keep_float32 = ("bias", "s")

    def __init__(self, cfg, k):
        Residual.__init__(self, cfg, k)
        m = self.m
        self.sizes = (m, 0 if self.constraint == "identity" else m * m, m)  # logits of alpha, A, beta
        self.bias = nn.Parameter(torch.zeros(sum(self.sizes)))
        if self.dynamic:
            self.W = nn.Parameter(torch.zeros(m * cfg.d_model, sum(self.sizes)))
            self.s = nn.Parameter(torch.full((3,), 0.01))
        self.init_routing(k)

    @torch.no_grad()
    def init_routing(self, k):
        if self.init == "uniform":
            return
        alpha, A, _ = self.bias.split(self.sizes)
        alpha.copy_(16.0 * one_hot(torch.tensor(k % self.m), self.m) - 8)
        if self.constraint == "free":  # A is the logits themselves
            A.copy_(torch.eye(self.m).flatten())
        elif self.constraint != "identity":
            A.copy_(8.0 * torch.eye(self.m).flatten() - 8)

    def init_branch(self, F):
        super().init_branch(F)
        if self.init == "uniform" and self.dynamic:  # here, so that the backbone is that of the other rules
            self.W.normal_(std=0.02)

    def route(self, H):
        return self.coefficients(normed_product(H.flatten(-2), self.W, EPS) if self.dynamic else None)

    def coefficients(self, product):
        """alpha, A, beta of RMS(x) W, (B, T, m + m m + m): in float32 also in a run in bf16, as A leaves its manifold otherwise."""
        logits = self.bias.split(self.sizes)
        if self.dynamic:
            logits = [s * part + bias for s, part, bias in zip(self.s, product.split(self.sizes, -1), logits)]
        alpha, A, beta = logits
        return alpha.sigmoid(), self.constrain(A), 2 * beta.sigmoid()

    def map_constants(self):
        return self.bias, slice(self.m, self.m + self.sizes[1])

    def constrain(self, logits):
        """(..., m m) -> A (..., m, m), from a source, its row, to a destination, its column. The matrix of the paper and of
        its kernel is the transpose: what "row" makes sum to one is what reaches a stream."""
        m = self.m
        if self.constraint == "identity":
            return torch.eye(m).to(logits).expand(*logits.shape[:-1], m, m)
        if self.constraint == "free":
            return logits.unflatten(-1, (m, m))
        A = logits.movedim(-1, 0).unflatten(0, (m, m))  # (source, destination, ...): sums over leading axes are fast
        A = sinkhorn(A, self.iterations) if self.constraint == "doubly" else A.softmax(0)
        return A.movedim((0, 1), (-2, -1))


def sinkhorn(logits, iterations, eps=EPS):
    """The doubly stochastic matrix that scales the rows and columns of exp(logits), (source, destination, ...).

    A destination's weights sum to one first, then a source's, and so on; the last step is a source's. As in the kernel
    that the authors use, eps is added after the softmax and in every division.
    """
    return Sinkhorn.apply(logits.softmax(0) + eps, iterations, eps)


# ---------------------------------------------------------------------------------------------------------------------
# Direct access to earlier branches


class FullAttnRes(Residual):
    """v' = v + [F(LN(h))],   h = sum_i p_i v_i,   p = softmax_i(w . LN(v_i))     Kimi Team 2026, arXiv:2603.15031

    Attention Residuals sum up nothing on the way: the state is the list of the embedding and all branch outputs, and
    each branch mixes it with a query w of its own. All queries start at zero, so that each branch reads the plain
    average. That is Pre-LN, as LN does not see whether it is given an average or a sum.
    """

    title, lr, starts_as_preln = "Full AttnRes", 2e-3, True
    eps: float = 1e-5  # of all norms but the first: the authors' code; the paper says 1e-6

    def __init__(self, cfg, k):
        super().__init__(cfg, k)
        self.k, self.last, self.b = k, k == 2 * cfg.n_layer - 1, self.block_size(cfg)
        self.reader = DepthMix(cfg, self.eps, at_boundary=k % self.b == 0) if k else First(cfg)

    @classmethod
    def block_size(cls, cfg):
        """Branches whose outputs are summed up to one source."""
        return 1

    @classmethod
    def head_reader(cls, cfg):
        return DepthMix(cfg, cls.eps)

    @classmethod
    def enter(cls, x):
        return [cls.source(x)]

    @classmethod
    def source(cls, x):
        """A source is kept with the reciprocal RMS that all its keys need."""
        return x, rstd(x, cls.eps)

    def forward(self, v, F):
        return v + [self.source(F(self.reader(v)))]

    def skip(self, v):
        """As in the authors' probe: without layer 1 the embedding stands in for what it made, too, and a mixture that
        begins a block and follows the gap is replaced by the newest source."""
        if self.k == 0:
            return v + v
        return AfterSkip(v) if self.k % 2 and (self.last or (self.k + 1) % self.b == 0) else v

    @classmethod
    def swap(cls, model, i, j):
        """As in the authors' probe, the mixture before a layer's attention stays, and the one after the layer moves."""
        super().swap(model, i, j)
        mixes = [block.attn_residual.reader.mixture for block in model.blocks] + [model.reader.mixture]
        exchange(mixes[i], mixes[j])
        exchange(mixes[i + 1], mixes[j + 1])

    def route(self, v):
        n, opens = len(v), self.k % self.b == 0
        A, beta = torch.eye(n, n + opens), one_hot(torch.tensor(n - 1 + opens), n + opens)
        p = self.reader.weights(v)
        return p, A.to(p), beta.to(p)


class BlockAttnRes(FullAttnRes):
    """FullAttnRes over the embedding and the sums of n_blocks blocks of branches     Kimi Team 2026, arXiv:2603.15031

    The last source is the running sum. The first branch of a block still mixes the sum of the block before, and then
    starts a new one: 2 + floor((k - 1) / b) sources; the paper's Appendix D counts 2 + floor(k / b).
    """

    title = "Block AttnRes"
    n_blocks: int = 8

    @classmethod
    def block_size(cls, cfg):
        return math.ceil(2 * cfg.n_layer / cls.n_blocks)

    def forward(self, v, F):
        y = F(self.reader(v))
        return v + [self.source(y)] if self.k % self.b == 0 else v[:-1] + [self.source(v[-1][0] + y)]


class AfterSkip(list):
    """The sources after a skipped layer, for the next reader to take the newest alone."""


class DepthMix(Reader):
    """LN(sum_i p_i v_i),   p = softmax_i(w . LN(v_i)): attention over depth, with one query for all tokens."""

    def __init__(self, cfg, eps, at_boundary=True):
        super().__init__(cfg, eps)
        self.mixture = Mixture(cfg)
        self.at_boundary = at_boundary

    def read(self, v):
        return v[-1][0] if isinstance(v, AfterSkip) else self.mixture(v)

    def vector(self, v):
        return self.read(v) if self.at_boundary else v[-1][0]

    def weights(self, v):
        return self.mixture.weights(v)


class Mixture(nn.Module):
    keep_float32 = ("w", "gain")

    def __init__(self, cfg):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(cfg.d_model))
        self.gain = nn.Parameter(torch.ones(cfg.d_model))

    def forward(self, v):
        return depth_mix(v, wide(self.w * self.gain))

    def weights(self, v):
        return depth_weights(v, wide(self.w * self.gain))


class First(Reader):
    """The first attention has no query: it reads the embedding."""

    def __init__(self, cfg):
        super().__init__(cfg)
        self.mixture = nn.Identity()

    def read(self, v):
        return v[0][0]

    def weights(self, v):
        return wide(v[0][0].new_ones(1))


def depth_weights(v, q):
    """p = softmax_i(q . v_i / RMS(v_i)), (B, T, n)."""
    return torch.stack([(wide(x) @ q) * r for x, r in v], -1).softmax(-1)


def depth_mix(v, q):
    """sum_i p_i v_i of the n sources, (B, T, d)."""
    x, r = zip(*v)
    with no_autocast(q):
        return DepthMixFunction.apply(q, torch.stack(r, -1), *x).to(x[0].dtype)


class Stream(Reader):
    """Of a state with several parts, the stream."""

    def read(self, state):
        return state[0]


class MoDA(Residual):
    """h' = h + F(LN(h); C),   C: keys and values of earlier branches, same token       Zhu et al. 2026, arXiv:2603.15619

    Mixture-of-Depths Attention: one softmax over the causal sequence and over depth. The state is (h, C). Attention
    leaves its own keys and values in C, the keys without their rotary angles; the feed-forward projects some for it.
    """

    title, lr = "MoDA", 2e-3
    post: bool = False  # h' = LN(h + F(h; C))
    Reader = Stream

    def __init__(self, cfg, k):
        super().__init__(cfg, k)
        self.k, self.heads = k, (cfg.kv_heads, cfg.d_head)
        self.norm_out = nn.Identity()
        if self.post:
            self.reader.norm, self.norm_out = nn.Identity(), RMSNorm(cfg.d_model)
        if k % 2 and k < 2 * cfg.n_layer - 1:  # after the last feed-forward nobody reads
            sizes = cfg.d_model, 2 * cfg.kv_heads * cfg.d_head
            self.kv, self.std = skip_init(nn.Linear, *sizes, bias=False, device=torch.get_default_device()), cfg.init_std
        else:
            self.kv = None

    def init_branch(self, F):
        """Drawn after the backbone, which so is that of the other rules; the authors draw it after each feed-forward."""
        if self.kv is not None:
            init_weight(self.kv.weight, self.std)

    @classmethod
    def enter(cls, x):
        return x, []

    def forward(self, state, F):
        h, C = state
        y, leave = (self.feed_forward if self.k % 2 else self.attention)(F, self.reader(state), C)
        return self.norm_out(h + y), C + leave

    def attention(self, F, x, C):
        q, k, unrotated, v = F.qkv(x)
        return F.merge(depth_attention(q, k, v, C)), [(unrotated, v)]

    def feed_forward(self, F, x, C):
        return F(x), [] if self.kv is None else [self.kv(x).unflatten(-1, (2, *self.heads)).permute(2, 0, 3, 1, 4).unbind()]

    def skip(self, state):
        """As in the authors' probe, the slots that the branch would have filled hold zeros, which softmax still sees."""
        h, C = state
        B, T, _ = h.shape
        zeros = h.new_zeros(B, self.heads[0], T, self.heads[1])
        return h, C if self.k % 2 and self.kv is None else C + [(zeros, zeros)]


def depth_attention(q, k, v, C):
    """Attention of q (B, H, T, D) over k, v (B, G, T, D) at this and earlier tokens, and over the pairs in C at the same."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    if not C:
        return scaled_dot_product_attention(q, k, v, is_causal=True)
    keys, values = zip(*C)
    if q.device.type not in FUSED_ATTENTION or (q.is_cuda and q.dtype == torch.float32):  # a GPU's takes half precision alone
        return checkpoint(depth_attention_by_scores, q, k, v, keys, values, use_reentrant=False)
    return DepthAttentionFunction.apply(q, k, v, *keys, *values)


def depth_attention_by_scores(q, k, v, keys, values):
    """The definition: all (B, H, T, T + n) scores."""
    T, G, scale = q.shape[-2], q.shape[1] // keys[0].shape[1], q.shape[-1] ** -0.5
    keys, values = (torch.stack(x, -2).repeat_interleave(G, dim=1) for x in (keys, values))  # (B, H, T, n, D)
    future = torch.ones(T, T, dtype=torch.bool, device=q.device).triu(1)
    scores = torch.cat([(q @ k.mT).masked_fill(future, -torch.inf), torch.einsum("bhtd,bhtnd->bhtn", q, keys)], -1)
    p = (wide(scores) * scale).softmax(-1).to(v.dtype)
    return p[..., :T] @ v + torch.einsum("bhtn,bhtnd->bhtd", p[..., T:], values)


# ---------------------------------------------------------------------------------------------------------------------
# Four that the paper does not run


class MixLN(Residual):
    """Post-LN in the first quarter of the layers, Pre-LN in the others          Li et al. 2024, arXiv:2412.13795"""

    title = "Mix-LN"

    @classmethod
    def connections(cls, cfg):
        post = 2 * (cfg.n_layer // 4)
        return [PostLN(cfg, k) if k < post else PreLN(cfg, k) for k in range(2 * cfg.n_layer)]


class ReZero(Residual):
    """h' = h + a F(h),   a = 0 at first                                 Bachlechner et al. 2020, arXiv:2003.04887"""

    title = "ReZero"
    no_decay = ("a",)

    def __init__(self, cfg, k):
        super().__init__(cfg, k)
        self.reader = Raw(cfg)
        self.a = nn.Parameter(torch.zeros(()))

    def forward(self, h, F):
        return h + self.a * F(h)

    def route(self, h):
        one = wide(h.new_ones(1))
        return one, one[:, None], self.a * one


class LayerScale(Residual):
    """h' = h + g * F(LN(h)),   g = 0.1 at first                             Touvron et al. 2021, arXiv:2103.17239"""

    title = "LayerScale"
    no_decay = ("g",)

    def __init__(self, cfg, k):
        super().__init__(cfg, k)
        self.g = nn.Parameter(torch.full((cfg.d_model,), 0.1))

    def forward(self, h, F):
        return h + self.g * F(self.norm(h))


class DenseFormer(PreLN):
    """h' = h + F(LN(h)), and after layer l  h' = sum_i a_li v_i            Pagliardini et al. 2024, arXiv:2402.02622

    v holds the embedding and what each layer made of the average before it. At first a takes the last v alone. The state
    is (h, v). The weights belong to the depth: a probe that exchanges two layers leaves them, as their shapes differ.
    """

    title, lr = "DenseFormer", None
    no_decay = ("a",)
    Reader = Stream

    def __init__(self, cfg, k):
        super().__init__(cfg, k)
        n = k // 2 + 2
        self.a = nn.Parameter(one_hot(torch.tensor(n - 1), n).float()) if k % 2 else None

    @classmethod
    def enter(cls, x):
        return x, [x]

    def forward(self, state, F):
        h, v = state
        return self.average(h + F(self.reader(state)), v)

    def average(self, h, v):
        if self.a is None:
            return h, v
        v = v + [h]
        return sum(a * x for a, x in zip(self.a, v)), v

    def skip(self, state):
        return self.average(*state)

    def route(self, state):
        """The slots are those of v, and h the last."""
        n = len(state[1]) + 1
        eye = torch.eye(n).to(wide(state[0]))
        if self.a is None:
            return eye[-1], eye, eye[-1]
        A = torch.cat([eye, self.a.unsqueeze(-1)], -1)  # h becomes a source, and all are averaged
        return eye[-1], A, torch.cat([eye[-1], self.a[-1:]])


# ---------------------------------------------------------------------------------------------------------------------
# Gradients by hand, where autograd would make more passes over memory or keep more of it


class NormedProduct(torch.autograd.Function):
    """y = r x W with r = 1 / RMS(x). Given g = dy, its gradients in one pass over x:

    dx = r g W^T - (g . y) r^2 / d x,   dW = (r x)^T g
    """

    @staticmethod
    def forward(ctx, x, W, eps):
        r = rstd(x, eps).unsqueeze(-1)
        y = (wide(x) @ wide(W)) * r
        ctx.save_for_backward(x, W, r, y)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g):
        x, W, r, y = ctx.saved_tensors
        rg = g * r
        dx = (rg @ wide(W).mT).addcmul_(x, (g * y).sum(-1, keepdim=True) * r.square() / -x.shape[-1])
        return dx.to(x.dtype), (wide(x).flatten(0, -2).mT @ rg.flatten(0, -2)).to(W.dtype), None


class Sinkhorn(torch.autograd.Function):
    """A <- A / s, where s is eps more than the sums of A along its sources and its destinations in turn. The gradient is
    that of the steps that were taken, dA <- (dA - sum(dA' A')) / s: the usual short cut, that of a converged matrix, is
    wrong here, as these matrices do not converge.
    """

    @staticmethod
    def forward(ctx, A, iterations, eps):
        steps = []
        for i in range(1, 2 * iterations):
            s = A.sum(i % 2, keepdim=True).add_(eps)
            A = A / s
            steps += [A, s]
        ctx.save_for_backward(*steps)
        return A

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g):
        steps = ctx.saved_tensors
        for i in reversed(range(1, len(steps) // 2 + 1)):
            A, s = steps[2 * i - 2 : 2 * i]
            g = (g - (g * A).sum(i % 2, keepdim=True)).div_(s)
        return g, None, None


class DepthMixFunction(torch.autograd.Function):
    """depth_mix a source at a time, so that nothing is stacked. What autograd would write for a source in four pieces,
    for later readers to add to, is one here. With the gradient g of the mixture:

        dp_i = g . v_i,   ds = p (dp - p . dp),   dv_i = p_i g + ds_i r_i q,   dq = sum_i ds_i r_i v_i
    """

    @staticmethod
    def forward(ctx, *inputs):  # under no_grad, torch.compile miscounts the arguments of forward(ctx, q, r, *v) if there are two v
        q, r, *v = inputs
        scores = torch.stack([wide(x) @ q for x in v], -1)  # (B, T, n)
        p = (scores * r).softmax(-1)
        h = p[..., :1] * v[0]
        add = torch.addcmul if torch.compiler.is_compiling() else torch.Tensor.addcmul_  # in place, torch 2.11 compiles it wrong
        for i in range(1, len(v)):
            h = add(h, v[i], p[..., i : i + 1])
        ctx.save_for_backward(q, r, scores, p, *v)
        return h

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g):
        q, r, scores, p, *v = ctx.saved_tensors
        dp = torch.stack([(g * x).sum(-1) for x in v], -1)
        ds = p * (dp - (p * dp).sum(-1, keepdim=True))
        dk, dq = ds * r, torch.zeros_like(q)
        dv = []
        for i, x in enumerate(v):
            dq += dk[..., i].flatten() @ wide(x).flatten(0, 1)
            dv.append((dk[..., i : i + 1] * q).addcmul_(g, p[..., i : i + 1]).to(x.dtype))
        return dq, ds * scores, *dv


class DepthAttentionFunction(torch.autograd.Function):
    """depth_attention without its T x T scores: the fused causal attention, merged with the depth part by their
    log-sum-exps. The fused backward rebuilds its weights as exp(score - lse); given the lse and the output of both parts
    together, it returns the exact gradients of its share. On a GPU this has not run yet.
    """

    @staticmethod
    def forward(ctx, *inputs):
        q, k, v, *C = inputs
        keys, values = C[: len(C) // 2], C[len(C) // 2 :]
        attention, _, pad_to = FUSED_ATTENTION[q.device.type]
        o, lse, *ctx.more = attention(*padded(pad_to, q, k, v), q.shape[-1] ** -0.5)
        o = o[..., : q.shape[-1]]
        Q = wide(q).unflatten(1, (keys[0].shape[1], -1))  # (B, G, H / G, T, D)
        s = torch.stack([(Q * x.unsqueeze(2)).sum(-1).flatten(1, 2) for x in keys], -1) * q.shape[-1] ** -0.5  # (B, H, T, n)
        total = torch.logaddexp(lse, s.logsumexp(-1))
        p = (s - total.unsqueeze(-1)).exp()
        O = (o * (lse - total).exp().unsqueeze(-1)).unflatten(1, Q.shape[1:3])
        for x, w in zip(values, p.unflatten(1, Q.shape[1:3]).unbind(-1)):
            O = torch.addcmul(O, x.unsqueeze(2), w.unsqueeze(-1))
        o = O.flatten(1, 2).to(q.dtype)
        ctx.save_for_backward(q, k, v, o, total, p, *C)
        return o

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g):
        q, k, v, o, total, p, *C = ctx.saved_tensors
        keys, values = C[: len(C) // 2], C[len(C) // 2 :]
        _, gradients, pad_to = FUSED_ATTENTION[q.device.type]
        dq, dk, dv = gradients(*padded(pad_to, g, q, k, v, o), total, *ctx.more, q.shape[-1] ** -0.5)
        dq, dk, dv = (x[..., : q.shape[-1]] for x in (dq, dk, dv))
        shape = keys[0].shape[1], -1
        Q, dQ, dO = (wide(x).unflatten(1, shape) for x in (q, dq, g))
        P, delta = p.unflatten(1, shape).unsqueeze(-2), (dO * o.unflatten(1, shape)).sum(-1, keepdim=True)
        dkeys, dvalues = [], []
        for i, (x, y) in enumerate(zip(keys, values)):
            ds = P[..., i] * ((dO * y.unsqueeze(2)).sum(-1, keepdim=True) - delta) * q.shape[-1] ** -0.5
            dQ = torch.addcmul(dQ, ds, x.unsqueeze(2))
            dkeys.append((ds * Q).sum(2).to(x.dtype))
            dvalues.append((P[..., i] * dO).sum(2).to(y.dtype))
        return dQ.flatten(1, 2).to(q.dtype), dk, dv, *dkeys, *dvalues


def padded(n, *tensors):
    """Heads with zeros behind their channels, up to a multiple of n; their last axis dense, which the operators take for granted."""
    tensors = [pad(x, (0, -x.shape[-1] % n)) for x in tensors]
    return [x if x.stride(-1) == 1 else x.contiguous() for x in tensors]


def attention_on_cpu(q, k, v, scale):
    """Fused causal attention: its output (B, H, T, D), its log-sum-exps (B, H, T), and what its gradients need besides."""
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True, scale=scale)


def attention_gradients_on_cpu(g, q, k, v, o, lse, scale):
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(g, q, k, v, o, lse, 0.0, True, scale=scale)


def attention_on_gpu(q, k, v, scale):
    o, lse, *more, _ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True, scale=scale)
    return o, lse, *more  # offsets of sequences and their longest, of no use here, and the state of dropout


def attention_gradients_on_gpu(g, q, k, v, o, lse, offsets_q, offsets_k, longest_q, longest_k, seed, offset, scale):
    backward = torch.ops.aten._scaled_dot_product_flash_attention_backward
    return backward(g, q, k, v, o, lse, offsets_q, offsets_k, longest_q, longest_k, 0.0, True, seed, offset, scale=scale)


FUSED_ATTENTION = {  # by device: the operator, its gradients, and the multiple of channels that it wants of a head
    "cpu": (attention_on_cpu, attention_gradients_on_cpu, 1),
    "cuda": (attention_on_gpu, attention_gradients_on_gpu, 8),
}


# ---------------------------------------------------------------------------------------------------------------------

RULES = {
    "preln": PreLN,
    "postln": PostLN,
    "sandwichln": SandwichLN,
    "lns": LNS,
    "deepnorm": DeepNorm,
    "keel": KEEL,
    "layerrope": LayerRoPE,
    "hc": HC,
    "mhc": MHC,
    "fullattnres": FullAttnRes,
    "blockattnres": BlockAttnRes,
    "moda": MoDA,
    "mixln": MixLN,
    "rezero": ReZero,
    "layerscale": LayerScale,
    "denseformer": DenseFormer,
}


COMPILABLE = ("read_and_mix", "write", "sinkhorn", "rstd")  # functions of tensors alone, whose shapes do not change with depth


def rule_of(residual):
    """'hc:m=2:dynamic=off' -> the class, its options set. Raises Mistake."""
    key, texts = split_rule(residual)
    if key not in RULES:
        raise Mistake(f"no residual rule {key!r}{suggest(key, RULES)} (one of {', '.join(RULES)})")
    rule = RULES[key]
    known, values = options_of(rule), {}
    for name, text in texts.items():
        if name not in known:
            has = f"it has {', '.join(known)}" if known else "it has none"
            raise Mistake(f"{key} has no option {name!r}{suggest(name, known)} ({has})")
        values[name] = rule_option(f"{key}:{name}", text, *known[name])
    return type(rule.__name__, (rule,), values) if values else rule


def options_of(rule):
    """{option: (its type or its choices, its default)}: the annotated class attributes."""
    kinds = {}
    for cls in reversed(rule.__mro__):
        if issubclass(cls, Residual):
            kinds.update(inspect.get_annotations(cls, eval_str=True))
    return {name: (get_args(kind) if get_origin(kind) is Literal else kind, getattr(rule, name)) for name, kind in kinds.items()}


# ---------------------------------------------------------------------------------------------------------------------


def table(measure=True):
    """The rules, as the Markdown table of the README: what they are, and what they cost at L = 24, d = 1024."""
    from configs import ModelConfig  # here, because only this table needs a model

    rows = ["| rule | name | equation | paper | extra parameters | lr | starts as Pre-LN | saved |", "|---|---|---|---|--:|--:|---|--:|"]
    preln, preln_saved = parameters(ModelConfig()), saved_bytes("preln") if measure else 1
    for key, rule in RULES.items():
        equation, _, paper = (rule.__doc__ or key).splitlines()[0].rpartition("  ")
        extra, lr = parameters(ModelConfig(residual=key)) - preln, f"{rule.lr:g}" if rule.lr else "-"
        equation = " ".join(equation.split()).replace("|", "\\|")
        saved = f"{saved_bytes(key) / preln_saved:.2f}" if measure else "-"
        starts = "yes" if rule.starts_as_preln else "no"
        rows.append(f"| `{key}` | {rule.title} | {equation} | {paper} | {extra:,} | {lr} | {starts} | {saved} |")
    return "\n".join(rows)


def parameters(cfg):
    from model import Transformer

    with torch.device("meta"):
        return sum(p.numel() for p in Transformer(cfg).parameters())


def saved_bytes(residual, L=16, d=256, T=256, n_head=4):
    """What autograd keeps for the backward pass of one sequence, in bytes for each token and branch; weights not counted."""
    from configs import ModelConfig
    from model import Transformer

    model = Transformer(ModelConfig(residual=residual, n_layer=L, d_model=d, n_head=n_head, vocab_size=257, seq_len=T))
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}

    def pack(x):
        kept[x.untyped_storage().data_ptr()] = x  # held, so that no address is used twice
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        logits = model(torch.zeros(1, T, dtype=torch.long))
    del logits
    return sum(x.untyped_storage().nbytes() for at, x in kept.items() if at not in weights) / (2 * L * T)


if __name__ == "__main__":
    print(table())
    print("\nlr: the best peak learning rate of the paper (Table 4). saved: what autograd keeps over what it keeps for Pre-LN.")

"""
Triton kernels for the rules whose cost is memory traffic: depth mixing (Full and Block AttnRes) and Sinkhorn (mHC).

Each kernel is the twin of functions in residuals.py, which hold the definitions. `accelerate` lets a model run on them, and on those
of kernels_hc.py for the rest of HC and mHC. `python kernels.py` checks them all and, on a GPU, measures them.

Depth mixing. Branch m reads the mixture m of the sources 0 ... m, and what it makes is source m + 1:

        x_0 --> mix 0 --> F_0 --> x_1 --> mix 1 --> F_1 --> x_2 --> mix 2 --> ...       autograd sees this chain
                  |                         |                         |
                 V[0]                      V[1]                      V[2]               the bank: all sources, side by side
                  '------------- read by mix 1, 2, 3, ... ------------'

Why a chain. To autograd a mixture has one input, the newest source; the older ones it finds in the bank. Had it all of them
as inputs, autograd would add up n gradients for each source, and the additions alone would cost more than the mixing.

Why pull. On the way back mix m leaves the gradient do_m of its mixture in the bank. When mix m comes to write the gradient
of source m, all later mixtures have left theirs, so it is one sum over them, in float32 registers, and autograd adds nothing up:

        dv_i = sum over m >= i of  p_mi do_m + ds_mi (r_i q_m - s_mi r_i^2 v_i / d),     ds_mi = p_mi (do_m . v_i - do_m . o_m)

Why groups. The queries are weights, so mixtures that come later can be prepared. G of them share one read of all sources
that are older than the group (`group_mix`), G sources share two reads of all do that are younger (`pair_dot`, `group_pull`);
only what the group itself makes is read by row kernels (`row_mix`, `row_pull`). With M mixtures that is about 3/2 M^2 / G + M G
reads, the least at G = sqrt(3/2 M): 7 with 16 layers, 15 with 70.

Block AttnRes. b branches sum up to one source (Full: b = 1). V[m] is then the running sum after m branches, and only V[0], V[b],
V[2b] ... are read by more than one mixture. These sources are called shared and numbered by e: V[b e].

Why no autotuning. The number of sources is a loop bound, never a constant of the program, and neither is the number of
tokens: each kernel is compiled once for a width d. 140 mixtures would otherwise be 140 programs, each to be tuned.

Operators. What autograd and torch.compile see are functions of tensors (`operator`). The bank, whose memory is written to on the way
forward and back, hides behind a tensor: the chain alone keeps the order, and a compiled model holds the y of the branches itself.

Names. Arrays in upper case, d the width, T tokens (batch and sequence flattened), M mixtures. V (M, T, d) sources; Q (M, d) queries;
Y (M, T, d) what the branches read, overwritten by DO on the way back; to a row kernel X, Y, DX, DY are a slice (T, d) of one m, and
W (d,) is the gain of its reader's norm. In float32: LOGIT (T, width) the scores of shared sources; OWN the score of the newest one,
R 1 / RMS of a source, LSE log-sum-exp of a mixture's scores, ORSTD 1 / RMS of the mixture, DELTA do_m . o_m, all (M, T). Of one group:
DV (rows, T, d) gradients of its sources by younger mixtures, DS (rows, T, M) their ds r, KK the sum of their ds s.
"""

import inspect
import os
from types import MethodType

import torch
from torch import Tensor

if __name__ == "__main__":  # as a program it is its benchmark, which imports it as a module: so each operator is there but once
    import runpy

    runpy.run_path(os.path.join(os.path.dirname(__file__), "tests/bench_kernels.py"), run_name="__main__")
    raise SystemExit

try:
    import triton
    import triton.language as tl
    from triton.language import constexpr
except ImportError:  # no Triton for this machine: `usable` says no, and residuals.py does without
    triton = constexpr = None

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
PROGRAMS = 1024  # of a backward row kernel, each with a row of sums over its tokens


def kernel(fn):
    """triton.jit, run-time numbers (lower case, T and M) never specialised: not on being 1, not on being a multiple of 16."""
    if triton is None:
        return fn
    names = [name for name in inspect.signature(fn).parameters if name not in fn.__annotations__]
    return triton.jit(fn, do_not_specialize=[name for name in names if name.islower() or name in ("T", "M")])


def operator(shapes):
    """To torch.compile, which cannot look into a launch, a function of tensors like any other; `shapes` makes what it returns, empty."""

    def decorate(fn):
        op = torch.library.custom_op("residual_kernels::" + fn.__name__, fn, mutates_args=())
        op.register_fake(shapes)
        return op

    return decorate


def dot_type(x):
    """What matrices are multiplied in. The interpreter cannot multiply bf16."""
    return tl.bfloat16 if x.dtype == torch.bfloat16 and not INTERPRETED else tl.float32


def autocast(x):
    """x in the precision that autocast asks for, if it is on."""
    return x.to(torch.get_autocast_dtype(x.device.type)) if torch.is_autocast_enabled(x.device.type) else x


def usable(x):
    """Whether the kernels can run on x (..., d): Triton is here, x is on a GPU or Triton's interpreter is on, in float32 or bf16, and d
    is a multiple of 8."""
    where = x.is_cuda or (INTERPRETED and x.device.type == "cpu")
    return triton is not None and where and x.dtype in (torch.float32, torch.bfloat16) and x.shape[-1] % 8 == 0


# ---------------------------------------------------------------------------------------------------------------------
# Depth mixing: kernels


@kernel
def entry(e, m, b, M):
    """Where LOGIT keeps the score of shared source e, made b e-th of all, for the later mixture m: rows of M - 1 - b e."""
    return e * (M - 1) - b * (e * (e - 1) // 2) + m - e * b - 1


@kernel
def row_mix(X, V, Y, W, Q, R, OWN, LOGIT, LSE, ORSTD, START, START_LSE, T, m, row, n0, n1, b, M, width, eps, key_eps, add, started,
            D: constexpr, BD: constexpr, NS: constexpr):  # fmt: skip
    """V[m] = v = x (add: + V[m-1]),   Y[m] = RMSNorm(sum_i p_i v_i) * w,   i: those in START, shared sources n0 ... n1 - 1, and v.

    One token for each program; an online softmax, so that a source is read once and the number of sources is free. START is what
    `group_mix` made of the sources 0 ... n0 - 1 for this mixture, in its row `row`: a softmax over those alone, of log-sum-exp START_LSE.
    """
    t = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BD)
    in_row = c < D
    v = tl.load(X + t * D + c, in_row, 0.0).to(tl.float32)  # (d,) in BD lanes
    v += tl.load(V + ((m - 1) * T + t) * D + c, in_row & (add != 0), 0.0).to(tl.float32)
    v = v.to(V.dtype.element_ty)
    tl.store(V + (m * T + t) * D + c, v, in_row)
    v = v.to(tl.float32)
    r = tl.rsqrt(tl.sum(v * v, 0) / D + key_eps)
    own = tl.sum(v * tl.load(Q + m * D + c, in_row, 0.0).to(tl.float32), 0) * r
    tl.store(R + m * T + t, r)
    tl.store(OWN + m * T + t, own)

    start = tl.load(START_LSE + row * T + t, started != 0, float("-inf"))
    top = tl.maximum(own, start)  # running maximum of the scores
    a = tl.exp(start - top)
    p = tl.exp(own - top)
    total = a + p
    o = a * tl.load(START + (row * T + t) * D + c, in_row & (started != 0), 0.0).to(tl.float32) + p * v
    for e in tl.range(n0, n1, num_stages=NS):
        u = tl.load(V + (e * b * T + t) * D + c, in_row, 0.0).to(tl.float32)
        s = tl.load(LOGIT + t * width + entry(e, m, b, M))
        higher = tl.maximum(top, s)
        a = tl.exp(top - higher)
        p = tl.exp(s - higher)
        total = total * a + p
        o = o * a + p * u
        top = higher
    o = o / total
    rstd = tl.rsqrt(tl.sum(o * o, 0) / D + eps)
    w = nonzero(tl.load(W + c, in_row, 0.0).to(tl.float32))
    tl.store(Y + t * D + c, o * rstd * w, in_row)
    tl.store(LSE + m * T + t, top + tl.log(total))
    tl.store(ORSTD + m * T + t, rstd)


@kernel
def nonzero(w):
    """The gain, kept off zero: the backward pass has y = x w and needs x."""
    return tl.where(tl.abs(w) < 1e-20, 1e-20, w)


@kernel
def source_logits(V, Q, R, LOGIT, T, m, e, b, M, width,
                  D: constexpr, BT: constexpr, BM: constexpr, BK: constexpr, NS: constexpr, DT: constexpr):  # fmt: skip
    """LOGIT[t, e, j] = q_j . v r,   of source m, the e-th that is shared, for all later mixtures j: a matrix product (T, d) (d, M)."""
    t = (tl.program_id(0) * BT + tl.arange(0, BT)).to(tl.int64)
    j = m + 1 + tl.program_id(1) * BM + tl.arange(0, BM)
    s = tl.zeros((BT, BM), tl.float32)
    for k0 in tl.range(0, D, BK, num_stages=NS):
        k = k0 + tl.arange(0, BK)
        v = tl.load(V + (m * T + t[:, None]) * D + k[None, :], (t < T)[:, None] & (k < D)[None, :], 0.0)  # (BT, BK)
        q = tl.load(Q + j[None, :] * D + k[:, None], (j < M)[None, :] & (k < D)[:, None], 0.0)  # (BK, BM)
        s = tl.dot(v.to(DT), q.to(DT), s, input_precision="ieee")
    s *= tl.load(R + m * T + t, t < T, 0.0)[:, None]
    tl.store(LOGIT + t[:, None] * width + entry(e, j, b, M)[None, :], s, (t < T)[:, None] & (j < M)[None, :])


@kernel
def group_mix(V, LOGIT, O, O_LSE, T, n, m0, m1, b, M, width,
              D: constexpr, BD: constexpr, G: constexpr, BN: constexpr, NS: constexpr, DT: constexpr):  # fmt: skip
    """O[g] = sum_e p_e v_e over the shared sources 0 ... n - 1, p their softmax, for the mixtures m0 + g < m1;   O_LSE the log-sum-exp.

    A flash attention over depth: for each token a (G, n) (n, d) product, the d columns over programs.
    """
    t = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BD + tl.arange(0, BD)
    g = tl.arange(0, G)
    live = m0 + g < m1
    o = tl.zeros((G, BD), tl.float32)
    top = tl.full((G,), float("-inf"), tl.float32)
    total = tl.zeros((G,), tl.float32)
    for e0 in tl.range(0, n, BN, num_stages=NS):
        e = e0 + tl.arange(0, BN)
        v = tl.load(V + (e[:, None] * b * T + t) * D + c[None, :], (e < n)[:, None] & (c < D)[None, :], 0.0)  # (BN, BD)
        s = tl.load(LOGIT + t * width + entry(e[None, :], m0 + g[:, None], b, M), (e < n)[None, :] & live[:, None], float("-inf"))
        higher = tl.where(live, tl.maximum(top, tl.max(s, 1)), 0.0)
        a = tl.exp(top - higher)
        p = tl.exp(s - higher[:, None])  # (G, BN)
        total = total * a + tl.sum(p, 1)
        o = tl.dot(p.to(DT), v.to(DT), o * a[:, None], input_precision="ieee")
        top = higher
    total = tl.where(live, total, 1.0)
    rows = g[:, None] * T + t
    tl.store(O + rows * D + c[None, :], o / total[:, None], live[:, None] & (c < D)[None, :])
    if tl.program_id(1) == 0:
        tl.store(O_LSE + g * T + t, top + tl.log(total), live)


@kernel
def row_pull(V, Y, DO, DY, W, Q, R, OWN, LOGIT, LSE, ORSTD, DELTA, START, DS, KK, DX, DW, DQ,
             T, per, m, row, ds_row, j1, tiles, b, M, width, eps, started,
             D: constexpr, BD: constexpr, NS: constexpr):  # fmt: skip
    """DO[m] = do_m from dy (the norm's backward);   DX = dv_m, pulled from the mixtures m, m + 1 ... j1 - 1 and from START.

    RMSNorm hardly sees the scale of o, so do_m . o_m, which softmax's backward needs as DELTA[m], is almost nothing: it is exactly
    mean(y dy) d eps rstd^2, and the norm's backward has that mean. A program adds the gradient of w, and that of q_m by source m itself,
    up over `per` tokens, in rows of its own that stay in cache: no atomics.
    """
    c = tl.arange(0, BD)
    in_row = c < D
    first = tl.program_id(0) * per
    sums = tl.program_id(0) * D + c
    for i in tl.range(0, tl.minimum(per, T - first), num_stages=1):
        t = first.to(tl.int64) + i
        y = tl.load(Y + t * D + c, in_row, 0.0).to(tl.float32)
        dy = tl.load(DY + t * D + c, in_row, 0.0).to(tl.float32)
        w = nonzero(tl.load(W + c, in_row, 1.0).to(tl.float32))
        rstd = tl.load(ORSTD + m * T + t)
        mean = tl.sum(y * dy, 0) / D
        delta = mean * D * eps * rstd * rstd
        g = (rstd * (w * dy - y / w * mean)).to(DO.dtype.element_ty)
        tl.store(DO + (m * T + t) * D + c, g, in_row)
        tl.store(DELTA + m * T + t, delta)
        tl.store(DW + sums, tl.load(DW + sums, in_row & (i > 0), 0.0) + y / w * dy, in_row)
        g = g.to(tl.float32)

        v = tl.load(V + (m * T + t) * D + c, in_row, 0.0).to(tl.float32)
        r = tl.load(R + m * T + t)
        s = tl.load(OWN + m * T + t)
        p = tl.exp(s - tl.load(LSE + m * T + t))
        ds = p * (tl.sum(g * v, 0) - delta)
        tl.store(DQ + sums, tl.load(DQ + sums, in_row & (i > 0), 0.0) + ds * r * v, in_row)
        k = ds * s
        dv = p * g + ds * r * tl.load(Q + m * D + c, in_row, 0.0).to(tl.float32)
        dv += tl.load(START + (row * T + t) * D + c, in_row & (started != 0), 0.0).to(tl.float32)
        for j in tl.range(m + 1, j1, num_stages=NS):
            g = tl.load(DO + (j * T + t) * D + c, in_row, 0.0).to(tl.float32)
            s = tl.load(LOGIT + t * width + entry(m, j, b, M))  # only in Full are there such j, and there source m is the m-th shared
            p = tl.exp(s - tl.load(LSE + j * T + t))
            ds = p * (tl.sum(g * v, 0) - tl.load(DELTA + j * T + t))
            tl.store(DS + (ds_row * T + t) * M + j, ds * r)
            k += ds * s
            dv += p * g + ds * r * tl.load(Q + j * D + c, in_row, 0.0).to(tl.float32)
        for tile in range(0, tiles):
            k += tl.load(KK + (tile * 16 + row) * T + t)
        tl.store(DX + t * D + c, dv - k * r * r / D * v, in_row)
        tl.debug_barrier()  # the next token adds to DW and DQ, perhaps by other lanes


@kernel
def pair_dot(V, DO, R, LOGIT, LSE, DELTA, DS, KK, T, e0, e1, m0, m1, b, M, width, more,
             D: constexpr, BK: constexpr, G: constexpr, BN: constexpr, NS: constexpr, DT: constexpr):  # fmt: skip
    """DS[g, t, m] = ds r,   ds = p (do_m . v_e - delta_m),   of the shared sources e = e0 + g < e1 and the mixtures m0 ... m1 - 1.

    KK[., g] = sum_m ds s over the BN mixtures of each program, for the part of dv_e along v_e; more: added to what is there.
    """
    t = tl.program_id(0).to(tl.int64)
    g = tl.arange(0, G)
    e = e0 + g
    j = m0 + tl.program_id(1) * BN + tl.arange(0, BN)
    dp = tl.zeros((G, BN), tl.float32)
    for k0 in tl.range(0, D, BK, num_stages=NS):
        k = k0 + tl.arange(0, BK)
        v = tl.load(V + (e[:, None] * b * T + t) * D + k[None, :], (e < e1)[:, None] & (k < D)[None, :], 0.0)  # (G, BK)
        x = tl.load(DO + (j[None, :] * T + t) * D + k[:, None], (j < m1)[None, :] & (k < D)[:, None], 0.0)  # (BK, BN)
        dp = tl.dot(v.to(DT), x.to(DT), dp, input_precision="ieee")
    both = (e < e1)[:, None] & (j < m1)[None, :]
    s = tl.load(LOGIT + t * width + entry(e[:, None], j[None, :], b, M), both, 0.0)
    lse = tl.load(LSE + j * T + t, j < m1, 0.0)
    delta = tl.load(DELTA + j * T + t, j < m1, 0.0)
    ds = tl.where(both, tl.exp(s - lse[None, :]) * (dp - delta[None, :]), 0.0)
    r = tl.load(R + e * b * T + t, e < e1, 0.0)
    tl.store(DS + (g[:, None] * T + t) * M + j[None, :], ds * r[:, None], both)
    kk = (tl.program_id(1) * G + g) * T + t
    tl.store(KK + kk, tl.load(KK + kk, (e < e1) & (more != 0), 0.0) + tl.sum(ds * s, 1), e < e1)


@kernel
def group_pull(DO, Q, LOGIT, LSE, DS, DV, T, e0, e1, m0, m1, b, M, width, more,
               D: constexpr, BD: constexpr, G: constexpr, BN: constexpr, NS: constexpr, DT: constexpr):  # fmt: skip
    """DV[g] = sum_m p_me do_m + (ds r)_me q_m   over the mixtures m0 ... m1 - 1, for the shared sources e0 + g;   more: added to DV."""
    t = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BD + tl.arange(0, BD)
    g = tl.arange(0, G)
    e = e0 + g
    rows = g[:, None] * T + t
    inside = (e < e1)[:, None] & (c < D)[None, :]
    dv = tl.load(DV + rows * D + c[None, :], inside & (more != 0), 0.0).to(tl.float32)  # (G, BD)
    for j0 in tl.range(m0, m1, BN, num_stages=NS):
        j = j0 + tl.arange(0, BN)
        both = (e < e1)[:, None] & (j < m1)[None, :]
        x = tl.load(DO + (j[:, None] * T + t) * D + c[None, :], (j < m1)[:, None] & (c < D)[None, :], 0.0)  # (BN, BD)
        q = tl.load(Q + j[:, None] * D + c[None, :], (j < m1)[:, None] & (c < D)[None, :], 0.0)
        s = tl.load(LOGIT + t * width + entry(e[:, None], j[None, :], b, M), both, float("-inf"))
        ds = tl.load(DS + rows * M + j[None, :], both, 0.0)
        p = tl.exp(s - tl.load(LSE + j * T + t, j < m1, 0.0)[None, :])  # (G, BN)
        dv = tl.dot(p.to(DT), x.to(DT), dv, input_precision="ieee")
        dv = tl.dot(ds.to(DT), q.to(DT), dv, input_precision="ieee")
    tl.store(DV + rows * D + c[None, :], dv, inside)


# ---------------------------------------------------------------------------------------------------------------------
# Depth mixing: the bank


def row(D, warps=1):
    """Constants of a row kernel: the whole row in registers, 32 numbers in each lane at most, fewer with more warps."""
    BD = max(128, triton.next_power_of_2(D))
    return dict(D=D, BD=BD, NS=3, num_warps=warps * max(1, BD // 1024), maxnreg=168)


def group_of(m, M, b, G):
    """The mixtures m0 ... m1 - 1 of M that are prepared together with m, and how many shared sources they have in common."""
    if b == 1:
        m0 = m - m % G
        return m0, min(m0 + G, M), m0
    block = (m - 1) // b
    first = block * b + 1
    m0 = m - (m - first) % 16
    return m0, min(m0 + 16, first + b, M), block + 1 if block > 0 else 0  # the first block shares one source, which row_mix reads


class Bank:
    """What Full and Block AttnRes keep in place of the list of sources: the sources side by side, in order.

    One for each forward pass, from the embedding to the head: `bank.read(w, eps)` is LN of the next mixture, `bank.add(y)`
    the state after a branch. It can be gone through backwards once, from the last mixture to the first.

    x (B, T, d) embedding; Q (M, d) the queries of all M = 2L + 1 readers, that of the first zero; key_eps of the sources'
    norm; b branches sum up to a source (1: Full). In Full G <= 16 mixtures share their reads; by default 8, above 32 layers 16.
    Sources, and queries where matrices are multiplied, are in the precision of x, that of autocast if it is on; sums are float32.
    """

    def __init__(self, x, Q, key_eps, b=1, G=None):
        M, D = len(Q), x.shape[-1]
        self.n, self.b, self.x, self.Q, self.shape = 0, b, autocast(x).reshape(-1, D).contiguous(), Q, x.shape
        keep = torch.is_grad_enabled() and not torch.compiler.is_compiling()  # a compiler may put what it likes into the memory of a dead y
        self.handle = open_bank(self.x, Q, key_eps, b, G or (8 if M <= 65 else 16), keep)

    @property
    def arena(self):
        return self.handle.arena

    def add(self, y):
        """The state after a branch that gave y; in Block AttnRes the y of a block are summed up."""
        after = object.__new__(Bank)
        after.handle, after.n, after.b, after.Q, after.shape = self.handle, self.n + 1, self.b, None, self.shape
        after.x = y.to(self.x.dtype).reshape(self.x.shape).contiguous()
        return after

    def read(self, w, eps):
        """LN of the mixture that the next branch, or the head, reads: RMSNorm(sum_i p_i v_i) * w, (B, T, d)."""
        return mix(self.x, w, self.Q, self.handle, self.n, eps).view(self.shape)

    def __len__(self):
        """Sources of the next mixture."""
        return (self.n - 1) // self.b + 2

    def __getitem__(self, i):
        """Source i with its 1 / RMS, as in the list that it stands for; without a gradient."""
        if not -len(self) <= i < len(self):
            raise IndexError(f"source {i} of {len(self)}")
        a, m = self.arena, min(i % len(self) * self.arena.b, self.n)
        if m < a.filled:
            v = a.V[m]
        else:
            v = self.x.detach() + (a.V[m - 1] if a.sums(m) else 0)
        return v.view(self.shape), (v.float().square().mean(-1) + a.key_eps).rsqrt().view(self.shape[:-1])


class Arena:
    """The memory of a Bank, and the schedule: which kernel runs when."""

    def __init__(self, x, Q, key_eps, b, G, keep):
        (M, D), T, new, f32 = Q.shape, len(x), x.new_empty, torch.float32
        self.M, self.T, self.D, self.key_eps, self.b, self.G, self.rows = M, T, D, key_eps, b, G, G if b == 1 else 16
        self.shared = (M - 2) // b + 1 if M > 1 else 0  # sources that more than one mixture reads
        width = sum(M - 1 - e * b for e in range(self.shared))
        self.layout = b, M, width  # of LOGIT, for `entry`
        self.filled, self.group, self.next = 0, None, None
        self.V = new(M, T, D)
        self.Y = new(M, T, D) if keep else None
        self.Q = Q.to(x.dtype).contiguous()
        self.LOGIT = new(T, width, dtype=f32)
        self.OWN, self.R, self.LSE, self.ORSTD = new(4, M, T, dtype=f32)
        self.O = self.O_LSE = None

    def tile(self, **more):
        """Constants of a kernel that multiplies matrices."""
        return dict(D=self.D, NS=3, DT=dot_type(self.V), maxnreg=128, **more)

    def sums(self, m):
        """Whether source m is the sum of source m - 1 and what the branch gave."""
        return m > 0 and (m - 1) % self.b != 0

    def forward(self, m, x, w, eps):
        M, T, D = self.M, self.T, self.D
        if m > self.filled:
            raise RuntimeError(f"mixture {m} was read before mixture {self.filled}: a Bank is filled from the first branch to the head")
        y = torch.empty_like(x) if self.Y is None else self.Y[m]
        m0, m1, n = group_of(m, M, self.b, self.G)
        if n and self.O is None:
            self.O, self.O_LSE = self.V.new_empty(self.rows, T, D), self.LSE.new_empty(self.rows, T)
        if n and self.group != m0:
            group_mix[(T, triton.cdiv(D, 128))](
                self.V, self.LOGIT, self.O, self.O_LSE, T, n, m0, m1, *self.layout, **self.tile(G=16, BD=128, BN=16, num_warps=2)
            )
            self.group = m0
        row_mix[(T,)](
            x, self.V, y, w, self.Q, self.R, self.OWN, self.LOGIT, self.LSE, self.ORSTD,
            self.O if n else self.V, self.O_LSE if n else self.LSE,
            T, m, m - m0, n, (m - 1) // self.b + 1, *self.layout, eps, self.key_eps, int(self.sums(m)), int(n > 0), **row(D)
        )  # fmt: skip
        e = m // self.b
        if m % self.b == 0 and e < self.shared:
            BM = 128 if M > 65 else 64
            grid = triton.cdiv(T, 64), triton.cdiv(M - m - 1, BM)
            source_logits[grid](self.V, self.Q, self.R, self.LOGIT, T, m, e, *self.layout, **self.tile(BT=64, BM=BM, BK=32, num_warps=4))
        self.filled = max(self.filled, m + 1)
        if m == M - 1:
            self.O = self.O_LSE = self.group = None
        return y

    def backward(self, m, dy, y, w, eps):
        """dx, dw of mixture m, and dQ if it is the first: to be called for the last mixture, then the one before, and so on."""
        if self.next is None and m == self.filled - 1:
            self.start_backward()
        elif self.next != m:
            raise RuntimeError("depth mixing goes back once from the last mixture to the first, and uses its memory up: run forward again")
        T, D, b = self.T, self.D, self.b
        m0, m1, _ = group_of(m, self.M, self.b, self.G)
        later, e = self.filled, m // b  # later: the mixtures that were run
        # start[at] is what younger mixtures gave source m already. Full: DV, from later groups; row_pull adds those of the group, to j1.
        # Block: all of it; DV for a shared source, for another dx of the next mixture, whose running sum has source m in it.
        if b == 1:
            start, at, j1, started = self.DV, m - m0, m1, m1 < later
            if m == min(m1, later) - 1:
                self.DS[:, :, m0:m1] = 0
                if started:
                    self.pull(m0, m1, m1, later, more=False)
        else:
            on_its_own = m % b != 0  # nobody but mixture m and the running sum have source m
            start, at, j1 = (self.dx, 0, m + 1) if on_its_own and m + 1 < later else (self.DV[e - e % 16 :], e % 16, m + 1)
            started = m + 1 < later
        per = triton.cdiv(T, PROGRAMS)
        programs = triton.cdiv(T, per)
        DX, (DW, DQ) = torch.empty_like(dy), dy.new_empty(2, programs, D, dtype=torch.float32)
        tiles = (triton.cdiv(later - m1, 32) if b == 1 else 0 if on_its_own else self.KK.shape[1]) if started else 0
        row_pull[(programs,)](
            self.V, y, self.DO, dy, w, self.Q, self.R, self.OWN, self.LOGIT, self.LSE, self.ORSTD, self.DELTA, start, self.DS,
            self.KK[e // 16 if b > 1 else 0], DX, DW, DQ,
            T, per, m, at, m - m0, min(j1, later), tiles, *self.layout, eps, int(started), **row(D, 2)
        )  # fmt: skip
        self.dQ[m] += DQ.sum(0)
        if b == 1 and m == m0:
            self.query_gradient(m0, min(m1, later), m0, later)
        if b > 1 and m > 0 and (m - 1) % b == 0:  # all of this block is known: on to the sources that its mixtures share
            last = m + b >= later
            for e0 in range(0, e + 1, 16):
                self.pull(e0, min(e0 + 16, e + 1), m, min(m + b, later), more=not last)
                self.query_gradient(e0, min(e0 + 16, e + 1), m, min(m + b, later))
        self.next, self.dx = m - 1, None
        if self.sums(m):
            self.dx = DX if self.Y is not None else DX.clone()  # a compiler may use the memory of DX again
        dQ = self.dQ if m == 0 else dy.new_empty(0)
        if m == 0:
            self.__dict__.clear()
            self.next = None
            self.filled = -1
        return DX, DW.sum(0).to(w.dtype), dQ

    def start_backward(self):
        """Memory that only the backward pass needs: of T d size, the partial sums of one group, in Block of all shared sources."""
        chunks, f32 = 1 if self.b == 1 else triton.cdiv(self.shared, 16), torch.float32
        new = self.V.new_empty
        self.DV = new(self.rows * chunks, self.T, self.D)
        self.DS = new(self.rows, self.T, self.M)
        self.KK = self.V.new_zeros(chunks, triton.cdiv(self.M if self.b == 1 else self.b, 32), 16, self.T, dtype=f32)
        self.DELTA = new(self.M, self.T, dtype=f32)
        self.DO = new(self.M, self.T, self.D) if self.Y is None else self.Y
        self.dQ = torch.zeros_like(self.Q, dtype=f32)

    def pull(self, e0, e1, m0, m1, more):
        """DV and DS of the shared sources e0 ... e1 - 1, of the mixtures m0 ... m1 - 1."""
        T, D, at, more = self.T, self.D, e0 // 16 if self.b > 1 else 0, int(more)
        which = T, e0, e1, m0, m1, *self.layout, more
        pair_dot[(T, triton.cdiv(m1 - m0, 32))](
            self.V, self.DO, self.R, self.LOGIT, self.LSE, self.DELTA, self.DS, self.KK[at], *which,
            **self.tile(G=16, BK=64, BN=32, num_warps=2)
        )  # fmt: skip
        group_pull[(T, triton.cdiv(D, 128))](
            self.DO, self.Q, self.LOGIT, self.LSE, self.DS, self.DV[16 * at :], *which, **self.tile(G=16, BD=128, BN=16, num_warps=2)
        )

    def query_gradient(self, e0, e1, m0, m1):
        """dQ_m += sum_e sum_t (ds r)_me v_e: matrix products (M, T) (T, d), one for each source."""
        ds = self.DS[: e1 - e0, :, m0:m1].mT
        v = self.V[e0 * self.b : (e1 - 1) * self.b + 1 : self.b]
        self.dQ[m0:m1] += torch.bmm(ds, v).float().sum(0)


@operator(lambda *_: torch.empty((), dtype=torch.int64, device="cpu"))
def open_bank(x: Tensor, Q: Tensor, key_eps: float, b: int, G: int, keep: bool) -> Tensor:
    """An Arena, as an attribute of a tensor: so it passes through operators, and lives as long as autograd needs it."""
    handle = torch.zeros((), dtype=torch.int64)
    handle.arena = Arena(x, Q, key_eps, b, G, keep)
    return handle


@operator(lambda x, *_: torch.empty_like(x))
def mix(x: Tensor, w: Tensor, Q: Tensor | None, handle: Tensor, m: int, eps: float) -> Tensor:
    """x_m -> y_m: the newest source goes in, the normed mixture that branch m reads comes out. The first takes Q, for its gradient."""
    return handle.arena.forward(m, x, w, eps)


def gradient_shapes(dy, y, w, handle, m, eps, M):
    return torch.empty_like(dy), torch.empty_like(w), dy.new_empty((M, dy.shape[-1]) if M else 0, dtype=torch.float32)


@operator(gradient_shapes)
def mix_gradients(dy: Tensor, y: Tensor, w: Tensor, handle: Tensor, m: int, eps: float, M: int) -> tuple[Tensor, Tensor, Tensor]:
    return handle.arena.backward(m, dy.contiguous(), y, w, eps)


def keep_mix(ctx, inputs, output):
    _, w, Q, handle, ctx.m, ctx.eps = inputs
    ctx.M = 0 if Q is None else len(Q)
    ctx.save_for_backward(output, w, handle)


def mix_backward(ctx, dy):
    dx, dw, dQ = mix_gradients(dy, *ctx.saved_tensors, ctx.m, ctx.eps, ctx.M)
    return dx, dw, dQ if ctx.M else None, None, None, None


mix.register_autograd(mix_backward, setup_context=keep_mix)


# ---------------------------------------------------------------------------------------------------------------------
# Sinkhorn: 16 numbers for each token


@kernel
def matrices(t):
    """Where the matrices [source, destination] of the tokens t are, (4, 4, BT). A token for each lane, so that no sum needs another lane:
    to a compiler that saw their numbers side by side, four lanes would seem better."""
    return tl.max_contiguous(t * 16 + tl.arange(0, 4)[:, None, None] * 4 + tl.arange(0, 4)[None, :, None], (1, 1, 1))


@kernel
def over_sources(x):
    """Softmax over the sources: each column, a destination, sums to one."""
    e = tl.exp(x - tl.max(x, 0, keep_dims=True))
    return e * (1.0 / tl.sum(e, 0, keep_dims=True))


@kernel
def normed(a, eps, axis: constexpr):
    """a over its sums, and their reciprocals."""
    r = 1.0 / (tl.sum(a, axis, keep_dims=True) + eps)
    return a * r, r


@kernel
def normed_backward(g, a, r, axis: constexpr):
    """The gradient before a norm, of g after it; a is what the norm gave, with the reciprocals r; and what it was given, a / r."""
    return (g - tl.sum(g * a, axis, keep_dims=True)) * r, a * (1.0 / r)


@kernel
def sinkhorn_forward(X, A, T, eps, iterations, BT: constexpr):
    """A (T, 4, 4) doubly stochastic, of logits X [source, destination]."""
    t = tl.program_id(0) * BT + tl.arange(0, BT)[None, None, :]
    a, r = normed(over_sources(tl.load(X + matrices(t), t < T, 0.0)) + eps, eps, 1)
    for _ in range(iterations - 1):
        a, c = normed(a, eps, 0)
        a, r = normed(a, eps, 1)
    tl.store(A + matrices(t), a, t < T)


@kernel
def sinkhorn_backward(X, G, DX, R, T, eps, iterations, BT: constexpr):
    """DX of G, the gradient of A: that of the iterations as they were, not of their limit, from which 20 are still far.

    They run once more; the 8 reciprocals of each but the first go through R (iterations - 1, 8, T), and so it can be undone.
    """
    t = tl.program_id(0) * BT + tl.arange(0, BT)[None, None, :]
    destinations = R + tl.arange(0, 4)[None, :, None] * T + t
    sources = R + (4 + tl.arange(0, 4)[:, None, None]) * T + t
    p = over_sources(tl.load(X + matrices(t), t < T, 0.0))
    a, first = normed(p + eps, eps, 1)
    for i in range(iterations - 1):
        a, r = normed(a, eps, 0)
        tl.store(destinations + 8 * i * T, r, t < T)
        a, r = normed(a, eps, 1)
        tl.store(sources + 8 * i * T, r, t < T)
    g = tl.load(G + matrices(t), t < T, 0.0)
    for back in range(iterations - 1):
        at = 8 * (iterations - 2 - back) * T
        g, a = normed_backward(g, a, tl.load(sources + at, t < T, 1.0), 1)
        g, a = normed_backward(g, a, tl.load(destinations + at, t < T, 1.0), 0)
    g, _ = normed_backward(g, a, first, 1)
    tl.store(DX + matrices(t), p * (g - tl.sum(g * p, 0, keep_dims=True)), t < T)


@operator(lambda x, *_: torch.empty_like(x))
def sinkhorn(x: Tensor, iterations: int, eps: float) -> Tensor:
    """residuals.sinkhorn of contiguous float32 logits (..., 16), [source, destination] flattened."""
    A, T = torch.empty_like(x), x.numel() // 16
    sinkhorn_forward[(triton.cdiv(T, 128),)](x, A, T, eps, iterations, BT=128, num_warps=4)
    return A


@operator(lambda x, *_: torch.empty_like(x))
def sinkhorn_gradient(x: Tensor, g: Tensor, iterations: int, eps: float) -> Tensor:
    DX, T = torch.empty_like(x), x.numel() // 16
    R = x.new_empty(iterations - 1, 8, T)
    sinkhorn_backward[(triton.cdiv(T, 128),)](x, g.contiguous(), DX, R, T, eps, iterations, BT=128, num_warps=4)
    return DX


def keep_sinkhorn(ctx, inputs, output):
    x, *ctx.numbers = inputs
    ctx.save_for_backward(x)


sinkhorn.register_autograd(lambda ctx, g: (sinkhorn_gradient(*ctx.saved_tensors, g, *ctx.numbers), None, None), setup_context=keep_sinkhorn)


# ---------------------------------------------------------------------------------------------------------------------
# How they join a model


def accelerate(model, kernels="auto"):
    """Let the connections of a Transformer run on kernels, where its rule has some: the parameters, their names and the equations
    stay what they are, and so does the model on a device, or in a precision, that the kernels cannot serve.

    kernels is "reference" (nothing is done), "auto" (on a GPU) or "triton" (also in Triton's interpreter). Returns a line on
    why nothing was done though it could have been, else None. The GPU must be torch's current one. Probes that skip, swap or look
    in between want the model as it was.
    """
    connections = [residual for residual, _ in model.branches()]
    rule = type(connections[0]).__name__  # by name, as a reader's rule that builds on one of them has equations of its own
    device = model.head.weight.device
    if kernels == "reference" or (kernels == "auto" and device.type != "cuda"):
        return None
    if rule not in ("FullAttnRes", "BlockAttnRes", "HC", "MHC") or (rule in ("HC", "MHC") and connections[0].m != 4):
        return None
    if triton is None or [int(n) for n in triton.__version__.split(".")[:2]] < [3, 4]:
        return "kernels: no Triton of 3.4 or later here, so depth mixing and hyper-connections run as written in residuals.py"
    if device.type != "cuda" and not INTERPRETED:
        return f"kernels: Triton does not run on {device.type}, so the connections run as written in residuals.py"
    if rule in ("FullAttnRes", "BlockAttnRes"):
        enter, forward, head = mix_enter, mix_forward, mix_head
    else:
        import kernels_hc as hc  # here, as it is built on this file

        enter, forward, head = hc.stream_enter, hc.stream_forward, hc.stream_head
    model.enter = MethodType(enter, model)
    model.reader.forward = MethodType(head, model.reader)
    for connection in connections:
        connection.forward = MethodType(forward, connection)
        if getattr(connection, "constraint", "") == "doubly":
            connection.constrain = MethodType(constrain, connection)
    return None


def mix_enter(model, x):
    """The bank, with the queries of all readers, in place of the list of sources."""
    rule = type(model.blocks[0].attn_residual)
    if not usable(autocast(x)):
        return rule.enter(x)
    first, *readers = [residual.reader for residual, _ in model.branches()] + [model.reader]
    w = [reader.mixture.w * reader.mixture.gain for reader in readers]
    return Bank(x, torch.stack([torch.zeros_like(w[0]), *w]).float(), rule.eps, model.blocks[0].attn_residual.b)


def mix_forward(self, bank, F):
    """FullAttnRes.forward and BlockAttnRes.forward: the bank knows which sources are summed up."""
    if not isinstance(bank, Bank):
        return type(self).forward(self, bank, F)
    return bank.add(F(bank.read(self.norm.weight, self.norm.eps)))


def mix_head(self, bank):
    return bank.read(self.norm.weight, self.norm.eps) if isinstance(bank, Bank) else type(self).forward(self, bank)


def constrain(self, logits):
    """MHC.constrain, doubly stochastic."""
    if not usable(logits):
        return type(self).constrain(self, logits)
    return sinkhorn(logits.float().contiguous(), self.iterations, 1e-6).unflatten(-1, (4, 4))

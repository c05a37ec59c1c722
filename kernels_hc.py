"""
Triton kernels for hyper-connections (HC and mHC of four streams): the write of one branch, what the next one routes by, and its
read with its norm, in one kernel.

        H, F, A --> N = the streams after the write --> P, Q = what to route by --> X = what the next branch reads --> its F, A

Why so. A connection moves four streams of width d, and does little with them. Written as equations it reads them again for each
of write, norm, routing and read. Here the write waits in the depth state (`Streams`) for the read that follows, and one kernel does
both: the streams come and go once. A program needs its 16 tokens twice, as the routing needs whole streams; the second time they
are in the cache, if that holds the tiles of all programs in flight (README, Kernels). A and beta are made by PyTorch from P and Q
between two connections (`coefficients` in residuals.py); mHC's Sinkhorn is in kernels.py.

Names. Arrays in upper case, d the width, T tokens (batch and sequence flattened), streams i, j, s. H, N (T, 4, d) the streams before and
after a write; F (T, d) what a branch gave, X (T, d) what the next one reads; A (T, 5, 4) the weights of the write, [source, destination],
those of F, beta, in the last row; W (4, d, 32) routing matrices, their first columns for alpha, the weights of the read; GAIN (d,) of
its norm. Of a token, in float32: P (32,) = sum_j N_j W_j; Q (4,) the squares |N_j|^2; CROSS (6,) the products of two streams,
01 02 03 12 13 23; RSTD of the read. READ (10,) as in `read_weights`.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad
from triton.language import constexpr

from kernels import autocast, dot_type, kernel, operator, usable
from residuals import no_autocast

# ---------------------------------------------------------------------------------------------------------------------
# Kernels


@kernel
def load_numbers(X, t, T, n: constexpr, row: constexpr):
    """The first n numbers in each token's row, one of them in each vector."""
    a = ()
    for k in tl.static_range(n):
        a += (tl.load(X + t * row + k, t < T, 0.0),)
    return a


@kernel
def store_numbers(X, a, t, T, n: constexpr):
    for k in tl.static_range(n):
        tl.store(X + t * n + k, a[k], t < T)


@kernel
def load_streams(H, t, c, T, D: constexpr):
    """The columns c of four streams of the tokens t: four (BT, BD)."""
    h = ()
    for s in tl.static_range(4):
        h += (tl.load(H + (t * 4 + s)[:, None] * D + c[None, :], (t < T)[:, None] & (c < D)[None, :], 0.0).to(tl.float32),)
    return h


@kernel
def load_sources(H, F, t, c, T, D: constexpr):
    """What the next streams are made of: four streams and the output of a branch."""
    f = tl.load(F + t[:, None] * D + c[None, :], (t < T)[:, None] & (c < D)[None, :], 0.0)
    return load_streams(H, t, c, T, D) + (f.to(tl.float32),)


@kernel
def weighted(w, x, i: constexpr, step: constexpr, n: constexpr):
    """w_i x_0 + w_(i + step) x_1 + ...: n vectors of a token by n of its numbers."""
    y = w[i][:, None] * x[0]
    for s in tl.static_range(1, n):
        y += w[i + step * s][:, None] * x[s]
    return y


@kernel
def zeros(BT: constexpr, n: constexpr):
    r = ()
    for _ in tl.static_range(n):
        r += (tl.zeros((BT,), tl.float32),)
    return r


@kernel
def add_dots(r, x, y, I: constexpr, J: constexpr, n: constexpr):
    """r_e + x_i . y_j of a token, for n pairs i, j."""
    s = ()
    for e in tl.static_range(n):
        s += (r[e] + tl.sum(x[I[e]] * y[J[e]], 1),)
    return s


@kernel
def read_weights(p, q, READ, routing_eps, together, D: constexpr):
    """alpha_j = READ_j + READ_8 u_j,   u_j = tanh(READ_9 z_j + READ_(4 + j)),   z_j = r_j p_j;   p the first of P, q of Q.

    READ: four constants, four biases, the scale before the tanh's sum, that within. r_j is 1 / RMS of a stream, or of all (together).
    mHC's sigmoid is a tanh, too: s(x) = (1 + tanh(x / 2)) / 2.
    """
    alpha, u, z, r = (), (), (), ()
    for j in tl.static_range(4):
        square = tl.where(together != 0, (q[0] + q[1] + q[2] + q[3]) / 4, q[j])
        r += (tl.rsqrt(square / D + routing_eps),)
        z += (r[j] * p[j],)
        u += (2 * tl.sigmoid(2 * (tl.load(READ + 9) * z[j] + tl.load(READ + 4 + j))) - 1,)
        alpha += (tl.load(READ + j) + tl.load(READ + 8) * u[j],)
    return alpha, u, z, r


@kernel
def by_stream(alpha, g):
    """N_j . sum_i alpha_i N_i for each j, of the squares and products g of the streams."""
    return (
        alpha[0] * g[0] + alpha[1] * g[4] + alpha[2] * g[5] + alpha[3] * g[6],
        alpha[0] * g[4] + alpha[1] * g[1] + alpha[2] * g[7] + alpha[3] * g[8],
        alpha[0] * g[5] + alpha[1] * g[7] + alpha[2] * g[2] + alpha[3] * g[9],
        alpha[0] * g[6] + alpha[1] * g[8] + alpha[2] * g[9] + alpha[3] * g[3],
    )


@kernel
def connect_forward(H, F, A, W, READ, GAIN, N, X, P, Q, CROSS, RSTD, T, eps, routing_eps, together,
                    D: constexpr, BT: constexpr, BD: constexpr, NS: constexpr, DT: constexpr):  # fmt: skip
    """N_j = sum_s A_sj H_s + A_4j F, the streams after a branch;   P = sum_j N_j W_j and Q_j = |N_j|^2, from which the next one
    routes;   X = RMSNorm(sum_j alpha_j N_j) * gain, what it reads.

    The norm is known before X is: |sum_j alpha_j N_j|^2 follows from Q and CROSS. So N is read but once more.
    """
    t = (tl.program_id(0) * BT + tl.arange(0, BT)).to(tl.int64)
    k = tl.arange(0, 32)
    a = load_numbers(A, t, T, 20, 20)
    p = tl.zeros((BT, 32), tl.float32)
    gram = zeros(BT, 10)  # four squares, then the products 01 02 03 12 13 23
    for d0 in tl.range(0, D, BD, num_stages=NS):
        c = d0 + tl.arange(0, BD)
        inside = (t < T)[:, None] & (c < D)[None, :]
        h, n = load_sources(H, F, t, c, T, D), ()
        for j in tl.static_range(4):
            nj = weighted(a, h, j, 4, 5).to(N.dtype.element_ty)
            tl.store(N + (t * 4 + j)[:, None] * D + c[None, :], nj, inside)
            w = tl.load(W + (j * D + c)[:, None] * 32 + k[None, :], (c < D)[:, None], 0.0)
            p = tl.dot(nj.to(DT), w.to(DT), p, input_precision="ieee")
            n += (nj.to(tl.float32),)
        gram = add_dots(gram, n, n, (0, 1, 2, 3, 0, 0, 0, 1, 1, 2), (0, 1, 2, 3, 1, 2, 3, 2, 3, 3), 10)
    first = ()
    for j in tl.static_range(4):
        first += (tl.sum(tl.where(k[None, :] == j, p, 0.0), 1),)
    store_numbers(Q, gram, t, T, 4)
    store_numbers(CROSS, gram[4:], t, T, 6)
    tl.store(P + t[:, None] * 32 + k[None, :], p, (t < T)[:, None])
    alpha, _, _, _ = read_weights(first, gram, READ, routing_eps, together, D)
    along = by_stream(alpha, gram)
    square = alpha[0] * along[0] + alpha[1] * along[1] + alpha[2] * along[2] + alpha[3] * along[3]
    rstd = tl.rsqrt(tl.maximum(square, 0.0) / D + eps)
    tl.store(RSTD + t, rstd, t < T)
    tl.debug_barrier()  # what other lanes wrote to N
    for d0 in tl.range(0, D, BD, num_stages=NS):
        c = d0 + tl.arange(0, BD)
        x = weighted(alpha, load_streams(N, t, c, T, D), 0, 1, 4) * rstd[:, None] * tl.load(GAIN + c, c < D, 0.0).to(tl.float32)[None, :]
        tl.store(X + t[:, None] * D + c[None, :], x, (t < T)[:, None] & (c < D)[None, :])


@kernel
def connect_backward(H, F, A, W, READ, GAIN, P, Q, CROSS, RSTD, DN, DX, DP, DQ, DH, DF, DA, DPALL, DREAD, DGAIN, T, routing_eps,
                     together, D: constexpr, BT: constexpr, BD: constexpr, NS: constexpr, DT: constexpr):  # fmt: skip
    """G_j = DN_j + alpha_j dx + W_j dp + 2 dq_j N_j, the gradient of stream N_j, from the next connection, the read, and the
    routing;   DH_s = sum_j A_sj G_j,  DA_sj = H_s . G_j,  and likewise DF and DA_4j.

    First dalpha_j = N_j . dx,   dx = rstd (gain DX - xh mean),   xh = rstd sum_j alpha_j N_j,   mean = mean(xh gain DX),   and what it
    adds to DP and DQ. N is made again from H and F, which DA needs anyway, rather than read. DPALL dp, for the gradient of W; DREAD and
    DGAIN sums over the program's tokens.
    """
    t = (tl.program_id(0) * BT + tl.arange(0, BT)).to(tl.int64)
    k = tl.arange(0, 32)
    a = load_numbers(A, t, T, 20, 20)
    hx = zeros(BT, 5)  # H_s . (gain DX), F . (gain DX)
    for d0 in tl.range(0, D, BD, num_stages=NS):
        c = d0 + tl.arange(0, BD)
        inside = (t < T)[:, None] & (c < D)[None, :]
        at = t[:, None] * D + c[None, :]
        dx = tl.load(GAIN + c, c < D, 0.0).to(tl.float32)[None, :] * tl.load(DX + at, inside, 0.0).to(tl.float32)
        hx = add_dots(hx, load_sources(H, F, t, c, T, D), (dx,), (0, 1, 2, 3, 4), (0, 0, 0, 0, 0), 5)

    rstd = tl.load(RSTD + t, t < T, 0.0)
    gram, p = load_numbers(Q, t, T, 4, 4) + load_numbers(CROSS, t, T, 6, 6), load_numbers(P, t, T, 4, 32)
    alpha, u, z, r = read_weights(p, gram, READ, routing_eps, together, D)
    nx = ()
    for j in tl.static_range(4):
        nx += (a[j] * hx[0] + a[4 + j] * hx[1] + a[8 + j] * hx[2] + a[12 + j] * hx[3] + a[16 + j] * hx[4],)
    mean = (alpha[0] * nx[0] + alpha[1] * nx[1] + alpha[2] * nx[2] + alpha[3] * nx[3]) * rstd / D
    along = by_stream(alpha, gram)
    dp = tl.load(DP + t[:, None] * 32 + k[None, :], (t < T)[:, None], 0.0)
    sums, ones, slopes, dsquare = DREAD + tl.program_id(0) * 16, tl.zeros((BT,), tl.float32), tl.zeros((BT,), tl.float32), ()
    for j in tl.static_range(4):
        dalpha = rstd * (nx[j] - mean * rstd * along[j])
        dy = dalpha * tl.load(READ + 8) * (1 - u[j] * u[j])
        tl.store(sums + j, tl.sum(dalpha, 0))
        tl.store(sums + 4 + j, tl.sum(dy, 0))
        ones += dalpha * u[j]
        slopes += dy * z[j]
        dz = dy * tl.load(READ + 9)
        dp += tl.where(k[None, :] == j, (dz * r[j])[:, None], 0.0)
        dsquare += (-0.5 * dz * z[j] * r[j] * r[j] / D,)
    tl.store(sums + 8, tl.sum(ones, 0))
    tl.store(sums + 9, tl.sum(slopes, 0))
    tl.store(DPALL + t[:, None] * 32 + k[None, :], dp, (t < T)[:, None])
    shared, dq2 = (dsquare[0] + dsquare[1] + dsquare[2] + dsquare[3]) / 4, ()  # 2 dq_j
    for j in tl.static_range(4):
        dq2 += (2 * (tl.load(DQ + t * 4 + j, t < T, 0.0) + tl.where(together != 0, shared, dsquare[j])),)

    da = zeros(BT, 20)
    for d0 in tl.range(0, D, BD, num_stages=NS):
        c = d0 + tl.arange(0, BD)
        inside = (t < T)[:, None] & (c < D)[None, :]
        at = t[:, None] * D + c[None, :]
        h, n = load_sources(H, F, t, c, T, D), ()
        for j in tl.static_range(4):
            n += (weighted(a, h, j, 4, 5),)
        x = weighted(alpha, n, 0, 1, 4) * rstd[:, None]
        dx = tl.load(DX + at, inside, 0.0).to(tl.float32)
        tl.store(DGAIN + tl.program_id(0) * D + c, tl.sum(x * dx, 0), c < D)
        dx = rstd[:, None] * (tl.load(GAIN + c, c < D, 0.0).to(tl.float32)[None, :] * dx - x * mean[:, None])
        g = ()
        for j in tl.static_range(4):
            gj = tl.load(DN + (t * 4 + j)[:, None] * D + c[None, :], inside, 0.0).to(tl.float32)
            gj += alpha[j][:, None] * dx + dq2[j][:, None] * n[j]
            w = tl.load(W + (j * D + c)[None, :] * 32 + k[:, None], (c < D)[None, :], 0.0)
            g += (tl.dot(dp.to(DT), w.to(DT), gj, input_precision="ieee"),)
        for s in tl.static_range(4):
            tl.store(DH + (t * 4 + s)[:, None] * D + c[None, :], weighted(a, g, 4 * s, 1, 4), inside)
        tl.store(DF + at, weighted(a, g, 16, 1, 4), inside)
        da = add_dots(da, h, g, (0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 4, 4, 4, 4),
                      (0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3), 20)  # fmt: skip
    store_numbers(DA, da, t, T, 20)


def tile(H, warps):
    """Constants of a connector. A lane loads 16 / warps numbers side by side. 8 are 128 bits in bf16; on the way back they would spill."""
    return dict(D=H.shape[-1], BT=16, BD=32, NS=2, DT=dot_type(H), num_warps=warps)


def empty_outputs(H, f, *_):
    """N, X, P, Q, CROSS, RSTD"""
    numbers = (H.new_empty(len(H), n, dtype=torch.float32) for n in (32, 4, 6, 1))
    return torch.empty_like(H), torch.empty_like(f), *numbers


@operator(empty_outputs)
def connect(H: Tensor, f: Tensor, A: Tensor, W: Tensor, read: Tensor, gain: Tensor, eps: float, routing_eps: float, together: bool
            ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    T, made = len(H), empty_outputs(H, f)
    connect_forward[(triton.cdiv(T, 16),)](H, f, A, W.to(H.dtype), read, gain, *made, T, eps, routing_eps, int(together), **tile(H, 2))
    return made


@operator(lambda kept, *_: [torch.empty_like(x) for x in kept[:6]])
def connect_gradients(kept: list[Tensor], given: list[Tensor], routing_eps: float, together: bool) -> list[Tensor]:
    """Those of the six inputs, which are kept with N and its numbers, given those of N, X, P and Q."""
    H, f, A, W, read, gain, N, P, *numbers = kept
    T, programs, given = len(H), triton.cdiv(len(H), 16), [g.contiguous() for g in given]
    DH, DF, DA, DPALL = made = [torch.empty_like(x) for x in (H, f, A, P)]
    DREAD, DGAIN = P.new_empty(programs, 16), P.new_empty(programs, H.shape[-1])
    connect_backward[(programs,)](
        H, f, A, W.to(H.dtype), read, gain, P, *numbers, *given, *made, DREAD, DGAIN, T, routing_eps, int(together), **tile(H, 4)
    )
    DW = torch.bmm(N.permute(1, 2, 0), DPALL.to(N.dtype).expand(4, T, 32)).to(W.dtype)  # (4, d, T) (4, T, 32)
    return [DH, DF, DA, DW, DREAD.sum(0)[:10], DGAIN.sum(0).to(gain.dtype)]


def keep_connect(ctx, inputs, output):
    N, X, *numbers = output
    ctx.save_for_backward(*inputs[:6], N, *numbers)
    ctx.numbers = inputs[7:]
    ctx.mark_non_differentiable(*numbers[2:])


def connect_backwards(ctx, *given):
    return *connect_gradients(ctx.saved_tensors, given[:4], *ctx.numbers), None, None, None


connect.register_autograd(connect_backwards, setup_context=keep_connect)


class Streams:
    """What HC and mHC of four streams keep in place of H: H before the last branch, and its write, still to be done.

        N, x, P, q = streams.connect(W, read, gain, eps, ...)   the streams H' = H A + y beta^T; x = RMSNorm(H' alpha) * gain
        streams = N.then(F(x), A, beta)                         A and beta may depend on P and q, as alpha does

    W (4, d, n), n <= 32; P (B, T, n) = sum_j H'_j W_j; q (B, T, 4) the squares of the streams; read (10,) as in `read_weights`.
    Streams, and W where matrices are multiplied, are in the precision of the embedding, that of autocast if it is on; sums are float32.
    """

    def __init__(self, H, y=None, A=None):
        self.H, self.y, self.A = H, y, A  # A (..., 5, 4), with beta in its last row

    @classmethod
    def enter(cls, x):
        """m copies of the embedding: its write to streams that were not there."""
        x = autocast(x)
        H = x.new_zeros(*x.shape[:-1], 4, x.shape[-1])
        return cls(H).then(x, H.new_zeros(4, 4), H.new_ones(4))

    def connect(self, W, read, gain, eps, routing_eps, together):
        *shape, m, D = self.H.shape
        T, n = math.prod(shape), W.shape[-1]
        H, y, A = self.H.reshape(T, m, D), self.y.to(self.H.dtype).reshape(T, D).contiguous(), self.A.expand(*shape, 5, 4).reshape(T, 20)
        N, x, P, q, _, _ = connect(H, y, A.contiguous(), pad(W, (0, 32 - n)), read.float(), gain, eps, routing_eps, together)
        return Streams(N.view(*shape, m, D)), x.view(*shape, D), P[:, :n].view(*shape, n), q.view(*shape, m)

    def then(self, y, A, beta):
        return Streams(self.H, y, torch.cat([A, beta.unsqueeze(-2)], -2).float())

    def finish(self):
        """The streams after the last branch, (B, T, 4, d), for the head."""
        with no_autocast(self.H):
            sources = torch.cat([self.H, self.y.unsqueeze(-2)], -2).float()
            return (self.A.mT @ sources).to(self.H.dtype)


# ---------------------------------------------------------------------------------------------------------------------
# How they join a model: twins of the methods of HC and MHC


def stream_enter(model, x):
    return Streams.enter(x) if usable(autocast(x)) else type(model.blocks[0].attn_residual).enter(x)


def stream_forward(self, streams, F):
    """HC.forward and MHC.forward; RMS(H) W is made from H W and |H|^2. The first four columns of a routing matrix are alpha's."""
    if not isinstance(streams, Streams):
        return type(self).forward(self, streams, F)
    together, d = hasattr(self, "bias"), streams.H.shape[-1]  # mHC: all streams of a token decide together
    zero, half = self.norm.weight.new_zeros(4), self.norm.weight.new_full((4,), 0.5)
    if together:
        read = torch.cat([half, self.bias[:4] / 2, half[:1], self.s[:1] / 2 if self.dynamic else zero[:1]])  # the sigmoid is a tanh
    else:
        read = torch.cat([self.alpha, zero, self.s_in.view(1) if self.dynamic else zero[:1], 2 * half[:1]])
    if not self.dynamic:
        W = zero.new_zeros(4, d, 1)
    elif together:
        W = self.W.float().view(4, d, -1)
    else:  # one matrix for each stream: blocks, which P has side by side
        W = torch.einsum("ij,dc->idcj", torch.eye(4, device=zero.device), self.W.float()).flatten(2)
    eps = 1e-6 if together else 1e-8
    streams, x, P, q = streams.connect(W, read, self.norm.weight, self.norm.eps, eps, together)
    product = None
    if self.dynamic and together:
        product = P * (q.sum(-1, keepdim=True) / (4 * d) + eps).rsqrt()
    elif self.dynamic:
        product = P.unflatten(-1, (6, 4)).mT * (q / d + eps).rsqrt().unsqueeze(-1)
    _, A, beta = self.coefficients(product)
    return streams.then(F(x), A, beta)


def stream_head(self, streams):
    return type(self).forward(self, streams.finish() if isinstance(streams, Streams) else streams)

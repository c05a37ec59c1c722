"""
What the kernels of kernels.py and kernels_hc.py move, how right they are, and, on a GPU, how long they take beside the kernels of others.

    python kernels.py [--tune]      the same as python tests/bench_kernels.py

Prints the bytes of a token, the errors against float64 and, on a GPU, the time of each rule's connections, all 2 L of them and
the head's, forward and backward, in bf16, around branches that do nothing. Written to results/kernels_<device>.json.

Beside them, in the same run and on the same work: the rule as residuals.py writes it, and the PEERS that are installed,

    pip install flash-linear-attention liger-kernel flash-attn-res

Their kernels are compiled anew for each number of sources, or each power of two, and tuned over up to 24 ways to launch them:
half an hour in all. So one or two ways are tried, and when time is up no further peer is begun; --tune tries all of them.
"""

import json
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

if __name__ == "__main__" and not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import triton
from triton.runtime.autotuner import Autotuner
from triton.testing import do_bench

import kernels
from configs import ModelConfig, one_line_mistakes, require
from kernels import PROGRAMS, group_of
from model import Transformer

SHAPES = (16, 1216), (32, 896), (70, 640)
RULES = {"fullattnres": 1, "blockattnres": 8, "mhc": None, "hc": None}
SECONDS = 210  # after which no peer is begun


def ceil_div(a, b):
    return -(-a // b)


# ---------------------------------------------------------------------------------------------------------------------
# Bytes

SCALAR_BYTES = 40  # of scores and statistics for each pair of source and mixture, forward and backward, at most


def depth_mixing_traffic(L, b=1, G=None):
    """Arrays of (T, d) that the kernels read and write, (forward, backward): test_kernels.py counts the same in the interpreter."""
    M = 2 * L + 1
    G = G or (8 if M <= 65 else 16)
    forward, backward = 0, query_gradient_reads(L, b)
    for m in range(M):
        m0, m1, n = group_of(m, M, b, G)
        adds = m > 0 and (m - 1) % b != 0
        forward += n + m1 - m0 if n and m == m0 else 0  # group_mix
        forward += 3 + adds + (n > 0) + (m - 1) // b + 1 - n  # row_mix: x, V[m], y; V[m - 1]; the partial mixture; other sources
        forward += ceil_div(M - m - 1, 128 if M > 65 else 64) if m % b == 0 else 0  # source_logits
        backward += 5 + (m1 < M if b == 1 else m + 1 < M)  # row_pull: y, dy, do, v, dx; START
        if b == 1:
            backward += m1 - 1 - m  # do of the group
            rows, mixes, more = m1 - m0, M - m1 if m == m1 - 1 else 0, False
        else:
            rows, mixes, more = m // b + 1, min(m + b, M) - m if m and not adds else 0, m + b < M
        for e in range(0, rows if mixes else 0, 16):  # pair_dot, group_pull
            k = min(16, rows - e)
            backward += 2 * mixes + k * ceil_div(mixes, 32) + k * (1 + more)
    return forward, backward


def query_gradient_reads(L, b=1):
    """Those among them that are left to matrix products: the sources, once, and in Block AttnRes the shared ones for each block."""
    M = 2 * L + 1
    return M if b == 1 else sum(m // b + 1 for m in range(1, M, b))


def depth_mixing_bytes(L, d, b=1, T=16384):
    """Bytes of a token, forward and backward, in bf16; T tokens share the sums of the row kernels, two for each mixture."""
    scores = sum((m - 1) // b + 2 for m in range(2 * L + 1))
    sums = (2 * L + 1) * 2 * 2 * 4 * d * PROGRAMS / T
    return sum(depth_mixing_traffic(L, b)) * 2 * d + SCALAR_BYTES * scores + sums


# Arrays of (T, d) that one connection of four streams moves between memory and chip, (forward, backward): H, f in, N, x out; H, f, DN,
# DX in, DH, DF out, and N once more for the gradient of W. A program passes over its 16 tokens twice; what it reads again is in the cache
# if that holds the tiles of all programs in flight, and has to come from memory if not.
CONNECTOR_TRAFFIC = 10, 19
CONNECTOR_REREADS = 4, 6


def hyper_connection_bytes(L, d, cached=True):
    """Bytes of a token, forward and backward, in bf16, with the sums of DGAIN; without those of the routing's 24 numbers."""
    arrays = sum(CONNECTOR_TRAFFIC) + (0 if cached else sum(CONNECTOR_REREADS))
    return 2 * L * (arrays * 2 * d + 2 * 4 * d / 16)


def least_bytes(rule, L, d):
    """What the kernels of a rule move, of a token, forward and backward."""
    if "attnres" not in rule:
        return hyper_connection_bytes(L, d)
    return depth_mixing_bytes(L, d, 1 if rule == "fullattnres" else ceil_div(2 * L, RULES[rule]))


def megabytes():
    """{rule: {shape: MB of a token, forward and backward, in bf16}}"""
    table = {rule: {f"{L}x{d}": least_bytes(rule, L, d) / 1e6 for L, d in SHAPES} for rule in RULES}
    return table | {"hc, mhc uncached": {f"{L}x{d}": hyper_connection_bytes(L, d, cached=False) / 1e6 for L, d in SHAPES}}


# ---------------------------------------------------------------------------------------------------------------------
# Errors


def check(rule, dtype, device, n_layer=3, d_model=64, T=6):
    """Relative errors of a model's logits and of its gradients against the model as written, in float64."""
    torch.manual_seed(0)
    cfg = ModelConfig(residual=rule, n_layer=n_layer, d_model=d_model, n_head=2, vocab_size=32, seq_len=T)
    exact = Transformer(cfg)
    move_off(exact)
    fast = Transformer(cfg)
    fast.load_state_dict(exact.state_dict())
    exact, fast, tokens = exact.to(device).double(), fast.to(device), torch.arange(2 * T, device=device).view(2, T)
    problem = kernels.accelerate(fast, "triton")
    if problem:
        raise RuntimeError(problem)
    y = exact(tokens)
    with torch.autocast(device, torch.bfloat16, enabled=dtype == torch.bfloat16):
        z = fast(tokens)
    g = torch.randn_like(y)
    y.backward(g)
    z.backward(g.to(z.dtype))
    a, b = (torch.cat([p.grad.double().flatten() for p in m.parameters() if p.grad is not None]) for m in (fast, exact))
    return error(z, y), error(a, b)


def error(a, b):
    return ((a.double() - b).norm() / b.norm()).item()


@torch.no_grad()
def move_off(model):
    """Away from where it starts, at which queries and routing matrices are zero."""
    for p in model.parameters():
        p.mul_(0.5).add_(0.3 * torch.randn_like(p))


# ---------------------------------------------------------------------------------------------------------------------
# The connections alone, on our kernels and on those of others


def stack(rule, L, d, device="cuda"):
    """A model whose branches are next to nothing, away from where it starts."""
    with torch.device(device):
        model = Transformer(ModelConfig(residual=rule, n_layer=L, d_model=d, n_head=d // 32, ff_ratio=0.01, vocab_size=8))
    move_off(model)
    return model


def ours(model):
    """x (1, T, d) -> what the head reads, by all connections around branches that do nothing."""

    def forward(x):
        h = model.enter(x)
        for residual, _ in model.branches():
            h = residual(h, torch.clone)
        return model.reader(h)

    return forward


def fla(model):
    """fused_attnres of flash-linear-attention, for Full and Block AttnRes: it mixes a list of tensors, and norms the mixture."""
    from fla.ops.attnres import fused_attnres

    first, *readers = readers_of(model)
    norm, b = first.norm.bfloat16(), model.blocks[0].attn_residual.b
    weights = [[p.detach().bfloat16().requires_grad_() for p in (r.mixture.w, r.mixture.gain, r.norm.weight)] for r in readers]

    def forward(x):
        v, y = [x], norm(x)
        for k, (w, gain, out) in enumerate(weights):
            v = v + [y.clone()] if k % b == 0 else v[:-1] + [v[-1] + y]
            y = fused_attnres(w, v, gain, output_rms_weight=out, rms_eps=model.reader.norm.eps)
        return y

    return forward


def flash_attn_res(model):
    """BlockAttentionResiduals of flash-attn-res: the whole stack, forward and backward, as one function of its branches."""
    from flash_attn_res.experimental.autograd import BlockAttentionResiduals

    first, *readers = readers_of(model)
    queries = torch.stack([torch.zeros_like(first.norm.weight), *(r.mixture.w * r.mixture.gain for r in readers)])
    queries, eps, b = queries.detach().bfloat16().requires_grad_(), model.reader.norm.eps, model.blocks[0].attn_residual.b
    *norms, head = [r.norm.bfloat16() for r in (first, *readers)]

    def forward(x):
        return head(BlockAttentionResiduals.apply(x, queries, norms, b, eps, *(norm.weight for norm in norms)))

    return forward


def liger(model):
    """LigerMHC of liger-kernel, a module for each connection: its matrix is [destination, source], its columns alpha, beta, A."""
    from liger_kernel.transformers.mhc import LigerMHC

    connections, d = [residual for residual, _ in model.branches()], model.head.in_features
    modules = [LigerMHC(residual.norm.bfloat16(), hc=4, c=d, phi_dtype=torch.bfloat16) for residual in connections]
    head, at = model.reader.norm.bfloat16(), torch.arange(24)
    columns = torch.cat([at[:4], at[20:], at[4:20].view(4, 4).T.flatten()])
    with torch.no_grad():
        for module, residual in zip(modules, connections):
            module.phi.copy_(residual.W[:, columns])
            module.b.copy_(residual.bias[columns])
            for alpha, s in zip((module.alpha_pre, module.alpha_res, module.alpha_post), residual.s):
                alpha.copy_(s)

    def forward(x):
        H = x.unsqueeze(-2).expand(*x.shape[:-1], 4, d)
        for module in modules:
            H = module(H)
        return head(H.mean(-2))

    return forward


def readers_of(model):
    return [residual.reader for residual, _ in model.branches()] + [model.reader]


PEERS = {  # which rules each has, at which width near d, and how many configurations of a kernel are tried unless all are
    liger: (["mhc"], lambda d: d, 1),
    fla: (["fullattnres", "blockattnres"], lambda d: d, 2),
    flash_attn_res: (["blockattnres"], triton.next_power_of_2, 1),
}


def tune_over(n, package):
    """Let the autotuned kernels of a package try n of their configurations. Those of 1 or 2 warps may take a minute to compile."""
    for name, module in list(sys.modules.items()):
        for part in vars(module).values() if name.split(".")[0] == package else ():
            if isinstance(part, Autotuner) and len(part.configs) > n:
                large = [config for config in part.configs if config.num_warps >= 4]
                part.configs = large[:: ceil_div(len(large), n)]


# ---------------------------------------------------------------------------------------------------------------------
# python kernels.py


def milliseconds(f):
    return do_bench(f, warmup=50, rep=300, return_mode="median")


def time_of(forward, T, d, autocast=False):
    """ms of forward and backward."""
    x = torch.randn(1, T, d, dtype=torch.bfloat16, device="cuda", requires_grad=True)

    def step():
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            y = forward(x)
        y.float().sum().backward()

    return milliseconds(step)


def beside(peer, rule, L, d, T, tune, device="cuda"):
    """A peer on the same work: the width it took, its time and the error of its output; or a word on why there is none."""
    _, width, tries = PEERS[peer]
    model, d = stack(rule, L, width(d), device), width(d)
    x = torch.randn(1, T, d, dtype=torch.bfloat16, device=device)
    with torch.no_grad():
        exact = ours(model)(x.float()).double()
    try:
        forward = peer(model)
        if not tune:
            tune_over(tries, peer.__name__)
        off = error(forward(x).detach(), exact)
        return {"d": d, "us_per_token": time_of(forward, T, d) / T * 1e3, "error": off}
    except ImportError:
        return "not installed"
    except Exception as problem:  # theirs, and no reason to lose the rest
        return f"failed: {type(problem).__name__}: {problem}".splitlines()[0]


def rates():
    """GB/s of a copy and TFLOP/s of a matrix product."""
    a = torch.empty(1 << 30, dtype=torch.int8, device="cuda")
    x = torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda")
    return 2 * a.nbytes / milliseconds(a.clone) * 1e-6, 2 * 8192**3 / milliseconds(lambda: x @ x) * 1e-9


def benchmark(tune):
    """Prints a line for each measurement, and returns them by rule and shape. Shares are of the copy rate measured in the same run."""
    start, rows, T = time.monotonic(), {}, 8192
    copy, matmul = rates()
    print(f"copy {copy:.0f} GB/s, bf16 matmul {matmul:.0f} TFLOP/s")
    for L, d in SHAPES:
        for rule in RULES:
            model = stack(rule, L, d)
            T_reference = 1024  # as written, the list of sources and its gradients would not fit with more
            reference = time_of(ours(model), T_reference, d, autocast=True) * T / T_reference
            kernels.accelerate(model, "triton")
            ms = time_of(ours(model), T, d, autocast=True)
            share = least_bytes(rule, L, d) * T / ms * 1e-6 / copy
            row = {"rule": rule, "L": L, "d": d, "us_per_token": ms / T * 1e3, "share_of_copy": share, "reference_over_it": reference / ms}
            rows[rule, L] = row
            print(line(row), flush=True)
    for peer, (rules, *_) in PEERS.items():
        for (rule, L), row in rows.items():
            if rule in rules:
                late = not tune and time.monotonic() - start > SECONDS
                found = "no time left: --tune has more" if late else beside(peer, rule, L, row["d"], T, tune)
                if not isinstance(found, str):
                    found["over_it"] = found.pop("us_per_token") / row["us_per_token"]
                row[peer.__name__] = found
                print(f"{peer.__name__} {rule} L {L}: {found if isinstance(found, str) else line(found)}", flush=True)
    return [{"copy_GBs": copy, "matmul_TFLOPs": matmul}, *rows.values()]


def line(row):
    return " ".join(f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items())


def main(tune):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    name = torch.cuda.get_device_name().replace(" ", "-") if device == "cuda" else "cpu"
    table = megabytes()
    print("MB of a token, forward and backward, in bf16\n" + " " * 18 + "".join(f"{f'L={L} d={d}':>15}" for L, d in SHAPES))
    print("\n".join(f"{rule:18}" + "".join(f"{value:15.2f}" for value in row.values()) for rule, row in table.items()))
    results = {"device": name, "torch": torch.__version__, "triton": triton.__version__, "MB_per_token": table, "errors": {}}
    for rule in RULES:
        for dtype in torch.float32, torch.bfloat16:
            checked = rule if rule != "blockattnres" else "blockattnres:n_blocks=3"  # of the six branches of the check
            results["errors"][f"{rule} {str(dtype)[6:]}"] = errors = check(checked, dtype, device)
            print(f"{rule:14} {str(dtype)[6:]:9} error of the logits {errors[0]:.1e}, of the gradients {errors[1]:.1e}", flush=True)
    if device == "cuda":
        results["benchmark"] = benchmark(tune)
    else:
        print("no GPU here: the kernels ran in Triton's interpreter, and nothing was timed")
    path = Path("results") / f"kernels_{name}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(results, indent=1) + "\n")
    print(f"written to {path}")


if __name__ == "__main__":
    with one_line_mistakes():
        require(sys.argv[1:] in ([], ["--tune"]), f"{' '.join(sys.argv[1:])}: the only option is --tune: peers try all they have")
        main("--tune" in sys.argv[1:])

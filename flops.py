"""
What a model costs: parameters, FLOPs, KV cache, activation memory and memory traffic, in closed form.

    python flops.py --L 70 --d 640                              every rule at one shape
    python flops.py configs/400m_hc_L24.py configs/200m*.py     the runs that these files describe
    python flops.py --match=flops --to=configs/400m_preln_L24.py --residual=hc     a width for a fair comparison
    python flops.py --figure=11 [--measure]                     Figure 11

The formulas are those of Appendix D of DepthBench (arXiv:2609.32534), and for the rules it leaves out the same convention:
a multiply-add is two FLOPs; matrix products, attention and the weighted sums of the residual connections count; norms,
softmax, gains and other elementwise functions do not. The arguments of a formula are the appendix's letters:

    T       tokens in a sequence                      V          rows of the vocabulary
    L, d    layers and width                          d_ff       width of the feed-forward
    H       query heads                               d_kv       width of all keys of a token; d without grouped queries
    m       streams of HC and mHC                     b          branches in a block of Block AttnRes, of n_blocks in all

Everything here is arithmetic: no torch, unless --measure asks for a run. tests/test_flops.py counts what the model does.
"""

import argparse
import ast
import csv
import inspect
import itertools
import json
import math
import re
import sys
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

from configs import Mistake, ModelConfig, load, one_line_mistakes, require, rule_option, split_rule, suggest

BF16, FP32 = 2, 4  # bytes
A100 = 312e12  # bf16 FLOP/s of NVIDIA's A100
MFU = 0.4  # share of it that a training run may reach


# ---------------------------------------------------------------------------------------------------------------------
# The Pre-LN Transformer


def preln_params(L, d, d_ff, d_kv):
    """L (2 d^2 + 2 d d_kv + 3 d d_ff + 2 d) + d: projections, feed-forward, two gains a layer and the last gain"""
    return L * (2 * d**2 + 2 * d * d_kv + 3 * d * d_ff + 2 * d) + d


def ends_params(d, V):
    """2 V d: embedding and head, which the paper's backbone size leaves out"""
    return 2 * V * d


def layers_flops(T, L, d, d_ff, d_kv):
    """L (8 T d^2 + 6 T d d_ff), where grouped queries make 4 T d^2 + 4 T d d_kv of the 8 T d^2"""
    return L * (4 * T * d**2 + 4 * T * d * d_kv + 6 * T * d * d_ff)


def attention_flops(T, L, d, causal):
    """L 2 T^2 d under causal attention, L 4 T^2 d where all pairs are computed"""
    return L * (2 if causal else 4) * T**2 * d


def head_flops(T, d, V, last):
    """2 T d V for logits at all positions, 2 d V for the last position alone"""
    return 2 * d * V if last else 2 * T * d * V


def kv_cache(T, L, d_kv):
    """2 T L d_kv values in bf16, whatever the rule: depth states and MoDA's slots serve their own token only"""
    return 2 * T * L * d_kv * BF16


def branches_saved(L, d, d_ff, d_kv, H):
    """L (2 d + 2 d_kv + 4 d_ff) values and L H log-sum-exps: q, k, v and what attention returns; gate, silu, up, product"""
    return L * (2 * d + 2 * d_kv + 4 * d_ff) * BF16 + L * H * FP32


# ---------------------------------------------------------------------------------------------------------------------
# Parameters that a rule adds to Pre-LN's


def nothing():
    """0"""
    return 0


def gains(L, d):
    """2 L d: one more gain for every branch"""
    return 2 * L * d


def keel_params(L, d):
    """(2 L - 1) d: a second norm for all branches but the first"""
    return (2 * L - 1) * d


def layerrope_params(L, d, rotate, magnitude, shared):
    """4 d + 16 in place of 2 L d: a gain, two scalars for magnitude and two for rotation at each of four sites"""
    return 4 * (d if shared else L * d) + 8 * (rotate + magnitude) - 2 * L * d


def rezero_params(L, d):
    """2 L - 2 L d: a scalar for every branch in place of its norm"""
    return 2 * L - 2 * L * d


def hc_params(L, d, m, dynamic):
    """2 L [m (m+1) + m + dynamic (d (m+1) + d + 2)]: static weights, projections, two scalars"""
    return 2 * L * (m * (m + 1) + m + dynamic * (d * (m + 1) + d + 2))


def mhc_params(L, d, m, dynamic, constraint):
    """2 L [dynamic (m d (m^2 + 2m) + 3) + m^2 + 2m]: projection, three scalars, biases; an identity needs no m^2 logits"""
    logits = 2 * m if constraint == "identity" else m**2 + 2 * m
    return 2 * L * (dynamic * (m * d * logits + 3) + logits)


def attnres_params(L, d):
    """(2 L - 1) 2 d + 2 d = 4 L d: query and key gain of all branches but the first, and of the head"""
    return 4 * L * d


def moda_params(L, d, d_kv):
    """(L - 1) 2 d d_kv: keys and values of every feed-forward but the last"""
    return (L - 1) * 2 * d * d_kv


def denseformer_params(L):
    """sum_{l=1}^L (l + 1) = L (L + 3) / 2: a weight for each earlier state and the newest"""
    return L * (L + 3) // 2


# ---------------------------------------------------------------------------------------------------------------------
# Forward FLOPs that a rule adds to Pre-LN's


def hc_flops(T, L, d, m, dynamic):
    """2 L [2 T m d (m+1) + 2 T m d + 2 T m (m+1) d + 2 T m d], 192 T d L at m = 4: two projections, read and mix, write"""
    project = 2 * T * m * d * (m + 1) + 2 * T * m * d
    return 2 * L * (dynamic * project + 2 * T * m * (m + 1) * d + 2 * T * m * d)


def mhc_flops(T, L, d, m, dynamic, constraint):
    """2 L [2 T m d (m^2 + 2m) + 2 T m d + 2 T m^2 d + 2 T m d], 480 T d L at m = 4: projection, read, mix, write"""
    logits = 2 * m if constraint == "identity" else m**2 + 2 * m
    return 2 * L * (dynamic * 2 * T * m * d * logits + 2 * T * m * d + 2 * T * m**2 * d + 2 * T * m * d)


def full_flops(T, L, d):
    """4 T d sum_{n=2}^{2L+1} n = 4 T d L (2L + 3)"""
    return 4 * T * d * L * (2 * L + 3)


def full_approximation(T, L, d):
    """8 T d L^2, the paper's"""
    return 8 * T * d * L**2


def block_flops(T, L, d, b):
    """4 T d sum_{k=1}^{2L} (2 + floor((k-1) / b)),  b = ceil(2L / n_blocks); k = 2L is the head    the authors' code"""
    return 4 * T * d * sum(2 + (k - 1) // b for k in range(1, 2 * L + 1))


def block_flops_of_the_paper(T, L, d, n_blocks):
    """4 T d [sum_{k=1}^{2L-1} (2 + floor(k / b)) + n_blocks + 1],  b = 2L / n_blocks            Appendix D"""
    return 4 * T * d * (sum(2 + k * n_blocks // (2 * L) for k in range(1, 2 * L)) + n_blocks + 1)


def moda_flops(T, L, d, d_kv):
    """(L - 1) 4 T d d_kv + 4 T d sum_{l=0}^{L-1} 2l: keys and values of feed-forwards; attention over 2l depth slots"""
    return (L - 1) * 4 * T * d * d_kv + 4 * T * d * L * (L - 1)


def denseformer_flops(T, L, d):
    """2 T d sum_{l=1}^L (l + 1) = T d L (L + 3): a weighted sum after every layer, its weights the same for all tokens"""
    return T * d * L * (L + 3)


# ---------------------------------------------------------------------------------------------------------------------
# Elementwise FLOPs of a training token, outside the appendix's convention: gains and factors, norms' gains among them, over
# those of Pre-LN. One that is learned is 1 FLOP forward and 3 backward (its input's gradient 1, its own 2), a constant 1 and 1.


def learned_gains(L, d):
    """4 * 2 L d = 8 L d: a gain for every branch"""
    return 8 * L * d


def deepnorm_elementwise(L, d):
    """2 * 2 L d = 4 L d: a factor for every branch"""
    return 4 * L * d


def lns_elementwise(L, d, at):
    """2 * 2 (L - 1) d: a factor for every branch but the first layer's, which is 1; half of them at attention alone"""
    return (4 if at == "both" else 2) * (L - 1) * d


def keel_elementwise(L, d):
    """4 (2L - 1) d + 2 (2L - 2) d: a gain for all branches but the first, a factor for all but the first two"""
    return 4 * (2 * L - 1) * d + 2 * (2 * L - 2) * d


# ---------------------------------------------------------------------------------------------------------------------
# What the connections keep for the backward pass, bytes of a token, with kernels that recompute what is cheap


def saved(vectors):
    """2 L vectors of d values in bf16 for each thing that a connection keeps"""
    return lambda L, d: 2 * L * vectors * d * BF16


def streams_saved(L, d, m):
    """2 L (m + 2) d values: the streams, what the branch reads and returns"""
    return 2 * L * (m + 2) * d * BF16


def full_saved(L, d):
    """(4L + 1) d values: the sources and what each of 2L mixtures gives; a logit for each pair and 4 scalars a mixture"""
    return (4 * L + 1) * d * BF16 + FP32 * (L * (2 * L + 3) + 3 * 2 * L + (2 * L + 1))


def block_saved(L, d, b):
    """4 L d values: the running sums and the mixtures; logits and scalars as in Full AttnRes"""
    pairs = sum(2 + (k - 1) // b for k in range(1, 2 * L + 1))
    return 4 * L * d * BF16 + FP32 * (pairs + 3 * 2 * L + (2 * L + 1))


def moda_saved(L, d, d_kv):
    """Pre-LN's 4 L d values, and the keys before rotation and the feed-forwards' keys and values of L - 1 layers"""
    return (4 * L * d + (L - 1) * 3 * d_kv) * BF16


def denseformer_saved(L, d):
    """Pre-LN's 4 L d values, and the L states that are averaged"""
    return 5 * L * d * BF16


# ---------------------------------------------------------------------------------------------------------------------
# Bytes of memory that the connections read and write for one token of a training step: forward, backward. A unit is one
# vector of d values in bf16. Those of the one-stream rules suppose one kernel for each norm and each addition: a norm 2
# forward and 5 backward (gradient of its input 3, of its gain 2), an addition 3 and 3, a learned gain on a branch's output 0
# and 3 (fused with the addition), a constant factor nothing.


def traffic(forward, backward):
    """2 L connections, so many vectors each way for each"""
    return lambda L, d: (2 * L * forward * d * BF16, 2 * L * backward * d * BF16)


def keel_traffic(L, d):
    """Sandwich-LN's 7 and 13 vectors for all branches but the first, which has Pre-LN's 5 and 8"""
    return (2 * L * 7 - 2) * d * BF16, (2 * L * 13 - 5) * d * BF16


def streams_traffic(L, d, m):
    """2 L (2 m + 2) and 2 L (3 m + 3) vectors: one fused kernel from a branch's output to the next one's input"""
    return 2 * L * (2 * m + 2) * d * BF16, 2 * L * (3 * m + 3) * d * BF16


def full_traffic(L, d):
    """Mixtures computed in groups of g, which read the sources before the group once for all of them; the best g each way"""
    n, M = L * (2 * L + 3), 2 * L  # pairs of mixture and source, mixtures
    sizes = [grouped(M, g) for g in range(1, min(M, 32) + 1)]
    forward, backward = min(f for f, _ in sizes), min(b for _, b in sizes)
    return forward * d * BF16 + 3 * FP32 * n, backward * d * BF16 + 7 * FP32 * n


def grouped(M, g):
    """Vectors moved forward and backward by M mixtures, mixture i of i + 1 sources, in groups of g."""
    forward = backward = M + 1  # the logits read each source, and its gradient is written, once
    for start in range(0, M, g):
        size = min(g, M - start)
        later = M - start - size
        inside = size * (size - 1) // 2
        forward += (start + 1 + 2 * size if start else size) + inside + size + size  # earlier sources, partial sums; own; result
        backward += (2 * later + 2 * size + size if later else 0) + 8 * size + inside + (0 if start else size)
    return forward, backward


def block_traffic(L, d, b):
    """Two phases: the finished blocks once for all mixtures of a block, then each mixture adds the running sum"""
    n_blocks = -(-2 * L // b)
    forward, backward = n_blocks + 2, 3 * n_blocks + 6  # the head
    for block in range(n_blocks):
        size = len(range(max(1, block * b), min(2 * L, (block + 1) * b)))
        forward += 1 + block + 6 * size
        backward += 3 * (1 + block) + 8 * size
    return forward * d * BF16, backward * d * BF16


# ---------------------------------------------------------------------------------------------------------------------
# Which formulas are a rule's, and which options it has: the default, or all choices with the default first


Cost = namedtuple("Cost", "params flops elementwise saved traffic options paper", defaults=({}, None))

COSTS = {
    "preln": Cost(nothing, nothing, nothing, saved(2), traffic(5, 8), {}, nothing),
    "postln": Cost(nothing, nothing, nothing, saved(2), traffic(5, 8)),
    "sandwichln": Cost(gains, nothing, learned_gains, saved(3), traffic(7, 13)),
    "lns": Cost(nothing, nothing, lns_elementwise, saved(2), traffic(5, 8), {"at": ("both", "attention", "feedforward")}),
    "deepnorm": Cost(nothing, nothing, deepnorm_elementwise, saved(2), traffic(5, 8)),
    "keel": Cost(keel_params, nothing, keel_elementwise, saved(3), keel_traffic),
    "layerrope": Cost(
        layerrope_params, nothing, learned_gains, saved(3), traffic(5, 11),
        {"rotate": True, "magnitude": True, "shared": True, "backbone": ("pre", "peri")},
    ),
    "hc": Cost(hc_params, hc_flops, nothing, streams_saved, streams_traffic, {"m": 4, "dynamic": True}, hc_flops),
    "mhc": Cost(
        mhc_params, mhc_flops, nothing, streams_saved, streams_traffic,
        {"m": 4, "dynamic": True, "iterations": 20, "init": ("gap8", "uniform"), "constraint": ("doubly", "row", "identity", "free")},
        mhc_flops,
    ),
    "fullattnres": Cost(attnres_params, full_flops, nothing, full_saved, full_traffic, {"eps": 1e-5}, full_approximation),
    "blockattnres": Cost(
        attnres_params, block_flops, nothing, block_saved, block_traffic, {"eps": 1e-5, "n_blocks": 8}, block_flops_of_the_paper
    ),
    "moda": Cost(moda_params, moda_flops, nothing, moda_saved, None, {"post": False}),
    "mixln": Cost(nothing, nothing, nothing, saved(2), traffic(5, 8)),
    "rezero": Cost(rezero_params, nothing, nothing, saved(2), traffic(3, 6)),
    "layerscale": Cost(gains, nothing, learned_gains, saved(3), traffic(5, 11)),
    "denseformer": Cost(denseformer_params, denseformer_flops, nothing, denseformer_saved, None),
}  # fmt: skip
STUDIED = "preln", "fullattnres", "blockattnres", "hc", "mhc"  # whose traffic was derived kernel by kernel


def letters(cfg, T=None, logits="all", attention="causal"):
    """The value of each letter for a model, and the formulas of its rule. Raises Mistake for a rule or option without any."""
    rule, options = split_residual(cfg.residual)
    value = dict(T=T or cfg.seq_len, L=cfg.n_layer, d=cfg.d_model, d_ff=cfg.d_ff, d_kv=cfg.kv_heads * cfg.d_head, H=cfg.n_head)
    value |= dict(V=cfg.vocab_size, last=logits == "last", causal=attention == "causal", **options)
    if "n_blocks" in value:
        value["b"] = math.ceil(2 * cfg.n_layer / value["n_blocks"])
    return value, COSTS[rule]


def split_residual(residual):
    """'hc:m=2' -> ('hc', {'m': 2, 'dynamic': True}), the defaults filled in"""
    rule, texts = split_rule(residual)
    if rule not in COSTS:
        raise Mistake(f"flops.py has no formulas for residual rule {rule!r}: give it a line in COSTS there{suggest(rule, COSTS)}")
    known = COSTS[rule].options
    options = {key: default[0] if isinstance(default, tuple) else default for key, default in known.items()}
    for key, text in texts.items():
        if key not in known:
            has = f"it knows {', '.join(known)}" if known else "it has none"
            raise Mistake(f"flops.py does not know what option {key!r} of {rule} costs{suggest(key, known)} ({has})")
        kind = known[key] if isinstance(known[key], tuple) else type(known[key])
        options[key] = rule_option(f"{rule}:{key}", text, kind, options[key])
    return rule, options


def fill(formula, value):
    """What a formula gives when the letters, its arguments, have these values."""
    return formula(*(value[letter] for letter in inspect.signature(formula).parameters))


# ---------------------------------------------------------------------------------------------------------------------
# What other files ask


def params(cfg):
    """Parameters: {"total", "backbone": without embedding and head, as the paper counts it, "residual": what the rule adds}"""
    value, cost = letters(cfg)
    residual = fill(cost.params, value)
    backbone = fill(preln_params, value) + residual
    return {"total": backbone + fill(ends_params, value), "backbone": backbone, "residual": residual}


def forward_flops(cfg, T=None, logits="all", attention="causal", literal=False):
    """FLOPs of one sequence of T tokens (by default seq_len), by part. literal: grouped queries count as Appendix D has it."""
    value, cost = letters(cfg, T, logits, attention)
    layers = fill(layers_flops, value | {"d_kv": value["d"]} if literal else value)
    other = {"attention": attention_flops, "head": head_flops, "residual": cost.flops}
    return {"layers": layers} | {part: fill(formula, value) for part, formula in other.items()}


def train_flops_per_token(cfg, **counting):
    """Forward, and backward at twice its cost, for a token of a sequence of seq_len, logits at all positions"""
    return 3 * sum(forward_flops(cfg, **counting).values()) // cfg.seq_len


def train_flops(cfg):
    """Of a whole run"""
    return train_flops_per_token(cfg) * tokens(cfg)


def tokens(cfg):
    return cfg.max_steps * cfg.batch_size * cfg.seq_len


def list_runs(folder=Path(__file__).parent / "configs"):
    """All config files, grouped by the figure or table that their docstrings name, with their costs: `python train.py --list`"""
    groups = {}
    for path in sorted(Path(folder).glob("*.py"), key=by_number):
        if path.stem != "__init__":
            groups.setdefault(figure_of(path), []).append(path)
    lines = [f"{'config file':44}{'parameters':>12}{'tokens':>10}{'training FLOPs':>16}{f'hours, one A100 at {MFU:.0%} MFU':>30}"]
    for name in sorted(groups, key=lambda name: (name == "not in the paper", name)):
        lines += ["", name, *(run_line(path) for path in groups[name])]
    return "\n".join(lines)


def run_line(path):
    cfg = load(path)
    try:
        total, flops = f"{params(cfg)['total'] / 1e6:.2f}M", train_flops(cfg)
        hours = flops / (A100 * MFU) / 3600
        costs = f"{flops:16.2e}{f'{hours:,.1f}' if hours > 0.05 else '< 0.1':>30}"
    except Mistake:  # a reader's own rule
        total, costs = "n/a", f"{'n/a':>16}{'n/a':>30}"
    return f"  {'configs/' + path.name:42}{total:>12}{tokens(cfg) / 1e6:9,.0f}M{costs}"


def figure_of(path):
    """'Figure 2a', 'Figure 3, left': the first that the docstring of a config file names"""
    found = re.search(r"(Figure|Table) \d+(\w|, (left|right))?", ast.get_docstring(ast.parse(path.read_text())) or "")
    return found[0] if found else "not in the paper"


def by_number(path):
    """Sort key: 400m before 1600m, L8 before L16"""
    return [(part.isdecimal(), int(part) if part.isdecimal() else part) for part in re.split(r"(\d+)", path.stem)]


# ---------------------------------------------------------------------------------------------------------------------
# The table


def account(cfg, T=None, logits="all", attention="causal", literal=False):
    """All costs of a model in one flat dict, a row of --json and --csv."""
    value, cost = letters(cfg, T, logits, attention)
    size, flops = params(cfg), forward_flops(cfg, T, logits, attention, literal)
    connections = fill(cost.saved, value)
    forward, backward = fill(cost.traffic, value) if cost.traffic else (None, None)
    return {
        "run": getattr(cfg, "name", "") or cfg.residual,
        "residual": cfg.residual,
        **{letter: value[letter] for letter in ("L", "d", "d_ff", "H", "d_kv", "V", "T")},
        "params": size["total"],
        "params_backbone": size["backbone"],
        "params_residual": size["residual"],
        "prefill_flops": sum(flops.values()),
        **{f"prefill_flops_{part}": n for part, n in flops.items()},
        "prefill_flops_residual_paper": fill(cost.paper, value) if cost.paper else None,
        "train_flops_per_token": train_flops_per_token(cfg, attention=attention, literal=literal),
        "train_elementwise_flops_per_token": fill(cost.elementwise, value),
        "kv_cache_bytes": fill(kv_cache, value),
        "saved_bytes_per_token": fill(branches_saved, value) + connections,
        "saved_bytes_per_token_connections": connections,
        "traffic_bytes_per_token_forward": forward,
        "traffic_bytes_per_token_backward": backward,
        "traffic_by_analogy": cfg.residual.split(":")[0] not in STUDIED,
    }


def traffic_text(a):
    if a["traffic_bytes_per_token_forward"] is None:
        return "n/a"
    both = f"{a['traffic_bytes_per_token_forward'] / 1e3:.0f} + {a['traffic_bytes_per_token_backward'] / 1e3:.0f}"
    return "~" * a["traffic_by_analogy"] + both


COLUMNS = {  # heading, in two lines: what stands below
    "parameters|total": lambda a: f"{a['params'] / 1e6:.2f}M",
    "|backbone": lambda a: f"{a['params_backbone'] / 1e6:.2f}M",
    "|rule adds": lambda a: f"{a['params_residual']:,}",
    "prefill|TFLOPs": lambda a: f"{a['prefill_flops'] / 1e12:.3f}",
    "rule's|GFLOPs": lambda a: f"{a['prefill_flops_residual'] / 1e9:.2f}",
    "|share": lambda a: f"{a['prefill_flops_residual'] / a['prefill_flops']:.2%}",
    "paper's|GFLOPs": lambda a: "-" if a["prefill_flops_residual_paper"] is None else f"{a['prefill_flops_residual_paper'] / 1e9:.2f}",
    "training|GFLOPs/tok": lambda a: f"{a['train_flops_per_token'] / 1e9:.4f}",
    "element-|wise M/tok": lambda a: f"{a['train_elementwise_flops_per_token'] / 1e6:.3f}",
    "KV cache|MB": lambda a: f"{a['kv_cache_bytes'] / 1e6:.1f}",
    "saved|kB/tok": lambda a: f"{a['saved_bytes_per_token'] / 1e3:.0f}",
    "traffic|kB/tok": traffic_text,
}

LEGEND = """\
rule's     what the residual rule adds to Pre-LN, a multiply-add as two. Block AttnRes: branch k mixes 2 + floor((k-1)/b) sources,
           as in the authors' code
paper's    the same in Appendix D, where Full AttnRes is approximated by 8TdL^2 and Block AttnRes mixes 2 + floor(k/b) sources
element-   gains and factors over Pre-LN's, forward and backward; outside the appendix's convention
saved      what a training step keeps for its backward pass at the least, in bf16, without the logits
traffic    memory that the connections read and write in a training step, forward + backward; ~ by analogy with Pre-LN"""


def table(rows, logits, attention, literal):
    shapes = {tuple(a[letter] for letter in ("L", "d", "d_ff", "H", "d_kv", "V")) for a in rows}
    cells = [["", *(heading.split("|")[line] for heading in COLUMNS)] for line in (0, 1)]
    cells += [[a["residual" if len(shapes) == 1 else "run"], *(show(a) for show in COLUMNS.values())] for a in rows]
    widths = [max(map(len, column)) for column in zip(*cells)]
    where = "the last position" if logits == "last" else "all positions"
    lines = [f"Prefill of one sequence of {rows[0]['T']} tokens, {attention} attention, logits at {where}"]
    lines += ["L={}, d={}, d_ff={}, {} heads, d_kv={}, V={}".format(*shape) for shape in shapes if len(shapes) == 1]
    if literal:
        lines += ["Literal: as Appendix D counts, every query head has keys and values of its own, also where heads share them"]
    for name, *numbers in [[""], *cells]:
        lines.append((name.ljust(widths[0]) + "".join(cell.rjust(width + 2) for cell, width in zip(numbers, widths[1:]))).rstrip())
    return "\n".join([*lines, "", LEGEND])


# ---------------------------------------------------------------------------------------------------------------------
# Fair comparisons


def train_memory(cfg):
    """Bytes: 16 for a parameter (weight, gradient, two moments in float32), and what the tokens of a micro-batch keep

    These are the saved activations in bf16, and 4 V bytes a token for logits and their gradient in bf16. A lower bound: under autocast
    eager PyTorch keeps more, the stream and what norms keep being in float32; how much was not measured on a GPU.
    """
    per_token = account(cfg)["saved_bytes_per_token"] + 2 * BF16 * cfg.vocab_size
    return 16 * params(cfg)["total"] + cfg.micro_batch_size * cfg.seq_len * per_token


MEASURES = {"flops": train_flops, "params": lambda cfg: params(cfg)["total"], "memory": train_memory}


def match(cfg, target, by, free):
    """cfg with the nearest widths, or numbers of steps, that cost less than the target and that do not"""
    cost, goal = MEASURES[by], MEASURES[by](target)
    if free == "steps":
        require(by == "flops", f"--free=steps: steps do not change {by}; use --free=width or --match=flops")
        steps = goal // cost(replace(cfg, max_steps=1))
        return [replace(cfg, max_steps=n) for n in (steps, steps + 1) if n]
    grain = 2 * cfg.n_head  # heads of even width
    width = next(d for d in itertools.count(grain, grain) if cost(replace(cfg, d_model=d)) >= goal)
    return [replace(cfg, d_model=d) for d in (width - grain, width) if d]


def match_table(cfg, target, by, free):
    goal = MEASURES[by](target)
    lines = [f"{'':24}{'L':>4}{'d':>6}{'steps':>8}{'parameters':>12}{'training FLOPs':>16}{'memory':>11}{'difference in ' + by:>24}"]
    for c in dict.fromkeys([target, cfg, *match(cfg, target, by, free)]):
        sizes = f"{params(c)['total'] / 1e6:11.2f}M{train_flops(c):16.4e}{train_memory(c) / 1e9:8.1f} GB"
        lines.append(f"{c.residual:24}{c.n_layer:4}{c.d_model:6}{c.max_steps:8}{sizes}{MEASURES[by](c) / goal - 1:+24.2%}")
    return "\n".join(lines)


# ---------------------------------------------------------------------------------------------------------------------
# Figure 11

SHAPES = (16, 1216), (20, 1120), (24, 1024), (28, 960), (32, 896), (42, 800), (70, 640)
LINES = "preln", "blockattnres", "fullattnres", "hc", "mhc"


def figure11(path, T, again, device):
    """Prefill FLOPs and KV cache from the formulas, peak memory and time from the JSON file beside path, which `again` fills."""
    from matplotlib.figure import Figure

    models = {rule: [ModelConfig(residual=rule, n_layer=L, d_model=d) for L, d in SHAPES] for rule in LINES}
    results = path.with_suffix(".json")
    if again:
        measure_all([cfg for row in models.values() for cfg in row], T, device, results)
    seen = [m for m in (json.loads(results.read_text()) if results.exists() else []) if m["T"] == T]
    figure = Figure(figsize=(15, 3.8), layout="constrained")
    panels = figure.subplots(1, 4)
    for rule, row in models.items():
        rows = [account(cfg, T, logits="last") for cfg in row]
        measured = {(m["L"], m["d"]): m for m in seen if m["residual"] == rule}
        for panel, values in zip(panels, (
            [a["prefill_flops"] / 1e12 for a in rows],
            [a["kv_cache_bytes"] / 1e6 for a in rows],
            [measured[shape]["peak_bytes"] / 1e9 if shape in measured else math.nan for shape in SHAPES],
            [measured[shape]["seconds"] * 1e3 if shape in measured else math.nan for shape in SHAPES],
        )):  # fmt: skip
            panel.plot(values, ".-", label=rule)
    devices, batches = ({m[key] for m in seen} for key in ("device", "batch"))
    how = f"{', '.join(devices)}; batch {', '.join(map(str, sorted(batches)))}" if seen else "not measured yet: --measure"
    titles = (
        "TFLOPs of a sequence",
        "KV cache of a sequence, MB\n(of any rule)",
        f"Peak memory, GB\n{how}",
        f"Time of a sequence, ms\n{how}",
    )
    for panel, title in zip(panels, titles):
        panel.set_title(title, fontsize=9)
        panel.set_xticks(range(len(SHAPES)), [f"{L}\n{d}" for L, d in SHAPES])
        panel.set_xlabel("layers, width", fontsize=9)
        panel.grid(alpha=0.3)
    for panel in panels[2:] if not seen else ():
        panel.set_yticks([])
    panels[0].legend(fontsize=8)
    figure.suptitle(f"Prefill of {T} tokens, logits at the last position", fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def measure_all(models, T, device, results):
    """Measure each model in a process of its own, unless the JSON file results has it, and add it there."""
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    from tqdm import tqdm

    seen = json.loads(results.read_text()) if results.exists() else []
    done = {(m["residual"], m["L"], m["d"], m["T"]) for m in seen}
    results.parent.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as pool:
        for cfg in tqdm([cfg for cfg in models if (cfg.residual, cfg.n_layer, cfg.d_model, T) not in done], desc="prefill"):
            seen.append(pool.submit(measure, cfg, T, device).result())
            results.write_text(json.dumps(seen, indent=1))


def measure(cfg, T, device):
    """Time and peak memory of a prefill: in bf16 on a GPU, with the largest batch of 8, 4, 2, 1 that fits; in float32 on a CPU."""
    import resource
    import time

    import torch

    from model import Transformer
    from train import to_bf16

    cuda = device == "cuda" or (device == "auto" and torch.cuda.is_available())
    torch.manual_seed(0)
    with torch.device("cuda" if cuda else "cpu"):
        model = Transformer(replace(cfg, seq_len=T))
    if cuda:
        to_bf16(model)

    def prefill(tokens):
        h = model.enter(model.embed(tokens))
        for block in model.blocks:
            h = block(h)
        return model.head(model.reader(h)[:, -1:]).sum().item()  # waits for the GPU

    batch, seconds = 8 if cuda else 1, []
    while len(seconds) < 4:
        start = time.perf_counter()
        try:
            with torch.inference_mode():
                prefill(torch.randint(cfg.vocab_size, (batch, T), device=model.head.weight.device))
            seconds.append((time.perf_counter() - start) / batch)
        except torch.OutOfMemoryError:
            require(batch > 1, f"{cfg.residual} with L={cfg.n_layer} does not fit with T={T}; use a smaller --T")
            batch, seconds = batch // 2, []
    unit = 1 if sys.platform == "darwin" else 1024
    peak = torch.cuda.max_memory_allocated() if cuda else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit  # all of the process
    where = torch.cuda.get_device_name() if cuda else f"CPU, {torch.get_num_threads()} threads"
    return dict(residual=cfg.residual, L=cfg.n_layer, d=cfg.d_model, T=T, batch=batch, seconds=min(seconds), peak_bytes=peak, device=where)


# ---------------------------------------------------------------------------------------------------------------------
# Command line


class Parser(argparse.ArgumentParser):
    def error(self, message):
        found = re.match(r"unrecognized arguments: (--\w+)", message)
        raise Mistake(message + (suggest(found[1], self._option_string_actions) if found else ""))


def parse(argv):
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    option = parser.add_argument
    option("files", nargs="*", help="config files")
    option("--L", "--n_layer", type=int, metavar="24", help="layers")
    option("--d", "--d_model", type=int, metavar="1024", help="width")
    option("--d_ff", type=int, metavar="2736", help="width of the feed-forward, by default 8d/3")
    option("--n_head", type=int, metavar="16", help="query heads")
    option("--n_kv_head", type=int, metavar="16", help="key-value heads")
    option("--vocab", type=int, metavar="50280", help="rows of the vocabulary")
    option("--seq_len", type=int, metavar="2048", help="tokens of a training sequence")
    option("--T", type=int, metavar="4096", default=4096, help="tokens of the prefilled sequence")
    option("--m", type=int, metavar="4", help="streams of HC and mHC")
    option("--n_blocks", type=int, metavar="8", help="blocks of Block AttnRes")
    option("--residual", metavar="hc:m=2,moda", help="one rule or several, by default all")
    option("--logits", choices=("last", "all"), default="last", help="positions whose logits the prefill computes")
    option("--attention", choices=("causal", "dense"), default="causal", help="half of all pairs of tokens, or all")
    option("--literal", action="store_true", help="count grouped queries as Appendix D does, which has no term for them")
    option("--json", action="store_true", help="all numbers in full precision")
    option("--csv", action="store_true", help="the same as a table")
    option("--match", choices=tuple(MEASURES), help="find models that cost as much as the one of --to")
    option("--to", metavar="FILE", help="a config file")
    option("--free", choices=("width", "steps"), default="width", help="what --match may vary")
    option("--figure", type=int, choices=(11,), help="draw this figure of the paper")
    option("--measure", action="store_true", help="with --figure: run the models on this machine, where there is no formula")
    option("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where to")
    option("--out", type=Path, default=Path("results/figure11.png"), metavar="FILE", help="the figure")
    args = parser.parse_args(argv)
    for key in "T", "d_ff", "m", "n_blocks":
        require(getattr(args, key) is None or getattr(args, key) > 0, f"--{key}={getattr(args, key)} must be above 0")
    return args


def chosen(args):
    """The models that the command line names: of config files or one shape, with one rule, several, or all"""
    shape = dict(n_layer=args.L, d_model=args.d, n_head=args.n_head, n_kv_head=args.n_kv_head, vocab_size=args.vocab, seq_len=args.seq_len)
    shape = {key: value for key, value in shape.items() if value is not None}
    models = [replace(load(path), **shape) for path in args.files] or [ModelConfig(**shape)]
    if args.d_ff:
        models = [replace(cfg, ff_ratio=args.d_ff / cfg.d_model) for cfg in models]
        require(models[0].d_ff == args.d_ff, f"--d_ff={args.d_ff} must be a multiple of 16; --d_ff={models[0].d_ff} is")
    rules = args.residual.split(",") if args.residual is not None else [] if args.files else COSTS
    models = [replace(cfg, residual=rule) for cfg in models for rule in rules] or models
    return [replace(cfg, residual=cfg.residual + extra(cfg.residual, m=args.m, n_blocks=args.n_blocks)) for cfg in models]


def extra(residual, **given):
    """Those of the options that the rule has"""
    _, options = split_residual(residual)
    return "".join(f":{key}={value}" for key, value in given.items() if value and key in options)


def main(argv):
    args = parse(argv)
    if args.figure:
        figure11(args.out, args.T, args.measure, args.device)
        print(args.out)
    elif args.match:
        require(args.to, "--match needs the config file to match, as in --to=configs/400m_preln_L24.py")
        target = load(args.to)
        shape = dict(n_layer=args.L or target.n_layer, d_model=args.d or target.d_model)
        for rule in (args.residual or target.residual).split(","):
            print(match_table(replace(target, residual=rule, **shape), target, args.match, args.free))
    else:
        rows = [account(cfg, args.T, args.logits, args.attention, args.literal) for cfg in chosen(args)]
        if args.json:
            print(json.dumps(rows, indent=1))
        elif args.csv:
            writer = csv.DictWriter(sys.stdout, rows[0], lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
        else:
            print(table(rows, args.logits, args.attention, args.literal))


if __name__ == "__main__":
    with one_line_mistakes():
        main(sys.argv[1:])

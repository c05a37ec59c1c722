"""
What the layers of a trained model do: Section 4 of DepthBench (arXiv:2609.32534), and its figures across runs.

    python probe.py out/toy                                       every probe that the rule of the run has an answer to
    python probe.py out/toy --only=angular,causal                 some of them; a repeated call goes on from what is there
    python probe.py --figure=2 out/study_*                        loss against aspect ratio; 3: over scales; 12: learning rates
    python probe.py --figure=5,6,7 out/toy out/toy-preln          the probes of Figures 4 to 10 side by side
    python probe.py --compare out/toy out/toy-preln               two runs in numbers
    python probe.py --csv out/study_* > results/study.csv         runs as a table, which --figure reads, too

A probe is a class: `measure` fills a dict of arrays, `draw` makes a picture of them. They go to probe.npz, their summary to
probe.json, the pictures to PNG files, all in the folder of the run.

A network is a list of blocks, so a model that lacks a layer is another list. What the depth state means is for the rule to
say: each question goes to the connections (residuals.py), and none asks which rule it is talking to.

Notation
    z_l      depth state as one vector for each token: z_0 enters layer 0, z_L leaves the last; layers count from 0 here
    l, s     a layer, a skipped layer
    k        a branch, as in residuals.py
"""

import argparse
import csv
import hashlib
import json
import math
import re
import statistics
import sys
import time
import zipfile
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import cross_entropy, normalize

import configs
import data
import flops
import train
from configs import Mistake, require, suggest
from residuals import RULES, wide

BATCH = 4  # windows in a forward pass; no number depends on it
SEED = 42  # of the windows
TAU_CAUSAL, TAU_PERM = 0.45, 0.15  # Eqs. 6 and 8

# The authors draw offsets at random, with the same seed 42: 128 windows of 512 tokens for angles, 16 of 256 for causal scores and pruning,
# 12 of 256 for permutations, 32 of 512 for the lens. Ours are 16 windows of 512 that do not overlap, for all (--windows, --length).


# ---------------------------------------------------------------------------------------------------------------------
# A model, its depth states, and models that lack a layer


@dataclass
class Subject:
    """What is measured: a model on windows of text, tokens (n, T + 1), which say where documents end."""

    model: torch.nn.Module
    tokens: torch.Tensor
    eot: int | None = None
    folder: Path | None = None  # of the run
    tokenizer: object = None  # for the probes that bring their own text
    corpus: str = ""  # --data of the run
    examples: int = 0  # of each evaluation set; 0: all
    sources: dict = field(default_factory=dict)  # of evaluation sets, where they are not those of data.py

    def eval_set(self, task):
        examples = data.eval_set(self.sources.get(task, task))
        return examples[: self.examples] if self.examples else examples

    def batches(self, first=0):
        return [self.tokens[i : i + BATCH] for i in range(first, len(self.tokens), BATCH)]


def walk(model, tokens):
    """The depth states before the first layer, between layers, and after the last: L + 1, in the form that the rule gives them."""
    states = [model.enter(model.embed(tokens))]
    for block in model.blocks:
        states.append(block(states[-1]))
    return states


def readers(model):
    """Who reads the L + 1 depth states: the attention of each layer, and last the head."""
    return [block.attn_residual.reader for block in model.blocks] + [model.reader]


def vectors(model, states):
    """z_0 ... z_L, each (B, T, D). Streams are concatenated; of AttnRes it is the mixture, of Block AttnRes at its boundaries, and
    elsewhere its running sum."""
    return [wide(reader.vector(h)) for reader, h in zip(readers(model), states)]


def without(model, s):
    """The blocks, layer s skipped."""
    return [block.skip if l == s else block for l, block in enumerate(model.blocks)]


def loss(subject, blocks=None):
    """Mean loss of the next token, in nats, summed in float64. In the precision of the weights, without autocast, so that an amp run's
    val_loss is not quite the same; the authors cast their models to bf16."""
    total = 0.0
    for batch in subject.batches():
        logits = wide(subject.model(batch[:, :-1], blocks))
        total += cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="none").double().sum().item()
    return total / subject.tokens[:, 1:].numel()


def late_fraction(score, tau):
    """R: the share of pairs of layers in the last three quarters of the network with a score above tau (Eqs. 5 to 8)."""
    s, l = np.triu_indices(len(score), 1)
    late = score[s, l][s >= math.ceil(len(score) / 4)]
    return float((late > tau).mean()) if len(late) and np.isfinite(late).all() else math.nan


def to_numpy(x):
    return x.detach().double().cpu().numpy()


# ---------------------------------------------------------------------------------------------------------------------
# The probes


class Probe:
    """One analysis. `measure` leaves its result in the dict `out`, and goes on from what it finds there."""

    figure = ""  # of the paper
    panels = 1
    default = True  # runs if none is named

    @classmethod
    def measure(cls, subject, out):
        """Yields the share that is done, whenever `out` is worth keeping. By default: the mean over tokens of `batch`.

        Raises NotImplementedError if the rule has no answer.
        """
        n, done = len(subject.tokens), int(out.get("windows", 0))
        for batch in subject.batches(done):
            new = {name: to_numpy(value) for name, value in cls.batch(subject.model, batch[:, :-1], batch[:, 1:]).items()}
            done += len(batch)
            merged = cls.merge(out, new, len(batch) / done) if "windows" in out else new
            out.update(merged | {"windows": np.array(done)})  # at once, as an interrupt may come at any moment
            yield done / n

    @staticmethod
    def merge(old, new, share):
        """The means over the tokens of both, of which `share` are new."""
        return {name: old[name] + share * (value - old[name]) for name, value in new.items()}

    @staticmethod
    def batch(model, tokens, targets):
        """{name: mean over the tokens}"""

    @staticmethod
    def lacks(out):
        """Whether a finished measurement has gaps that another call may fill."""
        return False

    @staticmethod
    def settings(subject):
        """What else than the weights and the data the result depends on."""
        return {"windows": len(subject.tokens), "length": subject.tokens.shape[1] - 1}

    @staticmethod
    def summary(out):
        """{name: number} for probe.json and the terminal."""
        return {}

    @staticmethod
    def draw(axes, out):
        """Draw the result on a list of `panels` axes."""


class Angular(Probe):
    """d(z_i, z_j) = arccos(cos(z_i, z_j)) / pi, the mean over tokens of the angles (Eq. 2, Figure 5)."""

    figure = "5"

    @staticmethod
    def batch(model, tokens, targets):
        z = torch.stack(vectors(model, walk(model, tokens)))  # (L + 1, B, T, D)
        total = 0
        for window in z.unbind(1):  # one at a time, as they are large in float64
            window = normalize(window.double(), dim=-1)
            total = total + torch.einsum("itd,jtd->ijt", window, window).clamp(-1, 1).arccos().mean(-1) / math.pi
        return {"distance": total.fill_diagonal_(0) / z.shape[1]}

    @staticmethod
    def summary(out):
        steps = np.diagonal(out["distance"], 1)
        return {"angle_first": steps[0], "angle_late": steps[math.ceil(len(steps) / 4) :].mean()}

    @staticmethod
    def draw(axes, out):
        distance = out["distance"]
        L = len(distance) - 1
        layout = np.full((L, L), np.nan)  # row n - 1, column l: d(z_l, z_{l+n})
        for n in range(1, L + 1):
            layout[n - 1, : L + 1 - n] = np.diagonal(distance, n)
        heat(axes[0], layout, "viridis_r", "angular distance", low=0)
        axes[0].set(xlabel="layer l", ylabel="n layers later")
        whole_ticks(axes[0].yaxis, L, first=1)
        axes[0].set_title("d(z_l, z_l+n)", fontsize=9)


class Pairs(Probe):
    """A score of pairs of layers, (L, L), and R, the share of late pairs whose score is above tau."""

    figure = "6"

    @classmethod
    def summary(cls, out):
        return {cls.R: late_fraction(out["score"], cls.tau)}

    @classmethod
    def draw(cls, axes, out):
        score = upper(out["score"])
        darkest = np.nanpercentile(score, cls.darkest) if np.isfinite(score).any() else 1
        heat(axes[0], score, "magma_r", f"{cls.__name__.lower()} score", low=0, high=darkest)
        axes[0].set(xlabel=cls.column, ylabel=cls.row)
        axes[0].set_title(share_text(cls.R, out["score"], cls.tau), fontsize=9)


class Causal(Pairs):
    """C(s, l) = |u_l - u_l without layer s| / |u_l|,   u_l = z_{l+1} - z_l, the mean over tokens of the ratios (Eq. 3, Figure 6b)."""

    R, tau, darkest = "R_causal", TAU_CAUSAL, 99
    row, column = "skipped layer s", "layer l"

    @staticmethod
    def batch(model, tokens, targets):
        L = len(model.blocks)
        states = walk(model, tokens)
        z = vectors(model, states)
        updates = [after - before for before, after in zip(z, z[1:])]
        score = torch.zeros(L, L, dtype=torch.float64)
        for s in range(L - 1):
            rest = [model.blocks[s].skip(states[s])]
            for block in model.blocks[s + 1 :]:
                rest.append(block(rest[-1]))
            z = [wide(reader.vector(h)) for reader, h in zip(readers(model)[s + 1 :], rest)]
            for l in range(s + 1, L):
                change = (z[l - s] - z[l - s - 1] - updates[l]).norm(dim=-1)
                score[s, l] = (change / updates[l].norm(dim=-1).clamp(min=1e-8)).double().mean()
        return {"score": score}


class Permutation(Pairs):
    """P(i, j) = |loss with layers i and j exchanged - loss| / loss (Eq. 4, Figure 6d)."""

    R, tau, darkest = "R_perm", TAU_PERM, 95
    row, column = "layer i", "layer j"

    @classmethod
    def measure(cls, subject, out):
        model = subject.model
        L = len(model.blocks)
        if "score" not in out:
            out["base"] = np.array(loss(subject))
            out["score"] = np.where(np.triu(np.ones((L, L)), 1), np.nan, 0)
        for i, j in zip(*np.nonzero(np.isnan(out["score"]))):
            model.swap(model, i, j)
            try:
                swapped = loss(subject)
            finally:
                model.swap(model, i, j)
            out["score"][i, j] = abs(swapped - out["base"]) / out["base"]
            yield 1 - np.isnan(out["score"]).sum() / (L * (L - 1) / 2)


class Paths(Probe):
    """w(i -> k) = beta_{i-1}^T A_i ... A_{k-1} alpha_k: the weight of source i in what branch k reads, before its norm (Figure 7).

    Source 0 is the embedding, which enters every slot with weight 1, source i the output of branch i - 1. `spread` is the standard
    deviation over tokens.
    """

    figure = "7"

    @classmethod
    def measure(cls, subject, out):
        yield from super().measure(subject, out)
        out["spread"] = np.sqrt(out["variance"])

    @staticmethod
    def merge(old, new, share):
        merged = Probe.merge(old, new, share)
        between = share * (1 - share) * (new["weight"] - old["weight"]) ** 2
        return merged | {"variance": merged["variance"] + between}

    @staticmethod
    def batch(model, tokens, targets):
        h = model.enter(model.embed(tokens))
        n = 2 * len(model.blocks)
        mean, variance = torch.zeros(2, n, n, dtype=torch.float64)
        paths = None  # (sources, B, T, slots): how much of each source is in each slot of the depth state
        for k, (residual, F) in enumerate(model.branches()):
            alpha, A, beta = (c.double() for c in residual.route(h))
            if paths is None:
                paths = alpha.new_ones(1, *tokens.shape, A.shape[-2])  # the embedding enters every slot
            w = (paths * alpha).sum(-1)
            mean[: k + 1, k], variance[: k + 1, k] = w.mean((1, 2)), w.var((1, 2), correction=0)
            paths = (paths.unsqueeze(-2) @ A).squeeze(-2)
            paths = torch.cat([paths, beta.expand(1, *paths.shape[1:])])
            h = residual(h, F)
        return {"weight": mean, "variance": variance}

    @staticmethod
    def draw(axes, out):
        weight = out["weight"]
        n = len(weight)
        weight = np.where(np.triu(np.ones((n, n))), weight, np.nan)
        high = max(np.nanmax(np.abs(weight[1:])), 1e-9)  # HC may give the embedding a multiple of that
        heat(axes[0], weight, "RdBu_r", "path weight", low=-high, high=high)
        axes[0].set(xlabel="reading branch k", ylabel="source i (0: the embedding)")


class EachLayer(Probe):
    """A number of the whole model, `base`, and of the models that lack one layer, the last too: `without`, (L,)."""

    figure, label = "8", ""

    @classmethod
    def measure(cls, subject, out):
        if "without" not in out:
            out["base"], out["without"] = np.array(cls.number(subject)), np.full(len(subject.model.blocks), np.nan)
        for s in np.flatnonzero(np.isnan(out["without"])):
            out["without"][s] = cls.number(subject, without(subject.model, s))
            yield 1 - np.isnan(out["without"]).mean()

    @classmethod
    def draw(cls, axes, out):
        bars(axes[0], out["without"] - out["base"])
        axes[0].set(xlabel="removed layer", ylabel=f"change of {cls.label}")


class Pruning(EachLayer):
    """The loss without one layer (Figure 8a, by loss)."""

    label = "the loss (nats per token)"
    number = staticmethod(loss)

    @staticmethod
    def summary(out):
        change = out["without"] - out["base"]
        return {"loss_windows": out["base"], "pruning_most": change.max(), "pruning_least": change.min()}


class Tasks(Probe):
    """A probe that brings its own text; it runs if it is named."""

    default = False

    @staticmethod
    def settings(subject):
        return {"examples": subject.examples, "sources": {task: file_hash(source) for task, source in subject.sources.items()}}


def file_hash(source):
    """Of the FILE in TASK=FILE; None if it cannot be read, which data.eval_set will say."""
    path = Path(source.partition("=")[2])
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16] if path.is_file() else None


class Arc(Tasks, EachLayer):
    """ARC-Easy without one layer: percent of questions whose right answer has the highest log-likelihood per character (Figure 8a)."""

    label = "ARC-Easy (points)"

    @staticmethod
    def number(subject, blocks=None):
        examples = subject.eval_set("arc-easy")
        require(examples, "arc-easy has no questions")
        answers = [(n, target) for n, example in enumerate(examples) for target in example.targets]
        pairs = [data.encode_pair(subject.tokenizer, examples[n].context, target) for n, target in answers]
        nll = continuation_nll(subject.model, pairs, blocks)
        each = [[] for _ in examples]
        for (n, target), value in zip(answers, nll):
            each[n].append(value / max(1, len(target.lstrip())))  # without the space before it, as lm-eval counts
        return 100 * statistics.mean(int(np.argmin(values)) == example.gold for values, example in zip(each, examples))

    @staticmethod
    def summary(out):
        return {"arc_easy": out["base"]}


class Lens(Probe):
    """KL(p_L || p_l), p_l what the head predicts from what is read of depth state l (Figure 8b); `loss` is that of p_l."""

    figure = "8"

    @staticmethod
    def batch(model, tokens, targets):
        def log_p(reader, h):
            return wide(model.head(model.reader.norm(reader.read(h)))).log_softmax(-1)

        states = walk(model, tokens)
        final, kl, early = log_p(model.reader, states[-1]), [], []
        for reader, h in zip(readers(model), states):
            q = log_p(reader, h)
            kl.append((final.exp() * (final - q)).sum(-1).double().mean())
            early.append(-q.gather(-1, targets.unsqueeze(-1)).double().mean())
        return {"kl": torch.stack(kl), "loss": torch.stack(early)}

    @staticmethod
    def summary(out):
        return {"kl_middle": out["kl"][len(out["kl"]) // 2]}

    @staticmethod
    def draw(axes, out):
        axes[0].plot(out["kl"], "o-", color="tab:blue", markersize=4)
        axes[0].set(xlabel="depth state l", ylabel="KL(final || l) (nats)", ylim=(0, None))
        axes[0].grid(alpha=0.3)
        whole_ticks(axes[0].xaxis, len(out["kl"]))


class Share(Probe):
    """The weight that each mixture gives its newest source, the running sum of Block AttnRes, and the others (Eq. 9, Figure 9).

    Entry k is what branch k reads, the last what the head does; `opens` marks the branches that begin a block.
    """

    figure = "9"

    @staticmethod
    def batch(model, tokens, targets):
        h, shares, opens = model.enter(model.embed(tokens)), [], []
        for residual, F in model.branches():
            shares.append(residual.reader.weights(h))
            before, h = len(h), residual(h, F)
            opens.append(float(len(h) > before))
        shares.append(model.reader.weights(h))
        newest = torch.stack([p[..., -1].double().mean() for p in shares])
        others = torch.stack([p[..., :-1].double().sum(-1).mean() for p in shares])
        return {"newest": newest, "others": others, "opens": torch.tensor([*opens, 0.0])}

    @staticmethod
    def summary(out):
        return {"running_sum_mean": out["newest"][1:].mean()}

    @staticmethod
    def draw(axes, out):
        ax, k = axes[0], np.arange(len(out["newest"]))
        ax.bar(k, out["newest"], color="tab:green", label="newest source (running sum)")
        ax.bar(k, out["others"], bottom=out["newest"], color="lightgrey", label="earlier sources")
        if not out["opens"][:-1].all():
            for at in np.flatnonzero(out["opens"]):
                ax.axvline(at - 0.5, color="black", linestyle="--", linewidth=0.8)
        ax.set(xlabel="branch k (last: the head)", ylabel="share of the mixture", ylim=(0, 1))
        ax.legend(fontsize=7, loc="upper right")
        whole_ticks(ax.xaxis, len(k))


class Transport(Probe):
    """The product P_k = A_0 A_1 ... A_k of the residual maps of m streams, for each token (Figure 10).

    rank: the effective rank of P_k, with a 95 % interval from resampling documents, of which the windows have pieces; a document with
    pieces in two counts as two. Of the product over all branches: the
    |cos| between its rows, the directions into which the streams have been carried, and its singular values over the largest.
    """

    figure, panels = "10", 3
    RESAMPLES = 1000

    @classmethod
    def measure(cls, subject, out):
        n, done = len(subject.tokens), int(out.get("windows", 0))
        for batch in subject.batches(done):
            rank, cosine, singular = cls.products(subject.model, batch[:, :-1])
            values = to_numpy(torch.cat([rank, cosine.flatten(2), singular], -1))  # (B, T, 2L + m m + m)
            sums = out.get("documents", np.empty((0, values.shape[-1] + 1)))
            for window, value in zip(batch, values):
                parts = documents(window[:-1], subject.eot)
                sums = np.concatenate([sums, [np.append(value[part].sum(0), len(value[part])) for part in parts]])
            done += len(batch)
            out.update({"documents": sums, "windows": np.array(done)})
            yield done / n
        cls.finish(out, 2 * len(subject.model.blocks))

    @staticmethod
    def products(model, tokens):
        """rank (B, T, 2L), cosine (B, T, m, m), singular (B, T, m)"""
        h, P, rank = model.enter(model.embed(tokens)), None, []
        for residual, F in model.branches():
            A = stream_map(residual, h).expand(*tokens.shape, -1, -1)
            P = A if P is None else P @ A
            sigma = torch.linalg.svdvals(P)
            rank.append(effective_rank(sigma))
            h = residual(h, F)
        rows = normalize(P, dim=-1)
        return torch.stack(rank, -1), (rows @ rows.mT).abs(), sigma / sigma[..., :1]

    @classmethod
    def finish(cls, out, n):
        """Means over tokens; resampled documents bring their tokens with them."""
        sums, tokens = out["documents"][:, :-1], out["documents"][:, -1]
        m = math.isqrt(sums.shape[1] - n)
        chosen = np.random.default_rng(SEED).integers(len(sums), size=(cls.RESAMPLES, len(sums)))
        resampled = np.stack([sums[rows].sum(0) / tokens[rows].sum() for rows in chosen])
        low, high = np.quantile(resampled, [0.025, 0.975], axis=0)
        for name, values in ("", sums.sum(0) / tokens.sum()), ("_low", low), ("_high", high):
            out["rank" + name], out["cosine" + name], out["singular" + name] = np.split(values, [n, n + m * m])
            out["cosine" + name] = out["cosine" + name].reshape(m, m)

    @staticmethod
    def summary(out):
        return {f"effective_rank{end}": out["rank" + end][-1] for end in ("", "_low", "_high")}

    @staticmethod
    def draw(axes, out):
        k, m = np.arange(len(out["rank"])), len(out["singular"])
        axes[0].plot(k, out["rank"], color="tab:blue")
        axes[0].fill_between(k, out["rank_low"], out["rank_high"], color="tab:blue", alpha=0.3)
        axes[0].set(xlabel="branches passed", ylabel="effective rank", ylim=(1, m * 1.02))
        axes[0].grid(alpha=0.3)
        whole_ticks(axes[0].xaxis, len(k), first=1)
        heat(axes[1], out["cosine"], "viridis", "|cos|", low=0, high=1)
        axes[1].set(xlabel="stream", ylabel="stream")
        error = np.abs(np.stack([out["singular_low"], out["singular_high"]]) - out["singular"])
        axes[2].errorbar(np.arange(m), out["singular"], error, fmt="o-", color="tab:blue", capsize=3)
        axes[2].set(xlabel="singular value", ylabel="over the largest", ylim=(0, 1.05))
        whole_ticks(axes[2].xaxis, m, first=1)
        axes[2].grid(alpha=0.3)


def stream_map(residual, h):
    """A of a connection that carries m > 1 streams, (..., m, m). Raises NotImplementedError."""
    A = residual.route(h)[1]
    if A.shape[-2] != A.shape[-1] or A.shape[-1] == 1 or isinstance(h, (list, tuple)):
        raise NotImplementedError(f"{residual.title} does not carry several streams from branch to branch")
    return A.double()


def effective_rank(sigma):
    """exp of the entropy of sigma / sum sigma: (..., m) -> (...)."""
    p = sigma / sigma.sum(-1, keepdim=True)
    return torch.special.entr(p).sum(-1).exp()


def documents(ids, eot):
    """The slices of ids (T,) that belong to different documents; an end-of-text id is its document's last."""
    ends = [] if eot is None else (torch.nonzero(ids == eot).flatten() + 1).tolist()
    borders = sorted({0, *ends, len(ids)})
    return [slice(a, b) for a, b in zip(borders, borders[1:])]


class Health(Probe):
    """Whether the routing of streams is alive. For each branch: how far row and column sums of A are from one, the mean over tokens of
    the largest; the share of |A| off the diagonal; the gradient that reaches the constants behind A, which a frozen mixer has not.
    """

    panels = 3

    @classmethod
    def measure(cls, subject, out):
        if "gradient" not in out:
            out["gradient"] = cls.gradient(subject)
        yield from super().measure(subject, out)

    @staticmethod
    def gradient(subject):
        model, total = subject.model, None
        constants = [residual.map_constants() for residual, _ in model.branches()]  # (parameter, its part)
        for batch in subject.batches():
            with torch.enable_grad():
                logits = wide(model(batch[:, :-1]))
                mean = cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()) * (len(batch) / len(subject.tokens))
                found = torch.autograd.grad(mean, [p for p, _ in constants])
            parts = [g.flatten()[part].double() for g, (_, part) in zip(found, constants)]
            total = parts if total is None else [a + b for a, b in zip(total, parts)]
        return np.array([g.norm().item() for g in total])

    @staticmethod
    def batch(model, tokens, targets):
        h, found = model.enter(model.embed(tokens)), []
        for residual, F in model.branches():
            A = stream_map(residual, h)
            size = A.abs().sum((-1, -2))
            diagonal = A.diagonal(dim1=-1, dim2=-2).abs().sum(-1)
            found.append([x.mean() for x in ((A.sum(-1) - 1).abs().amax(-1), (A.sum(-2) - 1).abs().amax(-1), 1 - diagonal / size)])
            h = residual(h, F)
        rows, columns, off_diagonal = map(torch.stack, zip(*found))
        return {"rows": rows, "columns": columns, "off_diagonal": off_diagonal}

    @staticmethod
    def summary(out):
        return {"row_sums_off": out["rows"].max(), "column_sums_off": out["columns"].max(), "off_diagonal": out["off_diagonal"].mean()}

    @staticmethod
    def draw(axes, out):
        for name, style in ("rows", "o-"), ("columns", "s--"):
            axes[0].semilogy(np.maximum(out[name], 1e-9), style, markersize=3, label=name)
        axes[0].set(ylabel="|sum - 1|")
        axes[0].legend(fontsize=8)
        axes[1].plot(out["off_diagonal"], "o-", markersize=3)
        axes[1].set(ylabel="share of |A| off the diagonal", ylim=(0, None))
        axes[2].semilogy(np.maximum(out["gradient"], 1e-12), "o-", markersize=3)
        axes[2].set(ylabel="gradient of the constants behind A")
        for ax in axes:
            ax.set_xlabel("branch k")
            ax.grid(alpha=0.3)
            whole_ticks(ax.xaxis, len(out["rows"]))


class NLL(Tasks):
    """Teacher-forced loss on six tasks: over all target tokens of a task, and the plain mean of two tasks (Figure 4).

    Targets longer than the context are left out and counted, where the authors' script stops. Tasks that cannot be had are named,
    and asked for again by the next call.
    """

    figure = "4"
    CATEGORIES = {"coding": ("mbpp", "humaneval"), "STEM": ("sciq", "gpqa"), "math": ("gsm8k", "math-500")}
    TASKS = tuple(task for tasks in CATEGORIES.values() for task in tasks)

    @classmethod
    def measure(cls, subject, out):
        model, n = subject.model, len(cls.TASKS)
        if "nll" not in out:
            out["nll"], out["tokens"], out["left_out"] = np.full(n, np.nan), np.zeros(n), np.zeros(n)
        for i, task in enumerate(cls.TASKS):
            if not out["tokens"][i]:
                try:
                    examples = subject.eval_set(task)
                except Mistake as mistake:
                    print(f"nll: {mistake}", file=sys.stderr)
                    continue
                pairs = [data.encode_pair(subject.tokenizer, example.context, example.targets[0]) for example in examples]
                fitting = [pair for pair in pairs if len(pair[1]) <= model.seq_len]
                out["left_out"][i] = len(pairs) - len(fitting)
                if fitting:
                    tokens = sum(len(target) for _, target in fitting)
                    out["nll"][i] = continuation_nll(model, fitting).sum() / tokens
                    out["tokens"][i] = tokens  # last: this marks the task as done
            yield (i + 1) / n
        require(out["tokens"].any(), "none of its tasks could be had")

    @staticmethod
    def lacks(out):
        return not out["tokens"].all()

    @classmethod
    def summary(cls, out):
        tasks = dict(zip(cls.TASKS, out["nll"]))
        means = {name: np.mean([tasks[task] for task in pair]) for name, pair in cls.CATEGORIES.items()}
        left = {f"{task}_left_out": n for task, n in zip(cls.TASKS, out["left_out"]) if n}  # their targets are longer than the context
        return {f"nll_{name}": value for name, value in (tasks | means | left).items() if not np.isnan(value)}

    @classmethod
    def draw(cls, axes, out):
        axes[0].bar(cls.TASKS, out["nll"], color="tab:blue")
        axes[0].set(ylabel="NLL (nats per token)")
        axes[0].tick_params("x", rotation=30)


@torch.no_grad()
def continuation_nll(model, pairs, blocks=None):
    """-log p of the target after the context, for pairs of lists of ids, summed over the target: float64 (n,).

    A context is cut on the left to what the model can see; one without tokens, and a target that is too long alone, raise Mistake.
    """
    result, T, device = np.zeros(len(pairs)), model.seq_len, model.head.weight.device
    require(all(len(context) for context, _ in pairs), "a context has no token to predict the first one of the target from")
    longest = max((len(target) for _, target in pairs), default=0)
    require(longest <= T, f"a target of {longest} tokens is longer than the {T} that the model can see")
    order = sorted(range(len(pairs)), key=lambda n: len(pairs[n][0]) + len(pairs[n][1]))
    while order:
        longest = min(T + 1, sum(map(len, pairs[order[-1]])))
        rows = [order.pop() for _ in range(min(len(order), max(1, 4096 // longest)))]
        ids = [(list(context) + list(target))[-(T + 1) :] for context, target in (pairs[n] for n in rows)]
        batch = torch.tensor([row + [0] * (longest - len(row)) for row in ids], device=device)  # causal: what follows is not seen
        losses = cross_entropy(wide(model(batch[:, :-1], blocks)).mT, batch[:, 1:], reduction="none").double()
        for n, row, line in zip(rows, ids, losses):
            result[n] = line[len(row) - 1 - len(pairs[n][1]) : len(row) - 1].sum().item()
    return result


class Layers(Probe):
    """What `train.py --layer_stats` has left in layers.jsonl: size of stream and update, and gradient of each layer, over the steps."""

    panels = 4

    @classmethod
    def measure(cls, subject, out):
        keys = "step", "stream", "update", "gain", "gradient"
        records = train.read_log(cls.log(subject), keys)
        require(records, f"{cls.log(subject)} has no whole line")
        out.update({key: np.array([record[key] for record in records]) for key in keys})
        yield 1

    @staticmethod
    def log(subject):
        path = subject.folder and subject.folder / "layers.jsonl"
        if not path or not path.exists():
            raise NotImplementedError("no layers.jsonl in this run; `train.py --layer_stats=10` writes it")
        return path

    @classmethod
    def settings(cls, subject):
        return {"size": cls.log(subject).stat().st_size}

    @staticmethod
    def summary(out):
        return {"largest_gain": out["gain"].max()}

    @staticmethod
    def draw(axes, out):
        units = {"stream": "RMS of z_l", "update": "RMS of z_l+1 - z_l", "gain": "RMS of z_l+1 over z_l", "gradient": "gradient norm"}
        for ax, (key, label) in zip(axes, units.items()):
            heat(ax, np.log10(np.maximum(out[key].T, 1e-12)), "viridis", f"log10 {label}")
            ax.set(xlabel="step", ylabel="layer l")
            places = range(0, len(out["step"]), math.ceil(len(out["step"]) / 5))
            ax.set_xticks(list(places), [f"{out['step'][place]:,}" for place in places])


class Rounds(Probe):
    """The share of answers of --data=automaton that are right, for each number k of rounds that a document asks for.

    Six numbers want more documents than most probes do windows: --windows=1000.
    """

    @classmethod
    def measure(cls, subject, out):
        if subject.corpus != "automaton":
            raise NotImplementedError("only --data=automaton asks for rounds")
        yield from super().measure(subject, out)

    @staticmethod
    def batch(model, tokens, targets):
        """A window is a document: k, then pairs of a state, where the answer is predicted, and the answer."""
        right = (model(tokens).argmax(-1) == targets)[:, 1:-1:2].double().mean(-1)
        asked = (tokens[:, :1] == ord("1") + torch.arange(6, device=tokens.device)).double()  # (B, 6)
        inside = tokens[:, 1:-1]
        whole = asked.any(-1) & ((inside >= ord("a")) & (inside <= ord("z"))).all(-1)
        require(bool(whole.all()), f"a window of {tokens.shape[1]} tokens is not one document of the automaton; --length=64 is")
        return {"right": (asked * right[:, None]).mean(0), "asked": asked.mean(0)}

    @staticmethod
    def shares(out):
        """NaN for a k that no window asks for."""
        return np.divide(out["right"], out["asked"], out=np.full(6, np.nan), where=out["asked"] > 0)

    @classmethod
    def summary(cls, out):
        return {f"rounds_{k}": share for k, share in enumerate(cls.shares(out), 1)}

    @classmethod
    def draw(cls, axes, out):
        axes[0].bar(np.arange(1, 7), cls.shares(out), color="tab:blue")
        axes[0].axhline(0.2, color="black", linestyle="--", linewidth=0.8)  # chance
        axes[0].set(xlabel="rounds k", ylabel="share of right answers (dashed: chance)", ylim=(0, 1))


PROBES = {
    "angular": Angular,
    "causal": Causal,
    "permutation": Permutation,
    "paths": Paths,
    "pruning": Pruning,
    "arc": Arc,
    "lens": Lens,
    "share": Share,
    "transport": Transport,
    "health": Health,
    "nll": NLL,
    "layers": Layers,
    "rounds": Rounds,
}


def measure(name, model, tokens, **about):
    """The result of a probe as a dict of arrays. tokens (n, T + 1). Raises Mistake, and NotImplementedError if the rule has no answer."""
    require(name in PROBES, f"no probe {name!r}{suggest(name, PROBES)} (there are {', '.join(PROBES)})")
    out = {}
    with torch.no_grad():
        for _ in PROBES[name].measure(Subject(model, tokens, **about), out):
            pass
    return out


# ---------------------------------------------------------------------------------------------------------------------
# Pictures


def pyplot():
    import matplotlib

    matplotlib.use("Agg")  # no display needed
    import matplotlib.pyplot as plt

    return plt


def heat(ax, values, colours, label, low=None, high=None):
    if high is not None and not high > (low or 0):
        high = (low or 0) + 1e-9  # all zero: still a picture
    image = ax.imshow(values, cmap=colours, vmin=low, vmax=high, aspect="auto", interpolation="nearest")
    ax.figure.colorbar(image, ax=ax, label=label)
    for axis, n in (ax.xaxis, values.shape[1]), (ax.yaxis, values.shape[0]):
        whole_ticks(axis, n)


def whole_ticks(axis, n, first=0):
    """At most nine for n places, which are numbered from `first` on."""
    places = range(0, n, math.ceil(n / 9))
    axis.set_ticks(list(places), [str(place + first) for place in places])


def upper(score):
    return np.where(np.triu(np.ones(score.shape), 1), score, np.nan)


def share_text(name, score, tau):
    share = late_fraction(score, tau)
    return f"{name} n/a" if math.isnan(share) else f"{name} {share:.0%}"


def bars(ax, values):
    ax.bar(np.arange(len(values)), values, color="tab:blue")
    ax.axhline(0, color="black", linewidth=0.8)
    whole_ticks(ax.xaxis, len(values))


STYLES = {  # colours that colour-blind readers can tell apart, and markers for print in grey; a family shares its hue
    "preln": ("black", "o"),
    "postln": ("#7f7f7f", "h"),
    "sandwichln": ("#999933", "^"),
    "lns": ("#117733", "v"),
    "deepnorm": ("#44aa99", "<"),
    "keel": ("#882255", ">"),
    "layerrope": ("#ddaa33", "P"),
    "hc": ("#d55e00", "D"),
    "mhc": ("#e69f00", "d"),
    "fullattnres": ("#0072b2", "s"),
    "blockattnres": ("#56b4e9", "*"),
    "moda": ("#cc79a7", "X"),
    "mixln": ("#661100", "p"),
    "rezero": ("#aa4499", "H"),
    "layerscale": ("#6699cc", "8"),
    "denseformer": ("#888888", "."),
}


def style(residual):
    """Colour, marker and label of a rule, in all figures the same; options change the line."""
    key, _, options = residual.partition(":")
    colour, marker = STYLES.get(key, ("#444444", "+"))
    title = RULES[key].title if key in RULES else key
    return dict(color=colour, marker=marker, linestyle="--" if options else "-", label=f"{title} {options}".strip())


def order(residual):
    """Rules come in the order of RULES, their options by name and by number."""
    key = residual.split(":")[0]
    place = list(RULES).index(key) if key in RULES else len(RULES)
    return place, [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", residual)]


# ---------------------------------------------------------------------------------------------------------------------
# One run


class Results:
    """probe.npz of a run: the arrays of each probe, and what they were measured on, of which probe.json is a copy for people."""

    def __init__(self, folder):
        self.folder, self.arrays, self.about = folder, {}, {}
        try:
            with np.load(folder / "probe.npz") as file:
                for key in set(file) - {"about"}:
                    name, _, array = key.partition("/")
                    self.arrays.setdefault(name, {})[array] = file[key]
                self.about = json.loads(str(file["about"]))
        except (ValueError, KeyError, OSError, EOFError, zipfile.BadZipFile):
            self.arrays, self.about = {}, {}  # not there, or damaged; measured anew

    def start(self, name, settings):
        """The arrays of a probe to go on with: those there are, if they were measured on the same."""
        if name not in self.arrays or self.about.get(name, {}).get("settings") != settings:
            self.arrays[name], self.about[name] = {}, {"settings": settings, "done": False}
        return self.arrays[name]

    def save(self):
        """All in one file, which is there as it was or as it is, whenever a kill comes."""
        arrays = {f"{name}/{key}": value for name, out in self.arrays.items() for key, value in out.items()}
        neighbour = self.folder / "probe.new.npz"
        np.savez(neighbour, about=np.array(json.dumps(self.about)), **arrays)
        neighbour.replace(self.folder / "probe.npz")
        (self.folder / "probe.json").write_text(json.dumps(self.about, indent=1) + "\n")


def probe_run(path, args):
    """Measure and draw the chosen probes of the run in a folder. Returns why some were not, {probe: reason}. Raises Mistake."""
    folder, names = checkpoint_of(path).parent, chosen(args.only)
    state = train.load_checkpoint(checkpoint_of(path))
    model, cfg = train.model_of(state)
    device = train.Ranks(args.device).device
    model.to(device).eval()
    dataset = data.open_dataset(cfg.data)
    for file in train.changed_files(state, dataset)[:1]:
        print(f"{cfg.name} was trained on other data: {file} in {cfg.data} has changed", file=sys.stderr)
    ids = f"ids up to {dataset.vocab_size - 1}"
    require(dataset.vocab_size <= cfg.vocab_size, f"{cfg.data} has {ids}, and {cfg.name} was made for {cfg.vocab_size}: restore the data")
    length = args.length or min(512, cfg.seq_len)
    require(length <= cfg.seq_len, f"--length={length} is more than the {cfg.seq_len} tokens that {cfg.name} was made for")
    windows = dataset.windows("val", length, SEED)
    n = min(args.windows, len(windows))
    tokens = torch.from_numpy(windows.batch(0, n)).to(device)
    settings = {"step": state["step"], "weights": weights_hash(model), "data": dataset.identity}
    print(f"{cfg.name}: {cfg.residual}, {cfg.n_layer} layers of width {cfg.d_model}, on {n} windows of {length} tokens of {dataset.name}")
    sources = {source.partition("=")[0]: source for source in args.tasks.split(",") if source}
    results, problems = Results(folder), {}
    for name in names:
        subject = Subject(model, tokens, dataset.eot, folder, corpus=cfg.data, examples=args.examples, sources=sources)
        try:
            if issubclass(PROBES[name], Tasks):
                subject.tokenizer = dataset.load_tokenizer()
            run_probe(name, subject, results, settings | PROBES[name].settings(subject))
        except NotImplementedError as reason:
            results.arrays.pop(name, None)
            results.about.pop(name, None)
            problems[name] = str(reason)
        except Mistake as reason:  # what is there stays for another call
            problems[name] = str(reason)
    for name, problem in problems.items():
        print(f"{name:12} n/a: {problem}")
    return problems


def run_probe(name, subject, results, settings):
    """Go on with one probe to its end; what is there is kept every few seconds, and when it is interrupted."""
    probe, out, saved, start = PROBES[name], results.start(name, settings), time.perf_counter(), None
    if not results.about[name]["done"] or probe.lacks(out):
        try:
            with torch.no_grad():
                for done in probe.measure(subject, out):
                    now = time.perf_counter()
                    start = start or (now, done)  # what an earlier call has done tells nothing of the time left
                    left = (now - start[0]) * (1 - done) / (done - start[1]) if done > start[1] else math.nan
                    show(f"{name:12} {done:4.0%}" + (f"  {train.duration(left)} left" if left >= 0 else ""))
                    if now - saved > 10:
                        results.save()
                        saved = now
        except KeyboardInterrupt:
            results.save()
            print(f"\ninterrupted; {subject.folder}/probe.npz keeps what is measured, and the same command goes on")
            raise
        results.about[name] |= {"done": True, "summary": {key: float(x) for key, x in probe.summary(out).items() if not np.isnan(x)}}
        results.save()
    draw_run(subject.folder, name, out)
    numbers = "  ".join(f"{key} {value:.4g}" for key, value in results.about[name]["summary"].items())
    show(f"{name:12} {subject.folder / name}.png  {numbers}", end="\n")


def show(text, end=""):
    """A line that the next one overwrites; where nobody watches, only those that stay."""
    if sys.stdout.isatty():
        print("\r\033[K" + text, end=end, flush=True)
    elif end:
        print(text, flush=True)


def checkpoint_of(path):
    path = Path(path)
    checkpoint = path / "checkpoint.pt" if path.is_dir() else path
    if path.is_dir() and not checkpoint.is_file():
        raise Mistake(f"no checkpoint.pt in {path}; the `python train.py` command of the run makes it")
    if not checkpoint.is_file():
        near = suggest(str(path), map(str, Path("out").glob("*")))
        raise Mistake(f"no run in {path}{near or '; `python train.py configs/toy.py` makes out/toy'}")
    return checkpoint


def chosen(only):
    names = [name for name, probe in PROBES.items() if probe.default] if only is None else only.split(",")
    for name in names:
        require(name in PROBES, f"--only={name}: no such probe{suggest(name, PROBES)} (there are {', '.join(PROBES)})")
    return names


def weights_hash(model):
    digest = hashlib.sha256()
    for p in model.parameters():
        digest.update(p.detach().cpu().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()[:16]


def draw_run(folder, name, out):
    plt, probe = pyplot(), PROBES[name]
    figure, axes = plt.subplots(1, probe.panels, figsize=(5.2 * probe.panels, 4), layout="constrained", squeeze=False)
    probe.draw(axes[0], out)
    figure.suptitle(f"{folder.name}: {name}", fontsize=11)
    figure.savefig(folder / f"{name}.png", dpi=120)
    plt.close(figure)


# ---------------------------------------------------------------------------------------------------------------------
# Across runs

PUBLISHED = {  # Figure 2a,b: the validation losses that the authors' project page gives, one seed, at the shapes of flops.SHAPES
    "preln": (2.759, 2.759, 2.765, 2.774, 2.782),
    "sandwichln": (2.765, 2.754, 2.757, 2.757, 2.766),
    "lns": (2.749, 2.737, 2.740, 2.740, 2.739),
    "deepnorm": (2.790, 2.779, 2.796, 2.792, 2.798),
    "keel": (2.781, 2.768, 2.767, 2.771, 2.775),
    "hc": (2.729, 2.716, 2.702, 2.714, 2.700, 2.691, 2.682),
    "mhc": (2.720, 2.720, 2.710, 2.727, 2.721),
    "fullattnres": (2.751, 2.728, 2.726, 2.722, 2.718, 2.708, 2.702),
    "blockattnres": (2.734, 2.716, 2.719, 2.726, 2.730),
    "moda": (2.753, 2.746, 2.764, 2.761, 2.780),
}
COLUMNS = "name residual n_layer d_model lr seed max_steps tokens data backbone val_loss step_seconds".split()


def read_runs(paths):
    """Folders of runs and .csv files -> rows, one for each run that is complete; the others are named on the terminal. Raises Mistake."""
    rows = {}
    for path in map(Path, paths):
        for row in read_csv(path) if path.suffix == ".csv" else [read_run(path)]:
            if row:
                rows[row["name"], row["data"], row["tokens"]] = row
    require(rows or not paths, "none of these runs is complete; the `python train.py` command of a run goes on with it")
    return list(rows.values())


def read_csv(path):
    try:
        with open(path, newline="") as file:
            rows = [checked(row, f"{path}, line {n}") for n, row in enumerate(csv.DictReader(file), 2)]
    except OSError as error:
        raise Mistake(f"{path}: {error.strerror}") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise Mistake(f"{path}: not a table of `python probe.py --csv` ({error})") from None
    require(rows, f"{path} has no runs; `python probe.py --csv out/study_*` prints a table of some")
    return rows


def checked(row, where):
    """A line of a table, its numbers as numbers; what probes have found stays text. Raises Mistake."""
    own = lambda text: int(text) if text else ""  # a rule of the reader's has no count
    kinds = {"name": str, "residual": str, "data": str, "lr": float, "val_loss": float, "step_seconds": float, "backbone": own}
    try:
        return {key: kinds.get(key, int)(row[key]) for key in COLUMNS} | {key: row[key] for key in row if key and key not in COLUMNS}
    except (KeyError, ValueError, TypeError) as error:
        raise Mistake(f"{where}: not a table of `python probe.py --csv` ({type(error).__name__}: {error})") from None


def config_of(folder):
    try:
        return configs.TrainConfig(**json.loads((folder / "config.json").read_text()))
    except OSError:
        raise Mistake(f"no run in {folder}: a run has a config.json, and a table of runs ends in .csv") from None
    except (ValueError, TypeError):
        raise Mistake(f"{folder}/config.json is damaged; the `python train.py` command of the run writes it anew") from None


def read_run(folder):
    """A row, or None for a run that has not reached its last step."""
    cfg = config_of(folder)
    records = train.read_log(folder / "log.jsonl")
    if not records or records[-1]["step"] < cfg.max_steps or "val_loss" not in records[-1]:
        print(f"{folder}: not complete, left out", file=sys.stderr)
        return None
    seconds = statistics.median(record["seconds"] for record in records)
    row = vars(cfg) | {"tokens": flops.tokens(cfg), "backbone": backbone(cfg)}
    row |= {"val_loss": round(records[-1]["val_loss"], 6), "step_seconds": round(seconds, 4)}
    row = {key: row[key] for key in COLUMNS}
    for name, about in Results(folder).about.items():
        if about["settings"]["step"] == cfg.max_steps:
            row |= {key: round(value, 6) for key, value in about.get("summary", {}).items()}
        else:
            print(f"{folder}: {name} was measured at another step, left out", file=sys.stderr)
    return row


def backbone(cfg):
    try:
        return flops.params(cfg)["backbone"]
    except Mistake:  # a reader's own rule
        return ""


def cells(rows):
    """{(residual, n_layer, d_model): {seed: loss}} at the learning rate with the most seeds, of these the one with the least mean."""
    rates = {}
    for row in rows:
        cell = row["residual"], row["n_layer"], row["d_model"]
        rates.setdefault(cell, {}).setdefault(row["lr"], {})[row["seed"]] = row["val_loss"]
    best = {cell: min(by_lr.values(), key=lambda seeds: (-len(seeds), statistics.mean(seeds.values()))) for cell, by_lr in rates.items()}
    return dict(sorted(best.items(), key=lambda item: (order(item[0][0]), item[0][1:])))


def curves(ax, rows):
    """Loss against aspect ratio, a line for each rule: the mean over seeds, a band of one standard deviation, a dot for each run."""
    found = cells(rows)
    for rule in dict.fromkeys(residual for residual, _, _ in found):
        points = sorted((d / L, list(seeds.values())) for (residual, L, d), seeds in found.items() if residual == rule)
        x, means = [ratio for ratio, _ in points], [statistics.mean(losses) for _, losses in points]
        spread = [deviation(losses) for _, losses in points]
        look = style(rule)
        ax.plot(x, means, **look, markersize=6)
        ax.fill_between(x, np.subtract(means, spread), np.add(means, spread), color=look["color"], alpha=0.15, linewidth=0)
        for ratio, losses in points:
            ax.scatter([ratio] * len(losses), losses, s=7, color=look["color"], alpha=0.5)
    aspect_axis(ax, {(L, d) for _, L, d in found})


def deviation(losses):
    return statistics.stdev(losses) if len(losses) > 1 else math.nan


def variants(ax, rows):
    """Rules at one shape, a line for each: the mean over seeds, one standard deviation, a dot for each run."""
    found = cells(rows)
    for place, ((rule, _, _), seeds) in enumerate(found.items()):
        losses, look = list(seeds.values()), style(rule)
        mean, colour = statistics.mean(losses), look["color"]
        ax.errorbar(mean, place, xerr=deviation(losses), color=colour, marker=look["marker"], markersize=7, capsize=4)
        ax.scatter(losses, [place] * len(losses), s=9, color="black", alpha=0.6, zorder=3)
    (L, d), *_ = {(L, d) for _, L, d in found}
    ax.set_yticks(range(len(found)), [style(rule)["label"] for rule, _, _ in found])
    ax.invert_yaxis()
    ax.set(xlabel=f"validation loss (nats per token), {L} x {d}")
    ax.grid(axis="x", alpha=0.3)


def published(ax, rules, source=""):
    for rule in (rule for rule in rules if rule in PUBLISHED):
        losses, look = PUBLISHED[rule], style(rule)
        look["label"] += source
        x = [d / L for L, d in flops.SHAPES[: len(losses)]]
        ax.plot(x, losses, **look | {"linestyle": ":"}, markersize=6, markerfacecolor="none", linewidth=0.8)
    aspect_axis(ax, set(flops.SHAPES))


def aspect_axis(ax, shapes):
    shapes = sorted(shapes)
    ax.set_xscale("log")
    ax.set_xticks([d / L for L, d in shapes], [f"{d / L:.3g}\n{L} x {d}" for L, d in shapes], fontsize=7)
    ax.minorticks_off()
    ax.invert_xaxis() if not ax.xaxis_inverted() else None
    ax.set(xlabel="aspect ratio d / L (layers x width)", ylabel="validation loss (nats per token)")
    ax.grid(alpha=0.3)


def figure2(rows):
    """A `panel` for each budget; without runs, and beside runs of the paper's shapes, the paper's values."""
    panels = list(budgets(rows).values()) or [[]]
    figure, axes = pyplot().subplots(1, len(panels), figsize=(6.5 * len(panels), 4.5), layout="constrained", squeeze=False)
    for ax, mine in zip(axes[0], panels):
        if mine:
            panel(ax, mine)
        if not mine:
            published(ax, PUBLISHED)
        elif mine[0]["data"] not in data.BUILT_IN and any((row["n_layer"], row["d_model"]) in flops.SHAPES for row in mine):
            published(ax, sorted({row["residual"] for row in mine}, key=order), " (paper)")
        ax.set_title("the paper's values (hollow), one seed" if not mine else describe(mine), fontsize=9)
        if ax.get_legend_handles_labels()[0]:  # not where the axis names the rules
            ax.legend(fontsize=7, ncols=2)
    return figure


def panel(ax, rows):
    """Loss against aspect ratio, or of several rules at one shape; a run that is missing is a cross, and a command on the terminal."""
    at_one_shape = len({(row["n_layer"], row["d_model"]) for row in rows}) == 1 < len({row["residual"] for row in rows})
    lack = list(missing(rows))
    if at_one_shape and not lack:
        variants(ax, rows)
        return
    curves(ax, rows)
    for n, (residual, L, d, way_out) in enumerate(lack):
        ax.plot(d / L, 0.02 + 0.03 * (n % 5), "x", color=style(residual)["color"], transform=ax.get_xaxis_transform())
        print(f"missing: {way_out}")


def budgets(rows):
    """{(corpus, tokens): its rows}: what may be compared."""
    found = {}
    for row in sorted(rows, key=lambda row: (row["data"], row["tokens"])):
        found.setdefault((row["data"], row["tokens"]), []).append(row)
    return found


def require_distinct(rows):
    """Raises Mistake for two runs that a figure would take for one: they differ in an option that no figure shows."""
    first = {}
    for row in rows:
        key = tuple(row[key] for key in ("data", "tokens", "residual", "n_layer", "d_model", "lr", "seed"))
        other = first.setdefault(key, row)
        alike = f"{other['name']} and {row['name']} are of one rule, shape, learning rate and seed, and yet they differ"
        require(other["val_loss"] == row["val_loss"], f"{alike}: draw them one at a time")


def describe(rows):
    seeds, row = len({row["seed"] for row in rows}), rows[0]
    return f"{row['data']}, {row['max_steps']:,} steps, up to {seeds} seed{'s' * (seeds > 1)}; band or bar: one sd, dots: runs, x: missing"


def missing(rows):
    """(residual, layers, width, command) of the config files of the same family, and the seeds, that have no run here."""
    bases = {base_of(row) for row in rows}
    families = sorted({base.split("_")[0] for base in bases if Path("configs", f"{base}.py").exists()})
    seeds = sorted({row["seed"] for row in rows})
    for path in (path for family in families for path in sorted(Path("configs").glob(f"{family}_*.py"))):
        cfg = configs.load(path)
        cell = cfg.residual, cfg.n_layer, cfg.d_model
        there = [row for row in rows if (row["residual"], row["n_layer"], row["d_model"]) == cell]
        lack = [seed for seed in seeds if seed not in {row["seed"] for row in there}]
        if lack:
            lr = min(there, key=lambda row: row["val_loss"])["lr"] if there else cfg.lr  # beside runs of this cell, at their best
            yield *cell, command(path.stem, rows[0], lr=[lr], seed=lack)


def base_of(row):
    """The name of the config file that a run was made of."""
    return row["name"].split("-")[0]


def command(base, like, **values):
    """What makes the runs of a config file that are missing beside the run `like`, under the names that a sweep would give them."""
    cfg = configs.load(Path("configs", f"{base}.py"))
    single = [f"{key}-{some[0]}" for key, some in values.items() if len(some) == 1 and some != [getattr(cfg, key)]]
    values |= {"data": [like["data"]], "max_steps": [like["max_steps"]]}
    values |= {"name": [re.sub("[:=/]", "-", "-".join([base, *single]))]} if single else {}
    options = (f" --{key}={','.join(map(str, some))}" for key, some in values.items() if some != [getattr(cfg, key)])
    return f"python train.py configs/{base}.py" + "".join(options)


def figure3(rows):
    """Loss against aspect ratio, a panel for each scale."""
    require(rows, "--figure=3 needs runs, as in `python probe.py --figure=3 out/200m_* out/300m_*`; `python train.py --list` names them")
    plt, scales = pyplot(), {}
    for row in rows:
        scales.setdefault((row["name"].split("_")[0], row["data"], row["tokens"]), []).append(row)
    figure, axes = plt.subplots(1, len(scales), figsize=(4.5 * len(scales), 4), layout="constrained", squeeze=False)
    for ax, ((scale, *_), mine) in zip(axes[0], sorted(scales.items(), key=lambda item: item[1][0]["backbone"] or 0)):
        panel(ax, mine)
        ax.set_title(scale, fontsize=9)
    axes[0][0].legend(fontsize=7)
    return figure


def figure12(rows):
    """Loss against peak learning rate, a panel for each shape and budget; means over the seeds that all rates of a rule have."""
    require(rows, "--figure=12 needs runs, as of `python train.py configs/400m_preln_L24.py --lr=5e-4,1e-3,2e-3,5e-3`")
    plt, panels = pyplot(), {}
    for row in sorted(rows, key=lambda row: (row["data"], row["tokens"], row["n_layer"])):
        panels.setdefault((row["data"], row["tokens"], row["n_layer"], row["d_model"]), []).append(row)
    figure, axes = plt.subplots(1, len(panels), figsize=(4.5 * len(panels), 4), layout="constrained", squeeze=False)
    for ax, ((corpus, _, L, d), mine) in zip(axes[0], panels.items()):
        rates = sorted({row["lr"] for row in mine})
        for n, rule in enumerate(sorted({row["residual"] for row in mine}, key=order)):
            by_lr = {}
            for row in mine:
                if row["residual"] == rule:
                    by_lr.setdefault(row["lr"], {})[row["seed"]] = row["val_loss"]
                    like = row
            shared = set.intersection(*map(set, by_lr.values()))  # a rate with more seeds is compared by those that all have
            points = sorted((lr, statistics.mean(seeds[seed] for seed in shared or seeds)) for lr, seeds in by_lr.items())
            ax.plot(*zip(*points), **style(rule), markersize=6)
            lack = [lr for lr in rates if lr not in by_lr]
            ax.plot(lack, [0.02 + 0.03 * n] * len(lack), "x", color=style(rule)["color"], transform=ax.get_xaxis_transform())
            if lack and Path("configs", f"{base_of(like)}.py").exists():
                print("missing: " + command(base_of(like), like, residual=[rule], lr=lack, seed=[like["seed"]]))
        ax.set_xscale("log")
        ax.set_xticks(rates, [f"{lr:g}" for lr in rates], fontsize=7)
        ax.minorticks_off()
        ax.set(xlabel="peak learning rate")
        ax.set_title(f"{corpus}, {mine[0]['max_steps']:,} steps: {L} x {d}; x: missing", fontsize=9)
        ax.grid(alpha=0.3)
    axes[0][0].set(ylabel="validation loss (nats per token)")
    axes[0][0].legend(fontsize=7)
    return figure


def side_by_side(figures, paths):
    """The probes of Figures 4 to 10 as rows, the runs as columns, from their probe.npz."""
    plt, rows = pyplot(), []
    found = {path: Results(checkpoint_of(path).parent) for path in paths}
    require(found, f"--figure={','.join(figures)} needs runs that have been probed, as in `python probe.py --figure=5 out/toy`")
    for name in (name for figure in figures for name, probe in PROBES.items() if probe.figure == figure):
        if any(results.about.get(name, {}).get("done") for results in found.values()):
            rows += [(name, panel) for panel in range(PROBES[name].panels)]
    names = ",".join(name for name, probe in PROBES.items() if probe.figure in figures)
    way_out = f"`python probe.py {paths[0]} --only={names}` measures it, or says why not"
    require(rows, f"none of these runs has been probed for Figure {', '.join(figures)}; {way_out}")
    figure, axes = plt.subplots(len(rows), len(found), figsize=(4.2 * len(found), 3.4 * len(rows)), layout="constrained", squeeze=False)
    for column, results in zip(axes.T, found.values()):
        for name in dict.fromkeys(name for name, _ in rows):
            mine = [ax for ax, (row, _) in zip(column, rows) if row == name]
            if results.about.get(name, {}).get("done"):
                PROBES[name].draw(mine, results.arrays[name])
            for ax in mine if not results.about.get(name, {}).get("done") else ():
                ax.text(0.5, 0.5, f"{name}: n/a", ha="center", transform=ax.transAxes)
                ax.set_axis_off()
        column[0].set_title(f"{results.folder.name}\n{column[0].get_title()}", fontsize=9)
    for name in dict.fromkeys(name for name, _ in rows):
        texts = {about_text(results.about[name]["settings"]) for results in found.values() if name in results.about}
        if len(texts) > 1:
            print(f"{name} was not measured on the same: {'; '.join(sorted(texts))}", file=sys.stderr)
    return figure


def about_text(settings):
    """What a probe was measured on, but for the weights."""
    return ", ".join(f"{key} {value}" for key, value in settings.items() if key not in ("weights", "step", "size"))


def effects(rows):
    """What going from the shallowest to the deepest shape costs each rule, paired by seed, and that against the first rule."""
    found, lines, base = cells(rows), [], None
    shapes = sorted({(L, d) for _, L, d in found})
    shallow, deep = shapes[0], shapes[-1]
    for rule in dict.fromkeys(residual for residual, _, _ in found):
        a, b = found.get((rule, *shallow), {}), found.get((rule, *deep), {})
        cost = {seed: b[seed] - a[seed] for seed in a.keys() & b.keys()}
        if shallow == deep or not cost:
            continue
        base = base or (rule, cost)
        line = f"  {style(rule)['label']:28} {mean_sd(cost.values())}"
        if rule != base[0]:
            both = [cost[seed] - base[1][seed] for seed in cost.keys() & base[1].keys()]
            line += f"   against {style(base[0])['label']}: {mean_sd(both)}" if both else ""
        lines.append(line)
    where = f"{rows[0]['data']}, {rows[0]['max_steps']:,} steps"
    head = f"{where}: loss at {deep[0]} x {deep[1]} minus loss at {shallow[0]} x {shallow[1]}, paired by seed"
    return "\n".join([head, *lines, ""]) if lines else ""


def levels(rows):
    """What each rule has over the first at the same shape, paired by seed."""
    found = cells(rows)
    base = next(iter(found))[0]
    lines = []
    for (rule, L, d), seeds in found.items():
        other = found.get((base, L, d), {})
        if rule != base and (both := [seeds[seed] - other[seed] for seed in seeds.keys() & other.keys()]):
            lines.append(f"  {style(rule)['label']:28} {L} x {d:<6} {mean_sd(both)}")
    head = f"{rows[0]['data']}, {rows[0]['max_steps']:,} steps: loss minus that of {style(base)['label']} at the same shape"
    return "\n".join([head, *lines, ""]) if lines else ""


def mean_sd(values):
    values = list(values)
    sd = f"sd {statistics.stdev(values):.4f}" if len(values) > 1 else "one seed"
    return f"{statistics.mean(values):+.4f} ({sd}, n = {len(values)})"


def describe_run(folder):
    """{what: its value as text}"""
    cfg = config_of(folder)
    records = train.read_log(folder / "log.jsonl") or [{"step": 0, "loss": math.nan, "seconds": math.nan}]
    validated = [record["val_loss"] for record in records if "val_loss" in record] or [math.nan]
    last_tenth = [record["loss"] for record in records[-math.ceil(len(records) / 10) :]]
    values = {
        "rule": cfg.residual,
        "layers x width": f"{cfg.n_layer} x {cfg.d_model}",
        "learning rate": f"{cfg.lr:g}",
        "seed": f"{cfg.seed}",
        "steps": f"{records[-1]['step']:,} of {cfg.max_steps:,}",
        "validation loss": f"{validated[-1]:.4f}",
        "training loss (last tenth)": f"{statistics.mean(last_tenth):.4f}",
        "seconds per step": f"{statistics.median(record['seconds'] for record in records):.4f}",
    }
    try:
        size = flops.params(cfg)
        values |= {"parameters": f"{size['total']:,}", "backbone": f"{size['backbone']:,}"}
        values |= {"training FLOPs": f"{flops.train_flops(cfg):.3e}"}
    except Mistake:  # a reader's own rule
        pass
    for name, about in Results(folder).about.items():
        values |= {f"{name}: step": f"{about['settings']['step']:,}"} if about["settings"]["step"] != records[-1]["step"] else {}
        values |= {key: f"{value:.4g}" for key, value in about.get("summary", {}).items()}
    return values


def compare(paths):
    """Two runs side by side."""
    require(len(paths) == 2, f"--compare takes two runs, not {len(paths)}")
    columns = [describe_run(Path(path)) for path in paths]
    width = max(len(text) for path, values in zip(paths, columns) for text in [Path(path).name, *values.values()]) + 2
    print(" " * 28 + "".join(Path(path).name.rjust(width) for path in paths))
    for name in dict.fromkeys(name for values in columns for name in values):
        print(f"{name:28}" + "".join(values.get(name, "-").rjust(width) for values in columns))


# ---------------------------------------------------------------------------------------------------------------------
# Command line


FIGURES = {"2": figure2, "3": figure3, "12": figure12}


def draw_figures(args):
    figures = args.figure.split(",")
    probes = sorted({probe.figure for probe in PROBES.values() if probe.figure}, key=int)
    for name in figures:
        require(name in FIGURES or name in probes, f"--figure={name} is not one of {', '.join([*FIGURES, *probes])}; flops.py draws 11")
    if figures[0] in FIGURES:
        require(len(figures) == 1, f"--figure={args.figure}: {figures[0]} is drawn alone")
        rows = read_runs(args.runs)
        require_distinct(rows)
        figure = FIGURES[figures[0]](rows)
        for mine in budgets(rows).values():
            print(effects(mine) + levels(mine), end="")
    else:
        figure = side_by_side(figures, args.runs)
    path = args.out or Path("results", f"figure{'-'.join(figures)}.png")
    formats = figure.canvas.get_supported_filetypes()
    require(path.suffix[1:] in formats, f"--out={path}: its name must end in one of .{', .'.join(sorted(formats))}")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    print(path)


def write_csv(paths):
    require(paths, "--csv of which runs? as in `python probe.py --csv out/study_*`")
    rows = read_runs(paths)
    columns = dict.fromkeys(key for row in rows for key in row)  # COLUMNS, then what has been probed
    writer = csv.DictWriter(sys.stdout, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)


def parse(argv):
    parser = flops.Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    option = parser.add_argument
    option("runs", nargs="*", help="folders of runs, or a checkpoint")
    option("--only", metavar="PROBES", help=f"some of {', '.join(PROBES)}; arc and nll run only if they are named")
    option("--windows", type=int, default=16, metavar="16", help="windows of validation text")
    option("--length", type=int, default=0, metavar="512", help="tokens of a window; by default 512, or the run's seq_len if that is less")
    option("--examples", type=int, default=0, metavar="100", help="of each evaluation set of arc and nll; by default all")
    option("--tasks", default="", metavar="gpqa=FILE.jsonl", help="your own copies of evaluation sets, with the original fields")
    option("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where to")
    option("--figure", metavar="2", help="draw Figure 2, 3 or 12 of runs, or those of the probes side by side, as in 5,6")
    option("--compare", action="store_true", help="print two runs side by side")
    option("--csv", action="store_true", help="print runs as a table, with what their probes have found")
    option("--out", type=Path, metavar="FILE", help="the figure, by default results/figureN.png")
    args = parser.parse_args(argv)
    for source in args.tasks.split(",") if args.tasks else ():
        task, _, file = source.partition("=")
        there = suggest(task, data.TASKS) or f" (there are {', '.join(data.TASKS)})"
        require(task in data.TASKS and file, f"--tasks={source}: expected TASK=FILE.jsonl{there}")
    for key in "windows", "length", "examples":
        least = 1 if key == "windows" else 0
        require(getattr(args, key) >= least, f"--{key}={getattr(args, key)} must be at least {least}")
    return args


def main(argv):
    args = parse(argv or ["--help"])
    if args.figure:
        draw_figures(args)
    elif args.compare:
        compare(args.runs)
    elif args.csv:
        write_csv(args.runs)
    else:
        require(args.runs, "no run given, as in `python probe.py out/toy`")
        problems = {path: probe_run(path, args) for path in args.runs}
        for path, reasons in problems.items():
            nothing = args.only and len(reasons) == len(chosen(args.only))
            require(not nothing, f"nothing was measured of {path}: {next(iter(reasons.values()), '')}")


if __name__ == "__main__":
    with configs.one_line_mistakes():
        try:
            main(sys.argv[1:])
        except KeyboardInterrupt:
            sys.exit(130)
        except BrokenPipeError:
            raise
        except OSError as error:
            raise Mistake(f"{error.filename or 'a file'}: {error.strerror or error}") from None

"""
How long a training step takes on this CPU, side by side in one run. Not a test: pytest does not collect it.

    python tests/bench_step.py llama    Pre-LN against transformers' LlamaForCausalLM: forward, backward, clip, AdamW
    python tests/bench_step.py rules [RULE ...]    rules, by default all, against Pre-LN: forward, backward

One thread, eager, float32. The two sides take turns; a ratio is the median over the rounds, with the quartiles.
"""

import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from torch.nn.functional import cross_entropy

import train
from configs import TrainConfig
from model import Transformer
from residuals import RULES


def ratios(steps, base, rounds):
    """Prints the seconds of each step over those of `base`, the first of them, in the same round, after a round to warm up."""
    seconds = {name: [] for name in steps}
    for i in range(rounds + 1):
        order = list(steps) if i % 2 else list(reversed(steps))
        for name in order:
            start = time.perf_counter()
            steps[name]()
            seconds[name].append(time.perf_counter() - start)
        if sys.stderr.isatty():
            print(f"\rround {i}/{rounds}", end="", file=sys.stderr)
    for name, times in list(seconds.items())[1:]:
        ratio = [a / b for a, b in zip(times[1:], seconds[base][1:])]
        low, median, high = statistics.quantiles(ratio, n=4)
        print(f"  {name:14} {statistics.median(times[1:]) * 1e3:8.1f} ms   x{median:5.2f}   ({low:.2f} to {high:.2f})")


def whole_step(model, logits, batch, cfg):
    optimizer = train.make_optimizer(model, cfg)

    def step():
        cross_entropy(logits(batch[:, :-1]).float().flatten(0, 1), batch[:, 1:].flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def llama(shapes=((4, 128, 256, 8), (16, 256, 256, 4), (32, 96, 256, 4)), rounds=20):
    from transformers import LlamaConfig, LlamaForCausalLM

    for L, d, T, B in shapes:
        cfg = TrainConfig(n_layer=L, d_model=d, n_head=4, vocab_size=257, seq_len=T, batch_size=B, micro_batch_size=B, device="cpu")
        ours = Transformer(cfg)
        theirs = LlamaForCausalLM(LlamaConfig(
            vocab_size=257, hidden_size=d, intermediate_size=cfg.d_ff, num_hidden_layers=L, num_attention_heads=4, num_key_value_heads=4,
            max_position_embeddings=T, use_cache=False,
        ))
        assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in theirs.parameters())
        batch = torch.randint(257, (B, T + 1), generator=torch.Generator().manual_seed(0))

        print(f"L={L} d={d} T={T} B={B}")
        theirs_step = whole_step(theirs, lambda x, model=theirs: model(x).logits, batch, cfg)
        ratios({"transformers": theirs_step, "Pre-LN": whole_step(ours, ours, batch, cfg)}, "transformers", rounds)


def rules(*chosen, L=16, d=256, T=256, B=4, rounds=9):
    batch = torch.randint(257, (B, T + 1), generator=torch.Generator().manual_seed(0))

    def step_of(rule):
        model = Transformer(TrainConfig(residual=rule, n_layer=L, d_model=d, n_head=4, vocab_size=257, seq_len=T))

        def step():
            cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten()).backward()
            model.zero_grad(set_to_none=True)

        return step

    print(f"L={L} d={d} T={T} B={B}")
    for rule in chosen or list(RULES)[1:]:
        ratios({"preln": step_of("preln"), rule: step_of(rule)}, "preln", rounds)


if __name__ == "__main__":
    train.keep_freed_memory()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    choices = {"llama": llama, "rules": rules}
    if sys.argv[1:2] not in [[choice] for choice in choices]:
        sys.exit(__doc__)
    choices[sys.argv[1]](*sys.argv[2:])

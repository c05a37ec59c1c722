"""
The backbone that all residual rules share: a LLaMA-like decoder (DepthBench, Section 2.2).

Rotary positions, multi-head or grouped-query attention, SwiGLU, no biases, untied embedding and head. How the layers are
joined, the norms included, is the business of residuals.py.
"""

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention, silu

from residuals import Table, init_weight, rule_of, wide


class Attention(nn.Module):
    """Causal attention of n_head queries over n_kv_head keys and values."""

    def __init__(self, cfg, rope):
        super().__init__()
        self.d_head, self.rope, self.gqa = cfg.d_head, rope, cfg.kv_heads != cfg.n_head
        self.q = nn.Linear(cfg.d_model, cfg.n_head * cfg.d_head, bias=False)
        self.k = nn.Linear(cfg.d_model, cfg.kv_heads * cfg.d_head, bias=False)
        self.v = nn.Linear(cfg.d_model, cfg.kv_heads * cfg.d_head, bias=False)
        self.out = nn.Linear(cfg.n_head * cfg.d_head, cfg.d_model, bias=False)

    def forward(self, x):
        q, k, _, v = self.qkv(x)
        return self.merge(scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.gqa))

    def qkv(self, x):
        """x (B, T, d) -> queries, keys, the keys before their rotation, values: each (B, heads, T, d_head)."""
        q, k, v = (w(x).unflatten(-1, (-1, self.d_head)) for w in (self.q, self.k, self.v))  # (B, T, heads, d_head)
        return [x.transpose(1, 2) for x in (rotate(q, self.rope.value), rotate(k, self.rope.value), k, v)]

    def merge(self, y):
        """y (B, heads, T, d_head) -> (B, T, d)."""
        return self.out(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, cfg):
        super().__init__()
        self.gate = nn.Linear(cfg.d_model, cfg.d_ff, bias=False)
        self.up = nn.Linear(cfg.d_model, cfg.d_ff, bias=False)
        self.out = nn.Linear(cfg.d_ff, cfg.d_model, bias=False)

    def forward(self, x):
        return self.out(silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """One layer: attention, then feed-forward, each inside its residual connection."""

    def __init__(self, cfg, rope, attn_residual, mlp_residual):
        super().__init__()
        self.attn, self.attn_residual = Attention(cfg, rope), attn_residual
        self.mlp, self.mlp_residual = MLP(cfg), mlp_residual

    def forward(self, h):
        h = self.attn_residual(h, self.attn)
        h = self.mlp_residual(h, self.mlp)
        return h

    def skip(self, h):
        """The depth state after this layer, had the layer not been there."""
        return self.mlp_residual.skip(self.attn_residual.skip(h))


class Transformer(nn.Module):
    def __init__(self, cfg):
        """Raises Mistake if cfg.residual names no rule."""
        super().__init__()
        rule = rule_of(cfg.residual)
        residuals = iter(rule.connections(cfg))
        rope = Table(rotary(cfg.seq_len, cfg.d_head, cfg.rope_base))
        self.seq_len = cfg.seq_len
        self.embed = nn.Embedding(cfg.vocab_size, cfg.d_model)
        self.enter, self.swap = rule.enter, rule.swap
        self.blocks = nn.ModuleList(Block(cfg, rope, next(residuals), next(residuals)) for _ in range(cfg.n_layer))
        self.reader = rule.head_reader(cfg)
        self.head = nn.Linear(cfg.d_model, cfg.vocab_size, bias=False)
        self.init_weights(cfg.init_std)

    def forward(self, tokens, blocks=None):
        """tokens (B, T) -> logits (B, T, V). A probe may pass other blocks: one skipped, say."""
        h = self.enter(self.embed(tokens))
        for block in self.blocks if blocks is None else blocks:
            h = block(h)
        return self.head(self.reader(h))

    @torch.no_grad()
    def init_weights(self, std):
        """The backbone's weights, in the authors' order. The connections have set theirs, and may now change the branches'."""
        init_weight(self.embed.weight, std)
        for block in self.blocks:
            attn, mlp = block.attn, block.mlp
            for linear in attn.q, attn.k, attn.v, attn.out, mlp.gate, mlp.up, mlp.out:
                init_weight(linear.weight, std)
        init_weight(self.head.weight, std)
        for residual, F in self.branches():
            residual.init_branch(F)

    def branches(self):
        """All 2L pairs of connection and branch, first to last."""
        for block in self.blocks:
            yield block.attn_residual, block.attn
            yield block.mlp_residual, block.mlp

    @torch.no_grad()
    def generate(self, tokens, n, temperature=1.0, top_k=None, seed=0, vocab_size=None, eot=None):
        """The n ids that follow the list `tokens`, sampled from softmax(logits / temperature); temperature 0 takes the largest.

        Only the top_k likeliest ids are drawn, and only those below vocab_size: the data may have fewer than the model.
        An empty prompt begins with eot, the end-of-text id, by default the last of the vocabulary. A text longer than
        seq_len is continued from its last seq_len ids. The seed is of a generator of its own, so that a run in training
        is not disturbed.
        """
        V = vocab_size or self.head.out_features
        ids = list(tokens) or [V - 1 if eot is None else eot]
        device, training, start = self.head.weight.device, self.training, len(ids)
        generator = torch.Generator(device).manual_seed(seed)
        self.eval()
        for _ in range(n):
            context = torch.tensor([ids[-self.seq_len :]], device=device)
            logits = self(context)[0, -1, :V].float()
            if temperature == 0:
                ids.append(logits.argmax().item())
                continue
            values, candidates = (logits / temperature).topk(min(top_k or V, V))
            choice = torch.multinomial(values.softmax(-1), 1, generator=generator)
            ids.append(candidates[choice].item())
        self.train(training)
        return ids[start:]


def rotary(T, d, base):
    """What `rotate` multiplies by at each position, (2, T, 1, d): the cosines, and the sines with the sign that they add with."""
    angles = torch.outer(torch.arange(T, dtype=torch.float64), base ** (-torch.arange(0, d, 2, dtype=torch.float64) / d))
    cos, sin = angles.cos(), angles.sin()
    return torch.stack([torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)]).unsqueeze(-2)


def rotate(x, rope):
    """Turn each pair of channels (j, j + d/2) of x (B, T, H, d) by its position times its frequency, in float32 or better."""
    y = wide(x)
    cos, sin = rope[:, : x.shape[1]].to(y.dtype)
    return (y * cos + y.roll(x.shape[-1] // 2, -1) * sin).to(x.dtype)

"""Pre-LN, in between, of the README's depth study: a backbone of 0.44M parameters in three shapes. toy.py explains init_std."""

from configs import TrainConfig

d = 96
config = TrainConfig(
    residual="preln", n_layer=4, d_model=d, n_head=4, vocab_size=257, seq_len=128, init_std=0.02 * (1024 / d) ** 0.5, data="stdlib",
    max_steps=800, batch_size=4, micro_batch_size=4, lr=2e-3, eval_every=100_000, eval_batches=1967, save_every=400, log_every=100,
)

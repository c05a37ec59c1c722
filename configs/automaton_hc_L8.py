"""HC with 8 layers, on the task of the README's depth study that needs depth: a backbone of 0.1M parameters in four shapes."""

from configs import TrainConfig

d = 32
config = TrainConfig(
    residual="hc", n_layer=8, d_model=d, n_head=4, vocab_size=257, seq_len=64, init_std=0.02 * (1024 / d) ** 0.5, data="automaton",
    max_steps=3000, batch_size=16, micro_batch_size=16, lr=8e-3, eval_every=100_000, eval_batches=249, save_every=1000, log_every=100,
)

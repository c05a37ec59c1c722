"""Block AttnRes at the size of the depth study, 2 to 16 blocks:

    --residual=blockattnres:n_blocks=2,blockattnres:n_blocks=4,blockattnres,blockattnres:n_blocks=16
"""

from configs import TrainConfig

d = 48
config = TrainConfig(
    residual="blockattnres", n_layer=16, d_model=d, n_head=4, vocab_size=257, seq_len=128, init_std=0.02 * (1024 / d) ** 0.5, data="stdlib",
    max_steps=800, batch_size=4, micro_batch_size=4, lr=4e-3, eval_every=100_000, eval_batches=492, save_every=400, log_every=100,
)

"""mHC at the size of the depth study, doubly stochastic, row-stochastic, the identity, free:

    --residual=mhc,mhc:constraint=row,mhc:constraint=identity,mhc:constraint=free
"""

from configs import TrainConfig

d = 64
config = TrainConfig(
    residual="mhc", n_layer=9, d_model=d, n_head=4, vocab_size=257, seq_len=128, init_std=0.02 * (1024 / d) ** 0.5, data="stdlib",
    max_steps=800, batch_size=4, micro_batch_size=4, lr=4e-3, eval_every=100_000, eval_batches=492, save_every=400, log_every=100,
)

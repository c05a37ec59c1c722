"""The first thing to run: Full AttnRes on the source code of the Python standard library, byte by byte, in two minutes.

The paper's initial weights have a standard deviation of 0.02 at width 1024. What a layer gives for an input of unit size
grows with the square root of its width times that number, so a narrow model needs more to start from the same place.
"""

from configs import TrainConfig

d = 128
config = TrainConfig(
    residual="fullattnres", n_layer=4, d_model=d, n_head=4, vocab_size=257, seq_len=256, init_std=0.02 * (1024 / d) ** 0.5,
    data="stdlib", max_steps=480, batch_size=8, micro_batch_size=8, lr=4e-3, eval_every=160, eval_batches=32, save_every=160, sample=200,
)

"""Full AttnRes, shallow and wide, aspect ratio 73.1: the trend at 1.6B parameters, with grouped queries (Figure 3, right; no loss is
printed).
"""

from configs import TrainConfig

config = TrainConfig(
    residual="fullattnres", n_layer=28, d_model=2048, n_kv_head=8, ff_ratio=3, max_steps=30400, micro_batch_size=2, lr=5e-4
)

"""HC, intermediate, aspect ratio 43.2: the trend at 1.6B parameters, with grouped queries (Figure 3, right; no loss is printed)."""

from configs import TrainConfig

config = TrainConfig(residual="hc", n_layer=40, d_model=1728, n_kv_head=8, ff_ratio=3, max_steps=30400, micro_batch_size=2, lr=5e-4)

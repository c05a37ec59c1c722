"""HC, deep and narrow, aspect ratio 28.0: the trend at 200M parameters (Figure 3, left; no loss is printed)."""

from configs import TrainConfig

config = TrainConfig(residual="hc", n_layer=24, d_model=672, max_steps=3800, micro_batch_size=4)

"""Pre-LN, deep and narrow, aspect ratio 29.2: the trend at 500M parameters (Figure 3, left; no loss is printed)."""

from configs import TrainConfig

config = TrainConfig(residual="preln", n_layer=34, d_model=992, max_steps=9500)

"""Pre-LN, deep and narrow, aspect ratio 28.6: the trend at 300M parameters (Figure 3, left; no loss is printed)."""

from configs import TrainConfig

config = TrainConfig(residual="preln", n_layer=28, d_model=800, max_steps=5700)

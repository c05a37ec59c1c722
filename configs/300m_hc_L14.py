"""HC, shallow and wide, aspect ratio 75.4: the trend at 300M parameters (Figure 3, left; no loss is printed)."""

from configs import TrainConfig

config = TrainConfig(residual="hc", n_layer=14, d_model=1056, max_steps=5700, micro_batch_size=4)

"""HC, intermediate, aspect ratio 42.7: the trend at 300M parameters (Figure 3, left; no loss is printed)."""

from configs import TrainConfig

config = TrainConfig(residual="hc", n_layer=21, d_model=896, max_steps=5700, micro_batch_size=4)

"""HC, shallow and wide, aspect ratio 79.1: the trend at 500M parameters (Figure 3, left; no loss is printed)."""

from configs import TrainConfig

config = TrainConfig(residual="hc", n_layer=17, d_model=1344, max_steps=9500, micro_batch_size=4)

"""HC, shallow and wide, aspect ratio 74.7: the trend at 200M parameters (Figure 3, left; no loss is printed)."""

from configs import TrainConfig

config = TrainConfig(residual="hc", n_layer=12, d_model=896, max_steps=3800, micro_batch_size=4)

"""HC, intermediate, aspect ratio 42.7: the trend at 200M parameters (Figure 3, left; no loss is printed)."""

from configs import TrainConfig

config = TrainConfig(residual="hc", n_layer=18, d_model=768, max_steps=3800, micro_batch_size=4)

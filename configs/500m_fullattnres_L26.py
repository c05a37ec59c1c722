"""Full AttnRes, intermediate, aspect ratio 43.1: the trend at 500M parameters (Figure 3, left; no loss is printed)."""

from configs import TrainConfig

config = TrainConfig(residual="fullattnres", n_layer=26, d_model=1120, max_steps=9500)

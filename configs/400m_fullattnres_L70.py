"""Full AttnRes, the deep and narrow extreme of the 400M suite, aspect ratio 9.1 (Figure 2b; the paper reaches 2.702)."""

from configs import TrainConfig

config = TrainConfig(residual="fullattnres", n_layer=70, d_model=640)

"""Full AttnRes, deep and narrow of the 400M suite, aspect ratio 28.0 (Figure 2a; the paper reaches 2.718)."""

from configs import TrainConfig

config = TrainConfig(residual="fullattnres", n_layer=32, d_model=896)

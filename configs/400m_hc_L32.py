"""HC, deep and narrow of the 400M suite, aspect ratio 28.0 (Figure 2a; the paper reaches 2.700, its text says 2.699)."""

from configs import TrainConfig

config = TrainConfig(residual="hc", n_layer=32, d_model=896, micro_batch_size=4)

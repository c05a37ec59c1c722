"""Pre-LN, deep and narrow of the 400M suite, aspect ratio 28.0 (Figure 2a; the paper reaches 2.782)."""

from configs import TrainConfig

config = TrainConfig(residual="preln", n_layer=32, d_model=896)

"""Pre-LN, the deep and narrow extreme of the 400M suite, aspect ratio 9.1 (Figure 2b; the paper's panel has no Pre-LN here)."""

from configs import TrainConfig

config = TrainConfig(residual="preln", n_layer=70, d_model=640)

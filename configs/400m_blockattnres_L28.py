"""Block AttnRes, deeper than the reference of the 400M suite, aspect ratio 34.3 (Figure 2a; the paper reaches 2.726)."""

from configs import TrainConfig

config = TrainConfig(residual="blockattnres", n_layer=28, d_model=960)

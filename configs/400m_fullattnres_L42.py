"""Full AttnRes, deeper than usual of the 400M suite, aspect ratio 19.0 (Figure 2b; the paper reaches 2.708)."""

from configs import TrainConfig

config = TrainConfig(residual="fullattnres", n_layer=42, d_model=800)

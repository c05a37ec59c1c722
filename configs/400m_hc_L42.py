"""HC, deeper than usual of the 400M suite, aspect ratio 19.0 (Figure 2b; the paper reaches 2.691)."""

from configs import TrainConfig

config = TrainConfig(residual="hc", n_layer=42, d_model=800, micro_batch_size=4)

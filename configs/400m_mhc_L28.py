"""mHC, deeper than the reference of the 400M suite, aspect ratio 34.3 (Figure 2a; the paper reaches 2.727)."""

from configs import TrainConfig

config = TrainConfig(residual="mhc", n_layer=28, d_model=960, micro_batch_size=4)

"""mHC, shallower than the reference of the 400M suite, aspect ratio 56.0 (Figure 2a; the paper reaches 2.720)."""

from configs import TrainConfig

config = TrainConfig(residual="mhc", n_layer=20, d_model=1120, micro_batch_size=4)

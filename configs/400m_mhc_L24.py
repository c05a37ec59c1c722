"""mHC, the reference shape of the 400M suite, aspect ratio 42.7 (Figure 2a; the paper reaches 2.710)."""

from configs import TrainConfig

config = TrainConfig(residual="mhc", n_layer=24, d_model=1024, micro_batch_size=4)

"""HC, shallower than the reference of the 400M suite, aspect ratio 56.0 (Figure 2a; the paper reaches 2.716)."""

from configs import TrainConfig

config = TrainConfig(residual="hc", n_layer=20, d_model=1120, micro_batch_size=4)

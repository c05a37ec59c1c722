"""HC, the shallow and wide end of the 400M suite, aspect ratio 76.0 (Figure 2a; the paper reaches 2.729)."""

from configs import TrainConfig

config = TrainConfig(residual="hc", n_layer=16, d_model=1216, micro_batch_size=4)

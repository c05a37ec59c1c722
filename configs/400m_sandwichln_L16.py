"""Sandwich-LN, the shallow and wide end of the 400M suite, aspect ratio 76.0 (Figure 2a; the paper reaches 2.765)."""

from configs import TrainConfig

config = TrainConfig(residual="sandwichln", n_layer=16, d_model=1216)

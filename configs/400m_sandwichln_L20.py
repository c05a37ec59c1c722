"""Sandwich-LN, shallower than the reference of the 400M suite, aspect ratio 56.0 (Figure 2a; the paper reaches 2.754)."""

from configs import TrainConfig

config = TrainConfig(residual="sandwichln", n_layer=20, d_model=1120)

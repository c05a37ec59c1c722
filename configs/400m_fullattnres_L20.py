"""Full AttnRes, shallower than the reference of the 400M suite, aspect ratio 56.0 (Figure 2a; the paper reaches 2.728)."""

from configs import TrainConfig

config = TrainConfig(residual="fullattnres", n_layer=20, d_model=1120)

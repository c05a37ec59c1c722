"""LNS, the shallow and wide end of the 400M suite, aspect ratio 76.0 (Figure 2a; the paper reaches 2.749). Five times the learning rate
of the others.
"""

from configs import TrainConfig

config = TrainConfig(residual="lns", n_layer=16, d_model=1216, lr=1e-2)

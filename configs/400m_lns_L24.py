"""LNS, the reference shape of the 400M suite, aspect ratio 42.7 (Figure 2a; the paper reaches 2.740). Five times the learning rate of
the others.
"""

from configs import TrainConfig

config = TrainConfig(residual="lns", n_layer=24, d_model=1024, lr=1e-2)

"""LNS, deeper than the reference of the 400M suite, aspect ratio 34.3 (Figure 2a; the paper reaches 2.740). Five times the learning rate
of the others.
"""

from configs import TrainConfig

config = TrainConfig(residual="lns", n_layer=28, d_model=960, lr=1e-2)

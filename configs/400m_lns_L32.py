"""LNS, deep and narrow of the 400M suite, aspect ratio 28.0 (Figure 2a; the paper reaches 2.739). Five times the learning rate of the
others.
"""

from configs import TrainConfig

config = TrainConfig(residual="lns", n_layer=32, d_model=896, lr=1e-2)

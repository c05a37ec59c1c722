"""LNS, shallower than the reference of the 400M suite, aspect ratio 56.0 (Figure 2a; the paper reaches 2.737). Five times the learning
rate of the others.
"""

from configs import TrainConfig

config = TrainConfig(residual="lns", n_layer=20, d_model=1120, lr=1e-2)

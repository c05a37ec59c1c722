"""DeepNorm, shallower than the reference of the 400M suite, aspect ratio 56.0 (Figure 2a; the paper reaches 2.779). At twice this
learning rate it explodes.
"""

from configs import TrainConfig

config = TrainConfig(residual="deepnorm", n_layer=20, d_model=1120, lr=1e-3)

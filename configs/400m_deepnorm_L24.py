"""DeepNorm, the reference shape of the 400M suite, aspect ratio 42.7 (Figure 2a; the paper reaches 2.796). At twice this learning rate
it explodes.
"""

from configs import TrainConfig

config = TrainConfig(residual="deepnorm", n_layer=24, d_model=1024, lr=1e-3)

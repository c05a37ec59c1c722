"""DeepNorm, deep and narrow of the 400M suite, aspect ratio 28.0 (Figure 2a; the paper reaches 2.798). At twice this learning rate it
explodes.
"""

from configs import TrainConfig

config = TrainConfig(residual="deepnorm", n_layer=32, d_model=896, lr=1e-3)

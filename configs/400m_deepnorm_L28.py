"""DeepNorm, deeper than the reference of the 400M suite, aspect ratio 34.3 (Figure 2a; the paper reaches 2.792). At twice this learning
rate it explodes.
"""

from configs import TrainConfig

config = TrainConfig(residual="deepnorm", n_layer=28, d_model=960, lr=1e-3)

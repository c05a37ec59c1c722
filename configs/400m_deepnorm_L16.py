"""DeepNorm, the shallow and wide end of the 400M suite, aspect ratio 76.0 (Figure 2a; the paper reaches 2.790). At twice this learning
rate it explodes.
"""

from configs import TrainConfig

config = TrainConfig(residual="deepnorm", n_layer=16, d_model=1216, lr=1e-3)

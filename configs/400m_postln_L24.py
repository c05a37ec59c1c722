"""Post-LN at the reference shape of the 400M suite: the plain counterpart of moda:post=True. The paper does not run it. The learning
rate is the best that the paper found for moda:post=True, and untuned here.
"""

from configs import TrainConfig

config = TrainConfig(residual="postln", n_layer=24, d_model=1024, lr=1e-3)

"""LayerRoPE, deeper than the reference of the 400M suite, aspect ratio 34.3: nobody has run it. The learning rate is four times
Pre-LN's, as in the LayerRoPE article, and untuned.
"""

from configs import TrainConfig

config = TrainConfig(residual="layerrope", n_layer=28, d_model=960, lr=8e-3)

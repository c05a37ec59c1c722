"""LayerRoPE, deep and narrow of the 400M suite, aspect ratio 28.0: nobody has run it. The learning rate is four times Pre-LN's, as in
the LayerRoPE article, and untuned.
"""

from configs import TrainConfig

config = TrainConfig(residual="layerrope", n_layer=32, d_model=896, lr=8e-3)

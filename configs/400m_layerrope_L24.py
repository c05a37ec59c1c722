"""LayerRoPE, the reference shape of the 400M suite, aspect ratio 42.7: nobody has run it. The learning rate is four times Pre-LN's, as
in the LayerRoPE article, and untuned.
"""

from configs import TrainConfig

config = TrainConfig(residual="layerrope", n_layer=24, d_model=1024, lr=8e-3)

"""LayerRoPE, the shallow and wide end of the 400M suite, aspect ratio 76.0: nobody has run it. The learning rate is four times Pre-LN's,
as in the LayerRoPE article, and untuned.
"""

from configs import TrainConfig

config = TrainConfig(residual="layerrope", n_layer=16, d_model=1216, lr=8e-3)

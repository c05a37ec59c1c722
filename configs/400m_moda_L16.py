"""MoDA, the shallow and wide end of the 400M suite, aspect ratio 76.0 (Figure 2a; the paper reaches 2.753). MoDA has more parameters
than the others.
"""

from configs import TrainConfig

config = TrainConfig(residual="moda", n_layer=16, d_model=1216, micro_batch_size=4)

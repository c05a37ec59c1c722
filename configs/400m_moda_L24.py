"""MoDA, the reference shape of the 400M suite, aspect ratio 42.7 (Figure 2a; the paper reaches 2.764). Table 5 is
--residual=moda,moda:post=True --lr=5e-3,2e-3,1e-3,5e-4,2e-4 on this file: there the best of moda is 2.764, of moda:post=True 2.912.
"""

from configs import TrainConfig

config = TrainConfig(residual="moda", n_layer=24, d_model=1024, micro_batch_size=4)

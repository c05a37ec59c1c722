"""Full AttnRes, aspect ratio 6.5, 300M parameters in the backbone (Figure 2c; no loss is printed). L=24 and 32: 400m_*."""

from configs import TrainConfig

config = TrainConfig(residual="fullattnres", n_layer=84, d_model=544)

"""HC, aspect ratio 78.0, 300M parameters in the backbone (Figure 2c; no loss is printed). L=24 and 32: 400m_*."""

from configs import TrainConfig

config = TrainConfig(residual="hc", n_layer=16, d_model=1248, micro_batch_size=4)

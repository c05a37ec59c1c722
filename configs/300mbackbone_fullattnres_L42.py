"""Full AttnRes, aspect ratio 18.3, 300M parameters in the backbone (Figure 2c; no loss is printed). L=24 and 32: 400m_*."""

from configs import TrainConfig

config = TrainConfig(residual="fullattnres", n_layer=42, d_model=768)

"""Pre-LN, deeper than usual of the 400M suite, aspect ratio 19.0 (Figure 2b; the paper's panel has no Pre-LN here)."""

from configs import TrainConfig

config = TrainConfig(residual="preln", n_layer=42, d_model=800)

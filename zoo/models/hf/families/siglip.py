"""SigLIP (Zhai et al., arXiv:2303.15343), and SigLIP 2 (arXiv:2502.14786) with images of one size: CLIP with a sigmoid
loss, and without projections."""

from zoo.models.hf import grammar as hf

from .siglip_text_model import SIGLIP_TEXT_MODEL
from .siglip_vision_model import SIGLIP_VISION_MODEL

START = {"scale": 2.302585, "bias": -10.0}
"""Initial similarity (arXiv:2303.15343, section 3.2)."""

SIGLIP = hf.make_tower_family("siglip", "SiglipModel", SIGLIP_TEXT_MODEL, SIGLIP_VISION_MODEL, projected=False, **START)

"""SigLIP 2 NaFlex (Tschannen et al., arXiv:2502.14786): SigLIP whose images are rows of patches, of any shape."""

import dataclasses
from functools import partial
from math import isqrt

from jaxtyping import Array, Key

from zoo.layers.encoders.patches import PatchedImageEmbedding
from zoo.models.hf import grammar as hf

from .siglip import START
from .siglip_text_model import SIGLIP_TEXT_MODEL
from .siglip_vision_model import SIGLIP_VISION_MODEL, build_siglip_vision


def _build_vision(config: hf.Config, *, key: Key[Array, ""]) -> hf.ImageEncoder:
    side = isqrt(config["num_patches"])
    if side**2 != config["num_patches"]:
        raise hf.ConfigError(f"num_patches = {config['num_patches']}: positions are learned on a square of patches")
    sizes = {"patch_size": (config["patch_size"],) * 2, "grid": (side, side)}
    embedding = partial(PatchedImageEmbedding, config["num_channels"], config["hidden_size"], **sizes)
    return build_siglip_vision(config, embedding, key=key)


_VISION = dataclasses.replace(
    SIGLIP_VISION_MODEL,
    name="siglip2_vision_model",
    build=_build_vision,
    defaults={**hf.omit(SIGLIP_VISION_MODEL.declared, "image_size"), "patch_size": 16, "num_patches": 256},
    kinds={},
)
SIGLIP2 = hf.make_tower_family("siglip2", "Siglip2Model", SIGLIP_TEXT_MODEL, _VISION, projected=False, **START)

"""Idefics 3's encoder of images (Laurençon et al., arXiv:2408.12637): SigLIP, with positions that are stretched over
the patches that count (NaViT, arXiv:2307.06304)."""

import dataclasses
from functools import partial

from jaxtyping import Array, Key

from zoo.layers.encoders.masked_images import MaskedImageEmbedding
from zoo.models.hf import grammar as hf

from .siglip_vision_model import SIGLIP_VISION_MODEL, build_siglip_vision


def _build_idefics3_vision(config: hf.Config, *, key: Key[Array, ""]) -> hf.ImageEncoder:
    sizes = {"patch_size": hf.read_size(config, "patch_size"), "grid": hf.read_grid(config)}
    embedding = partial(MaskedImageEmbedding, config["num_channels"], config["hidden_size"], **sizes)
    return build_siglip_vision(hf.Config(config, vision_use_head=False), embedding, key=key)


IDEFICS3_VISION = dataclasses.replace(
    SIGLIP_VISION_MODEL,
    name="idefics3_vision",
    architecture="Idefics3VisionTransformer",
    build=_build_idefics3_vision,
    defaults={**SIGLIP_VISION_MODEL.declared, "hidden_size": 1152, "patch_size": hf.Default(32, hf.SIZE)},
    kinds={},
)

"""Gemma 3 (Gemma team, arXiv:2503.19786): SigLIP, pooled to 256 features an image, whose tokens see each other in both
directions, and the language model `gemma3_text`."""

import math
from functools import partial

from jaxtyping import Array, Key

from zoo.layers import RMSNorm
from zoo.layers.encoders.projectors import PooledProjector
from zoo.models.hf import grammar as hf

from .siglip_vision_model import SIGLIP_VISION_MODEL


def _build_gemma3_projector(
    config: hf.Config, tower: hf.Config, text: hf.Config, *, key: Key[Array, ""]
) -> PooledProjector:
    """**Raises** `ConfigError` for a number of tokens that is not a square."""
    tokens = config["mm_tokens_per_image"]
    side = math.isqrt(tokens)
    if side**2 != tokens:
        raise hf.ConfigError(f"mm_tokens_per_image = {tokens} should be a square")
    embed = tower["hidden_size"]
    norm = partial(RMSNorm, embed, offset=1.0, epsilon=tower["layer_norm_eps"])
    return PooledProjector(embed, text["hidden_size"], norm, side=side, key=key)


GEMMA3 = hf.make_image_text_family(
    "gemma3",
    "Gemma3ForConditionalGeneration",
    hf.ImageTextFacts(
        wrapper=hf.WRAPPERS["gemma3"],
        towers={"siglip_vision_model": SIGLIP_VISION_MODEL},
        projector=_build_gemma3_projector,
        projector_names=lambda tower: {
            "mm_input_projection_weight": hf.TensorMapping(("out.weight",), transposed=True),
            "mm_soft_emb_norm": "norm",
        },
        image_keys={"image_token_index": 262144},
        places=lambda config: hf.ImageSpans(),
    ),
    defaults={"mm_tokens_per_image": 256},
    ignored_keys=frozenset({"boi_token_index", "eoi_token_index"}),
    ignored_tensors=SIGLIP_VISION_MODEL.ignored_tensors,
)

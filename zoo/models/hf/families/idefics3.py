"""Idefics 3 (Laurençon et al., arXiv:2408.12637): SigLIP with a mask of pixels, squares of patches joined to one
feature, and a language model."""

from collections.abc import Mapping
from typing import Any

from jaxtyping import Array, Key

from zoo.layers.encoders.projectors import LinearProjector
from zoo.models.hf import grammar as hf

from .idefics3_vision import IDEFICS3_VISION

PREFIXES = (hf.Prefixes("model.text_model.", "model.vision_model", "model.connector"),)
KEYS: Mapping[str, Any] = {
    "defaults": {"scale_factor": 2},
    "prefixes": PREFIXES,
    "ignored_keys": frozenset({"_pad_token_id"}),
    "ignored_tensors": IDEFICS3_VISION.ignored_tensors,
}


def _build_idefics3_projector(
    config: hf.Config, tower: hf.Config, text: hf.Config, *, key: Key[Array, ""]
) -> LinearProjector:
    sizes = tower["hidden_size"], text["hidden_size"]
    return LinearProjector(*sizes, merge=config["scale_factor"], bias=False, key=key)


def make_facts(name: str) -> hf.ImageTextFacts:
    """Return the facts of a family whose tower has this name in `vision_config`."""
    return hf.ImageTextFacts(
        wrapper=hf.Wrapper("llama", tied=False),
        towers={name: IDEFICS3_VISION},
        projector=_build_idefics3_projector,
        projector_names=lambda tower: {"modality_projection.proj": "out"},
        image_keys={"image_token_id": 128257},
    )


IDEFICS3 = hf.make_image_text_family(
    "idefics3", "Idefics3ForConditionalGeneration", make_facts("idefics3_vision"), **KEYS
)

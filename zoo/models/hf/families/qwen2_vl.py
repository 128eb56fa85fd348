"""Qwen2-VL (Wang et al., arXiv:2409.12191): an encoder of images of any shape, and Qwen2 with positions in time, row
and column."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from zoo.models.hf import grammar as hf

from . import qwen2_vl_vision
from .qwen2 import QWEN2

PREFIXES = (
    hf.Prefixes("model.language_model.", "model.visual", "model.visual"),
    hf.Prefixes("model.", "visual", "visual"),
)
"""The names of the classes, and of older files of the hub."""
SPECIAL_TOKENS = frozenset({"vision_start_token_id", "vision_end_token_id"})


def section_rope(family: hf.Family, name: str) -> hf.Family:
    """Return a language model's family with RoPE in sections, for time, row and column."""
    return dataclasses.replace(
        family,
        name=name,
        rope_keys=("mrope_section", "mrope_interleaved"),
        ignored_keys=family.ignored_keys - {"mrope_section", "mrope_interleaved"},
    )


def find_places(config: hf.Config, *, steps_per_second: float | int | None = None) -> hf.GridPlaces:
    """Return the rule of the places of images and films."""
    return hf.GridPlaces((config["vision_config"] or {}).get("spatial_merge_size", 2), steps_per_second)


def make_qwen_vl_family(
    name: str,
    architecture: str,
    tower: hf.Family,
    text: hf.Family,
    projector: Callable[..., Any],
    projector_names: Callable[..., hf.NameMap],
    *,
    wrapper: hf.Wrapper | None = None,
    image_tokens: tuple[int, int] = (151655, 151656),
    places: Callable[[hf.Config], hf.GridPlaces] = find_places,
    prefixes: tuple[hf.Prefixes, ...] = PREFIXES,
    text_options: Callable[[hf.Config, hf.Config], Mapping[str, Any]] = lambda config, tower: {},
    flat: bool = False,
    **options: Any,
) -> hf.Family:
    """Make the family of a Qwen model with images. `projector` is called with the config of the tower. `image_tokens`:
    default tokens of images and of films. Other facts are as in `ImageTextFacts`."""

    def build_projector(config: hf.Config, tower: hf.Config, text: hf.Config, **given: Any) -> Any:
        return projector(tower, **given)

    keys: Mapping[str, int] = dict(zip(("image_token_id", "video_token_id"), image_tokens, strict=True))
    facts = hf.ImageTextFacts(
        wrapper=hf.Wrapper(text.name, tied=False, reads_inner_tie=True) if wrapper is None else wrapper,
        towers={f"{name}_vision": tower, name: tower},
        projector=build_projector,
        projector_names=projector_names,
        image_keys=keys,
        places=places,
        texts={text.name: text},
        text_options=text_options,
        flat=flat,
    )
    return hf.make_image_text_family(
        name, architecture, facts, prefixes=prefixes, ignored_keys=SPECIAL_TOKENS, **options
    )


QWEN2_VL = make_qwen_vl_family(
    "qwen2_vl",
    "Qwen2VLForConditionalGeneration",
    qwen2_vl_vision.QWEN2_VL_VISION,
    section_rope(QWEN2, "qwen2_vl_text"),
    qwen2_vl_vision.build_qwen2_merger,
    qwen2_vl_vision.map_qwen2_merger,
    flat=True,
)

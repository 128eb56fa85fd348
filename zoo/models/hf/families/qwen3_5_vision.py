"""Qwen3.5's encoder of images and films: Qwen3-VL's (arXiv:2511.21631) without DeepStack. Its projector is
`qwen2_vl_vision.build_qwen2_merger`."""

import dataclasses

from zoo.models.hf import grammar as hf

from .qwen3_vl_vision import MERGER_NAMES, QWEN3_VL_VISION

_DEEPSTACK = "deepstack_visual_indexes"


def map_qwen3_5_merger(config: hf.Config) -> hf.NameMap:
    """Map the tensors of the projector."""
    return hf.prefixed("merger", "", MERGER_NAMES)


QWEN3_5_VISION = dataclasses.replace(
    QWEN3_VL_VISION,
    name="qwen3_5_vision",
    architecture="Qwen3_5VisionModel",
    defaults=hf.omit(QWEN3_VL_VISION.declared, _DEEPSTACK),
    kinds={},
    required_values={**QWEN3_VL_VISION.required_values, _DEEPSTACK: ([], None)},
)

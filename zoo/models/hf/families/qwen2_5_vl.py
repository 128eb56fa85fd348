"""Qwen2.5-VL (Bai et al., arXiv:2502.13923): Qwen2-VL with windows in the encoder of images, and films in seconds."""

from zoo.models.hf import grammar as hf

from . import qwen2_5_vl_vision, qwen2_vl, qwen2_vl_vision
from .qwen2 import QWEN2


def _find_places(config: hf.Config) -> hf.GridPlaces:
    given = config["vision_config"] or {}
    return qwen2_vl.find_places(config, steps_per_second=given.get("tokens_per_second", 4))


QWEN2_5_VL = qwen2_vl.make_qwen_vl_family(
    "qwen2_5_vl",
    "Qwen2_5_VLForConditionalGeneration",
    qwen2_5_vl_vision.QWEN2_5_VL_VISION,
    qwen2_vl.section_rope(QWEN2, "qwen2_5_vl_text"),
    qwen2_5_vl_vision.build_qwen2_5_merger,
    qwen2_vl_vision.map_qwen2_merger,
    places=_find_places,
    flat=True,
)

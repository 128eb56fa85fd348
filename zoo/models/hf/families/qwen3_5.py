"""Qwen3.5 (Qwen team, 2026): Qwen3-VL's encoder of images without DeepStack, and the language model `qwen3_5_text`,
with positions in time, row and column."""

from zoo.models.hf import grammar as hf

from . import qwen2_vl, qwen2_vl_vision, qwen3_5_vision
from .qwen3_5_text import QWEN3_5_TEXT

QWEN3_5 = qwen2_vl.make_qwen_vl_family(
    "qwen3_5",
    "Qwen3_5ForConditionalGeneration",
    qwen3_5_vision.QWEN3_5_VISION,
    qwen2_vl.section_rope(QWEN3_5_TEXT, "qwen3_5_text"),
    qwen2_vl_vision.build_qwen2_merger,
    qwen3_5_vision.map_qwen3_5_merger,
    wrapper=hf.WRAPPERS["qwen3_5"],
    image_tokens=(248056, 248057),
    other_modules=QWEN3_5_TEXT.other_modules,
)

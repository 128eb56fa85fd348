"""Qwen3-VL (Qwen team, arXiv:2511.21631): Qwen3 with positions in time, row and column, whose first layers read
features of inner layers of the encoder of images (DeepStack)."""

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any

from jaxtyping import Array, Key

from zoo.models.hf import grammar as hf

from . import qwen2_vl, qwen3, qwen3_vl_vision


def _build_text(config: hf.Config, *, key: Key[Array, ""]) -> hf.Decoder:
    count = config["seeing_layers"]
    layers = config["num_hidden_layers"]
    if count > layers:
        raise hf.ConfigError(f"deepstack_visual_indexes are {count}, each for a layer of the text, which has {layers}")
    blocks = [partial(hf.make_seeing_block, number) for number in range(count)]
    blocks += [hf.Block] * (layers - count)
    return qwen3.build_qwen3(config, block=blocks, key=key)


def _count_seeing_layers(config: hf.Config, tower: hf.Config) -> Mapping[str, Any]:
    return {"seeing_layers": len(tower["deepstack_visual_indexes"])}


QWEN3_VL = qwen2_vl.make_qwen_vl_family(
    "qwen3_vl",
    "Qwen3VLForConditionalGeneration",
    qwen3_vl_vision.QWEN3_VL_VISION,
    dataclasses.replace(qwen2_vl.section_rope(qwen3.QWEN3, "qwen3_vl_text"), build=_build_text),
    qwen3_vl_vision.build_qwen3_merger,
    qwen3_vl_vision.map_qwen3_merger,
    text_options=_count_seeing_layers,
)

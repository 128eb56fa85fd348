"""Qwen3-VL's encoder of images and films (arXiv:2511.21631, section 2): Qwen2-VL's with learned positions, and with
the outputs of several layers for the language model (DeepStack)."""

from functools import partial
from math import isqrt
from typing import Any

import jax
from jaxtyping import Array, Key

from zoo.layers import LayerNorm
from zoo.layers.encoders.mergers import DeepstackMerger, PatchMerger
from zoo.layers.encoders.packed_embedding import GridPositions
from zoo.models.encoders.deepstack import KeptBlock
from zoo.models.hf import grammar as hf

from . import qwen2_vl_vision
from .qwen2_vl_vision import EPSILON, QWEN2_VL_VISION

_DEEPSTACK = "deepstack_visual_indexes"


def build_qwen3_vision(config: hf.Config, *, key: Key[Array, ""]) -> hf.ImageEncoder:
    """Build the encoder. It keeps the outputs of the layers of `deepstack_visual_indexes` if the config has some.

    **Raises** `ConfigError` for positions that are no square, and for layers that are not there or not in order.
    """
    side = isqrt(config["num_position_embeddings"])
    if side**2 != config["num_position_embeddings"]:
        raise hf.ConfigError(
            f"num_position_embeddings = {config['num_position_embeddings']}: positions are learned on a square of "
            "patches"
        )
    numbers = range(config["num_hidden_layers"])
    chosen = config.get(_DEEPSTACK, ())
    kept = [number for number in numbers if number in chosen]
    if kept != list(chosen):
        raise hf.ConfigError(f"{_DEEPSTACK} = {list(chosen)} should be numbers of the {len(numbers)} layers, in order")
    key, position_key = jax.random.split(key)

    def make_kept(**parts: Any) -> KeptBlock:
        return KeptBlock(hf.Block(**parts), len(kept))

    return qwen2_vl_vision.build_qwen_vision(
        config,
        [(qwen2_vl_vision.make_qwen_attention(config), hf.make_mlp_factory(config))] * len(numbers),
        partial(LayerNorm, config["hidden_size"], epsilon=EPSILON),
        block=[make_kept if number in kept else hf.Block for number in numbers],
        bias=True,
        positions=GridPositions(side, config["hidden_size"], key=position_key),
        key=key,
    )


def build_qwen3_merger(config: hf.Config, *, key: Key[Array, ""]) -> DeepstackMerger:
    """Build the projector to the features of the language model."""
    key, *keys = jax.random.split(key, 1 + len(config[_DEEPSTACK]))
    sizes = config["hidden_size"], config["out_hidden_size"]
    options = {"merge": config["spatial_merge_size"], "joins_first": True}
    norm = partial(LayerNorm, epsilon=EPSILON)
    mergers = tuple(PatchMerger(*sizes, norm, **options, key=key) for key in keys)
    return DeepstackMerger(qwen2_vl_vision.build_qwen2_merger(config, key=key), mergers)


def map_qwen3_merger(config: hf.Config) -> hf.NameMap:
    """Map the tensors of the projector."""
    names = hf.prefixed("merger", "merger", MERGER_NAMES)
    for number in range(len(config[_DEEPSTACK])):
        names |= hf.prefixed(f"deepstack_merger_list.{number}", f"deepstack.{number}", MERGER_NAMES)
    return names


def map_qwen3_names(config: hf.Config) -> hf.NameMap:
    """Map the tensors of the encoder."""
    mlp = {"linear_fc1": "up", "linear_fc2": "down"}
    return {
        "pos_embed": "embedding.positions",
        **qwen2_vl_vision.map_qwen_names(config, mlp="mlp", mlp_names=mlp),
    }


MERGER_NAMES: hf.NameMap = {"norm": "norm", "linear_fc1": "up", "linear_fc2": "down"}
_DEFAULTS: dict[str, Any] = {
    **hf.omit(QWEN2_VL_VISION.declared, "mlp_ratio"),
    "num_hidden_layers": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "hidden_act": "gelu_pytorch_tanh",
    "patch_size": 16,
    "num_position_embeddings": 2304,
    _DEEPSTACK: hf.Default((8, 16, 24), hf.list_of(hf.integer(minimum=0))),
}
QWEN3_VL_VISION = hf.Family(
    name="qwen3_vl_vision",
    architecture="Qwen3VLVisionModel",
    build=build_qwen3_vision,
    names=map_qwen3_names,
    defaults=_DEFAULTS,
    aliases=hf.omit(QWEN2_VL_VISION.aliases, "embed_dim", "hidden_size"),
    required_values=hf.ONLY_BIDIRECTIONAL,
    ignored_keys=QWEN2_VL_VISION.ignored_keys,
)

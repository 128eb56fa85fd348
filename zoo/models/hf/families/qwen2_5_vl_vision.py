"""Qwen2.5-VL's encoder of images and films (Bai et al., arXiv:2502.13923, section 2.1.1): Qwen2-VL's with RMS norms and
gated MLPs, and with windows of patches in all but a few layers."""

from functools import partial
from typing import Any

from jaxtyping import Array, Key

from zoo.layers import RMSNorm
from zoo.layers.encoders.mergers import PatchMerger
from zoo.models.hf import grammar as hf

from . import llama, qwen2_vl_vision
from .qwen2_vl_vision import EPSILON, QWEN2_VL_VISION


def _build_qwen2_5_vl_vision(config: hf.Config, *, key: Key[Array, ""]) -> hf.ImageEncoder:
    merge = config["spatial_merge_size"]
    window = config["window_size"] // merge // config["patch_size"] * merge
    if not window:
        raise hf.ConfigError(
            f"window_size = {config['window_size']} pixels is smaller than a block of {merge} x {merge} patches of "
            f"{config['patch_size']} pixels"
        )
    ffn = hf.make_gated_mlp_factory(config, bias=True)
    full, windowed = (
        (qwen2_vl_vision.make_qwen_attention(config, within_windows=within), ffn) for within in (False, True)
    )
    numbers = range(config["num_hidden_layers"])
    layers = [full if number in config["fullatt_block_indexes"] else windowed for number in numbers]
    norm = partial(RMSNorm, config["hidden_size"], epsilon=EPSILON)
    return qwen2_vl_vision.build_qwen_vision(config, layers, norm, window=window, key=key)


def build_qwen2_5_merger(config: hf.Config, *, key: Key[Array, ""]) -> PatchMerger:
    """Build the projector to the features of the language model."""
    return qwen2_vl_vision.build_qwen2_merger(config, norm=RMSNorm, key=key)


_NUMBERS = hf.list_of(hf.integer(minimum=0))
_DEFAULTS: dict[str, Any] = {
    **hf.omit(QWEN2_VL_VISION.declared, "mlp_ratio"),
    "hidden_size": 3584,
    "intermediate_size": 3420,
    "hidden_act": "silu",
    "window_size": 112,
    "fullatt_block_indexes": hf.Default((7, 15, 23, 31), _NUMBERS),
}
QWEN2_5_VL_VISION = hf.Family(
    name="qwen2_5_vl_vision",
    architecture="Qwen2_5_VisionTransformerPretrainedModel",
    build=_build_qwen2_5_vl_vision,
    names=partial(qwen2_vl_vision.map_qwen_names, mlp="gated_mlp", mlp_names=llama.GATED_MLP_NAMES),
    defaults=_DEFAULTS,
    aliases=hf.omit(QWEN2_VL_VISION.aliases, "embed_dim", "hidden_size"),
    required_values=hf.ONLY_BIDIRECTIONAL,
    ignored_keys=QWEN2_VL_VISION.ignored_keys | {"tokens_per_second"},
)

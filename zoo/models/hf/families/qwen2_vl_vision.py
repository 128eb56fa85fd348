"""Qwen2-VL's encoder of images and films (Wang et al., arXiv:2409.12191): a vision Transformer with two-dimensional
RoPE, and the merger of 2 x 2 patches."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from jaxtyping import Array, Key

from zoo.layers import IdentityNorm, LayerNorm
from zoo.layers.encoders.mergers import PatchMerger
from zoo.layers.encoders.packed_embedding import PackedImageEmbedding
from zoo.models.hf import grammar as hf

EPSILON = 1e-6
"""Epsilon of all norms. Configs do not have it."""


def _build_qwen2_vl_vision(config: hf.Config, *, key: Key[Array, ""]) -> hf.ImageEncoder:
    sized = hf.Config(config, intermediate_size=config["mlp_ratio"] * config["hidden_size"])
    layer = (make_qwen_attention(config), hf.make_mlp_factory(sized))
    layers = [layer] * config["num_hidden_layers"]
    return build_qwen_vision(config, layers, partial(LayerNorm, config["hidden_size"], epsilon=EPSILON), key=key)


def make_qwen_attention(config: hf.Config, **options: Any) -> Callable[..., Any]:
    """Return a factory of the attention of a layer, with these options of `BidirectionalAttention`."""
    rotary = hf.build_axial_rotary(config)
    return hf.make_bidirectional_attention_factory(config, rotary=rotary, bias=True, out_bias=True, **options)


def build_qwen_vision(
    config: hf.Config,
    layers: Sequence[hf.LayerFactories],
    norm: Callable[[], Any],
    *,
    block: Any = hf.Block,
    key: Key[Array, ""],
    **options: Any,
) -> hf.ImageEncoder:
    """Build the encoder of a Qwen model from its layers; `options` are of the embedding."""
    pixels = config["num_channels"] * config["temporal_patch_size"] * config["patch_size"] ** 2
    options = {"merge": config["spatial_merge_size"], **options}
    return hf.build_image_encoder(
        embedding=partial(PackedImageEmbedding, pixels, config["hidden_size"], **options),
        layers=layers,
        norm=norm,
        final_norm=IdentityNorm,
        head=hf.make_feature_head_factory(),
        block=block,
        key=key,
    )


def build_qwen2_merger(config: hf.Config, *, norm: Callable[..., Any] = LayerNorm, key: Key[Array, ""]) -> PatchMerger:
    """Build the projector to the features of the language model, with a class of norms."""
    sizes = config["hidden_size"], config["out_hidden_size"]
    return PatchMerger(*sizes, partial(norm, epsilon=EPSILON), merge=config["spatial_merge_size"], key=key)


def map_qwen_names(config: hf.Config, *, mlp: str, mlp_names: hf.NameMap) -> hf.NameMap:
    """Map the tensors of the encoder of a Qwen model, with feed-forward layers that have this name here."""
    side = config["patch_size"]
    dims = (config["num_channels"], config["temporal_patch_size"], side, side)
    layer = {
        "norm1": "mixer_norm",
        "norm2": "ffn_norm",
        **hf.prefixed("attn", "bidirectional_attention", {"qkv": hf.fused("query", "key", "value"), "proj": "out"}),
        **hf.prefixed("mlp", mlp, mlp_names),
    }
    return {
        "patch_embed.proj": hf.TensorMapping(("embedding.patches",), in_dims=dims),
        **hf.prefixed("blocks.*", "layers.*", layer),
    }


def map_qwen2_merger(config: hf.Config) -> hf.NameMap:
    """Map the tensors of the projector."""
    return {"merger.ln_q": "norm", "merger.mlp.0": "up", "merger.mlp.2": "down"}


QWEN2_VL_VISION = hf.Family(
    name="qwen2_vl_vision",
    architecture="Qwen2VisionTransformerPretrainedModel",
    build=_build_qwen2_vl_vision,
    names=partial(map_qwen_names, mlp="mlp", mlp_names={"fc1": "up", "fc2": "down"}),
    defaults={
        "num_hidden_layers": 32,
        "hidden_size": 1280,
        "out_hidden_size": 3584,
        "hidden_act": "quick_gelu",
        "mlp_ratio": 4,
        "num_attention_heads": 16,
        "num_channels": 3,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "rope_parameters": {"rope_type": "axial", "rope_theta": 10_000.0},
    },
    aliases={
        "depth": "num_hidden_layers",
        "num_heads": "num_attention_heads",
        "in_channels": "num_channels",
        "embed_dim": "hidden_size",
        "hidden_size": "out_hidden_size",
    },
    required_values=hf.ONLY_BIDIRECTIONAL,
    ignored_keys=frozenset({"in_chans", "spatial_patch_size"}),
)

"""Gated linear attention (Yang et al., arXiv:2312.06635) as flash-linear-attention stores it.

Its families without a delta rule share the sizes, names and descriptions here.
"""

from functools import partial
from typing import Any

import jax
from jaxtyping import Array, Key

from zoo.layers import GatedLinearAttention
from zoo.layers.recurrent.common import head_norm_factory
from zoo.models.hf import grammar as hf

from .gated_deltanet import (
    HYBRID_DEFAULTS,
    SHARED_FACTS,
    build_fla_decoder,
    describe_fla_decoder,
    map_fla_names,
    multiply_size,
)

_FEATURE_MAPS = {"swish": jax.nn.silu, "silu": jax.nn.silu, "relu": jax.nn.relu}


def read_sizes(config: hf.Config) -> dict[str, Any]:
    """Return the sizes of heads and the norm of each, as options of a mixer. **Raises** `ConfigError` for features that
    do not divide evenly over the heads, and heads over `num_kv_heads`."""
    heads, kv_heads = config["num_heads"], config["num_kv_heads"]
    if heads % (kv_heads or heads):
        raise hf.ConfigError(f"num_heads = {heads} heads do not divide evenly over num_kv_heads = {kv_heads}")
    sizes = {name: multiply_size(config, config["hidden_size"], name) for name in ("expand_k", "expand_v")}
    for name, size in sizes.items():
        if size % heads:
            raise hf.ConfigError(f"{name} makes {size} features, which do not divide evenly over num_heads = {heads}")
    value_dim = sizes["expand_v"] // heads
    return {
        "heads": heads,
        "kv_heads": None if kv_heads == heads else kv_heads,
        "key_dim": sizes["expand_k"] // heads,
        "value_dim": value_dim,
        "norm": head_norm_factory(value_dim, config["rms_norm_eps"], config["elementwise_affine"]),
        "out_scale": hf.compute_out_scale(config),
    }


def describe_sizes(mixer: Any, embed: int) -> dict[str, Any]:
    """Return the config keys of heads and their norm. **Raises** `ConfigError` for a mixer without a norm."""
    inputs, norm = mixer.projections, mixer.readout.norm
    if norm is None:
        raise hf.ConfigError("its mixer has no norm of each head's output, and files have one")
    heads = inputs.query.out_size // inputs.key_dim
    return {
        "num_heads": heads,
        "num_kv_heads": heads // inputs.group,
        "expand_k": heads * inputs.key_dim / embed,
        "expand_v": heads * inputs.value_dim / embed,
        "elementwise_affine": norm.weight is not None,
        "use_output_gate": mixer.readout.gate is not None,
    }


def describe_convolutions(mixer: Any) -> dict[str, Any]:
    """Return the config keys of short convolutions."""
    convolutions = mixer.projections.convolutions
    return {"use_short_conv": bool(convolutions), "conv_size": convolutions[0].width if convolutions else 4}


def find_feature_map(config: hf.Config) -> Any:
    """Return the feature map of queries and keys, or None."""
    return _FEATURE_MAPS.get(config["feature_map"])


def describe_feature_map(mixer: Any) -> dict[str, Any]:
    """Return the name of a feature map. **Raises** `ConfigError` for one without a name."""
    names = [name for name, function in {**_FEATURE_MAPS, None: None}.items() if function is mixer.feature_map]
    if not names:
        raise hf.ConfigError(f"no config has a word for the feature map {mixer.feature_map}")
    return {"feature_map": names[0]}


PROJECTION_NAMES: hf.NameMap = {
    "q_proj": "projections.query",
    "k_proj": "projections.key",
    "v_proj": "projections.value",
    "o_proj": "readout.out",
}
CONVOLUTION_NAMES: hf.NameMap = {
    f"{part}_conv1d": hf.fused(f"projections.convolutions.{number}", conv1d_filters=True)
    for number, part in enumerate("qkv")
}


def map_gate_names(config: hf.Config) -> hf.NameMap:
    """Return the names of the output gate and its norm, which has another name where fla computes both at once."""
    is_fused = config["use_output_gate"] and config["fuse_norm"]
    return {"g_proj": "readout.gate", "g_norm_swish_gate" if is_fused else "g_norm": "readout.norm"}


def _build_gla(config: hf.Config, *, key: Key[Array, ""]) -> hf.Decoder:
    mixer = partial(
        GatedLinearAttention,
        config["hidden_size"],
        **read_sizes(config),
        conv_width=config["conv_size"] if config["use_short_conv"] else None,
        feature_map=find_feature_map(config),
        min_log_decay=config["clamp_min"],
        gate=config["use_output_gate"],
    )
    return build_fla_decoder(config, mixer, key=key)


def _map_gla_names(config: hf.Config) -> hf.NameMap:
    decay = {"gk_proj.0": "decay.down", "gk_proj.1": "decay.up"}
    names = {**PROJECTION_NAMES, **CONVOLUTION_NAMES, **map_gate_names(config), **decay}
    return map_fla_names("gated_linear_attention", names)


def _describe_gla(model: Any) -> dict[str, Any]:
    config, mixer = describe_fla_decoder(model, GatedLinearAttention)
    return {
        **config,
        **describe_sizes(mixer, config["hidden_size"]),
        **describe_feature_map(mixer),
        **describe_convolutions(mixer),
        "clamp_min": mixer.min_log_decay,
    }


DEFAULTS: dict[str, Any] = {
    **HYBRID_DEFAULTS,
    "num_heads": 4,
    "num_kv_heads": hf.optional_count(),
    "expand_k": hf.Default(1.0, hf.POSITIVE_NUMBER),
    "expand_v": hf.Default(1.0, hf.POSITIVE_NUMBER),
    "elementwise_affine": True,
}
CONVOLUTION_DEFAULTS = {"use_short_conv": False, "conv_size": 4}
GATE_DEFAULTS: dict[str, Any] = {
    "feature_map": hf.Default(
        None, hf.ValueKind("null, swish, silu or relu", lambda x: x is None or (hf.WORD.fits(x) and x in _FEATURE_MAPS))
    ),
    "use_output_gate": True,
    "fuse_norm": True,
}
GATE_FACTS = {**SHARED_FACTS, "ignored_keys": SHARED_FACTS["ignored_keys"] - {"fuse_norm"}}

GLA = hf.Family(
    name="gla",
    architecture="GLAForCausalLM",
    build=_build_gla,
    names=_map_gla_names,
    defaults={
        **DEFAULTS,
        **GATE_DEFAULTS,
        **CONVOLUTION_DEFAULTS,
        "expand_k": hf.Default(0.5, hf.POSITIVE_NUMBER),
        "clamp_min": hf.Default(None, hf.optional(hf.NUMBER)),
    },
    describe=_describe_gla,
    **{**GATE_FACTS, "ignored_keys": GATE_FACTS["ignored_keys"] | {"use_gk", "use_gv"}},
)

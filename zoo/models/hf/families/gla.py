"""Gated linear attention (Yang et al., arXiv:2312.06635) as flash-linear-attention stores it.

Its families without a delta rule share the sizes, names and descriptions here.
"""

from functools import partial
from typing import Any

import jax

from zoo.layers import GatedLinearAttention
from zoo.layers.recurrent.common import elu_plus_one, head_norm_factory
from zoo.models.hf import grammar as hf

from . import gated_deltanet

_FEATURE_MAPS = {
    None: None,
    "elementwise_product": None,
    "swish": jax.nn.silu,
    "relu": jax.nn.relu,
    "elu": elu_plus_one,
    "identity": jax.nn.identity,
}
"""By their words in configs; None is a learned one where it is not the identity."""


def choose_feature_map(*words: str | None) -> hf.Default:
    """Return the first of these words as a default, and all of them as the values of its key."""
    listed = ", ".join(word or "null" for word in words)
    is_listed = hf.ValueKind(f"one of {listed}", lambda x: (x is None or hf.WORD.fits(x)) and x in words)
    return hf.Default(words[0], is_listed)


def read_options(config: hf.Config) -> dict[str, Any]:
    """Return the options of a mixer. **Raises** `ConfigError` for features that do not divide evenly over the heads,
    and heads over `num_kv_heads`."""
    heads = config["num_heads"]
    kv_heads = config["num_kv_heads"]
    if heads % (kv_heads or heads):
        raise hf.ConfigError(f"num_heads = {heads} heads do not divide evenly over num_kv_heads = {kv_heads}")
    sizes = {}
    for option, key in {"key_dim": "expand_k", "value_dim": "expand_v"}.items():
        size = gated_deltanet.multiply_size(config, config["hidden_size"], key)
        if size % heads:
            raise hf.ConfigError(f"{key} makes {size} features, which do not divide evenly over num_heads = {heads}")
        sizes[option] = size // heads
    if "use_short_conv" in config:
        sizes["conv_width"] = config["conv_size"] if config["use_short_conv"] else None
    if "use_output_gate" in config:
        sizes["gate"] = config["use_output_gate"]
    return {
        "embed": config["hidden_size"],
        "heads": heads,
        "kv_heads": None if kv_heads == heads else kv_heads,
        **sizes,
        "norm": head_norm_factory(sizes["value_dim"], config["rms_norm_eps"], config["elementwise_affine"]),
        "feature_map": _FEATURE_MAPS[config["feature_map"]],
        "out_scale": hf.compute_out_scale(config),
    }


def describe_mixer(mixer: Any) -> dict[str, Any]:
    """Return the config keys of a mixer, of all families. **Raises** `ConfigError` for a mixer without a norm, and for
    a feature map without a word."""
    inputs = mixer.projections
    norm = mixer.readout.norm
    embed = mixer.readout.out.out_size
    feature_map = getattr(mixer, "feature_map", None)
    words = [word for word, function in _FEATURE_MAPS.items() if function is feature_map]
    if norm is None or not words:
        lacking = "norm of each head's output, which files have" if norm is None else f"word in configs: {feature_map}"
        raise hf.ConfigError(f"its mixer has no {lacking}")
    heads = inputs.query.out_size // inputs.key_dim
    return {
        "num_heads": heads,
        "num_kv_heads": heads // inputs.group,
        "expand_k": heads * inputs.key_dim / embed,
        "expand_v": heads * inputs.value_dim / embed,
        "elementwise_affine": norm.weight is not None,
        "use_output_gate": mixer.readout.gate is not None,
        "use_short_conv": bool(inputs.convolutions),
        "conv_size": inputs.convolutions[0].width if inputs.convolutions else 4,
        "feature_map": words[0],
        "clamp_min": getattr(mixer, "min_log_decay", None),
    }


def map_convolution_names(letters: str) -> hf.NameMap:
    """Return the names of the short convolutions of queries, keys and values."""
    path = "projections.convolutions"
    return {f"{x}_conv1d": hf.fused(f"{path}.{n}", conv1d_filters=True) for n, x in enumerate(letters)}


NAMES: hf.NameMap = {
    "q_proj": "projections.query",
    "k_proj": "projections.key",
    "v_proj": "projections.value",
    "o_proj": "readout.out",
    "g_proj": "readout.gate",
    **map_convolution_names("qkv"),
}


def map_gated_names(config: hf.Config) -> hf.NameMap:
    """Return the names with the name of the norm, which is another where fla computes norm and gate at once."""
    is_fused = config["use_output_gate"] and config["fuse_norm"]
    return {**NAMES, "g_norm_swish_gate" if is_fused else "g_norm": "readout.norm"}


SIZE_DEFAULTS: dict[str, Any] = {
    **gated_deltanet.HYBRID_DEFAULTS,
    "num_heads": 4,
    "num_kv_heads": hf.optional_count(),
    "expand_k": hf.Default(1.0, hf.POSITIVE_NUMBER),
    "expand_v": hf.Default(1.0, hf.POSITIVE_NUMBER),
    "elementwise_affine": True,
}
CONVOLUTION_DEFAULTS = {"use_short_conv": False, "conv_size": 4}
GATED_DEFAULTS: dict[str, Any] = {
    **SIZE_DEFAULTS,
    "feature_map": choose_feature_map(None, "swish", "relu"),
    "use_output_gate": True,
    "fuse_norm": True,
}

GLA = gated_deltanet.make_fla_family(
    "gla",
    "GLAForCausalLM",
    GatedLinearAttention,
    factory=lambda config: partial(GatedLinearAttention, **read_options(config), min_log_decay=config["clamp_min"]),
    names=lambda config: {**map_gated_names(config), "gk_proj.0": "decay.down", "gk_proj.1": "decay.up"},
    describe=describe_mixer,
    defaults={
        **GATED_DEFAULTS,
        **CONVOLUTION_DEFAULTS,
        "expand_k": hf.Default(0.5, hf.POSITIVE_NUMBER),
        "clamp_min": hf.Default(None, hf.optional(hf.NUMBER)),
    },
    ignored={"use_gk", "use_gv"},
)

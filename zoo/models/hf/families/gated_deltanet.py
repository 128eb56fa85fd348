"""Gated DeltaNet (Yang et al., arXiv:2412.06464) as flash-linear-attention stores it, and what its families share:
pre-norm layers of a mixer `attn` and a SwiGLU, with softmax attention in the layers that the key `attn` lists."""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
from jaxtyping import Array, Key

from zoo.layers import Attention, GatedDeltaNet, GatedMLP, RMSNorm
from zoo.models.hf import grammar as hf
from zoo.ops.rotary import Rotary

from . import kimi_linear, llama


def build_fla_decoder(
    config: hf.Config, mixer: Callable[..., Any], *, key: Key[Array, ""], **options: Any
) -> hf.Decoder:
    """Build the model of a config, with `mixer` in the layers that `attn` does not list."""
    ffn = hf.make_gated_mlp_factory(config, width=_read_width(config))
    layers = [(layer_mixer, ffn) for layer_mixer in _list_mixers(config, mixer)]
    return hf.build_config_decoder(config, layers, hf.make_rms_norm_factory(config), key=key, **options)


def _read_width(config: hf.Config) -> int:
    """Return `intermediate_size`; by default 2/3 hidden_ratio hidden_size, rounded up to a multiple of 256."""
    width = int(config["hidden_size"] * (config["hidden_ratio"] or 4) * 2 / 3)
    return config["intermediate_size"] or 256 * math.ceil(width / 256)


def _list_mixers(config: hf.Config, mixer: Callable[..., Any]) -> list[Callable[..., Any]]:
    """Return the mixer factory of each layer. **Raises** `ConfigError` for an `attn` that lists a layer twice, or one
    that is not there."""
    mixers = [mixer] * config["num_hidden_layers"]
    tables = config.get("attn")
    if not isinstance(tables, list):
        tables = [] if tables is None else [tables]
    for table in tables:
        given = hf.read_config(_ATTENTION, table, ignore=None)
        sizes = {"num_attention_heads": given["num_heads"], "num_key_value_heads": given["num_kv_heads"]}
        sizes = hf.Config({**config, **sizes, "head_dim": None})
        rotary = build_fla_rotary(hf.read_head_sizes(sizes)[2], given["rope_theta"])
        options = {"rotary": rotary, "window": given["window_size"], "bias": given["qkv_bias"]}
        attention = hf.make_attention_factory(sizes, **options)
        for number in given["layers"]:
            if number >= len(mixers) or mixers[number] is not mixer:
                raise hf.ConfigError(f"attn lists layer {number}, which is listed before or not one of {len(mixers)}")
            mixers[number] = attention
    return mixers


def build_fla_rotary(head_dim: int, base: float) -> Rotary:
    """Build RoPE over all channels of a head. **Raises** `ConfigError` for an odd number of them."""
    if head_dim % 2:
        raise hf.ConfigError(f"rotary embeddings turn pairs of values, and heads have {head_dim}")
    return Rotary(head_dim, base)


def multiply_size(config: hf.Config, size: int, factor: str) -> int:
    """Return `size` times the value of a key. **Raises** `ConfigError` unless that is a whole number."""
    product = size * config[factor]
    if not round(product) or not math.isclose(round(product), product, rel_tol=1e-5):
        raise hf.ConfigError(f"{factor} = {config[factor]}: times {size} it should be a whole number above 0")
    return round(product)


def read_groups(config: hf.Config) -> tuple[int, int | None]:
    """Return the number of heads, and of groups that share queries and keys; None for a query of each head.

    **Raises** `ConfigError` unless `num_heads` divides `num_v_heads`.
    """
    groups = config["num_heads"]
    heads = config["num_v_heads"] or groups
    if heads % groups:
        raise hf.ConfigError(f"num_v_heads = {heads} heads do not divide evenly over num_heads = {groups}")
    return heads, None if heads == groups else groups


def map_fla_names(path: str, mixer: hf.NameMap) -> hf.NameMap:
    """Return the name map of a model, given the names of its mixer `path`, and those of attention beside it."""
    mixers = hf.either(hf.prefixed("", "attention", llama.ATTENTION_NAMES), hf.prefixed("", path, mixer))
    block = {
        "attn_norm": "mixer_norm",
        "mlp_norm": "ffn_norm",
        **hf.prefixed("attn", "", mixers),
        **hf.prefixed("mlp", "gated_mlp", llama.GATED_MLP_NAMES),
    }
    shell = {"model.embeddings": "embedding", "model.norm": "norm", "lm_head": "head"}
    return {**shell, **hf.prefixed("model.layers.*", "layers.*", block)}


def describe_fla_decoder(model: Any, mixer_type: type, block_type: type = hf.Block) -> tuple[dict[str, Any], Any]:
    """Return the config keys that do not depend on the mixer, and the first mixer of this class.

    **Raises** `ConfigError` for other classes of layers.
    """
    model, blocks = hf.eval_shape_blocks(model)
    first = blocks[0]
    for name, part, expected in (("block", first, block_type), ("ffn", getattr(first, "ffn", None), GatedMLP)):
        hf.check_type(name, part, expected)
    hf.check_type("mixer_norm", first.mixer_norm, RMSNorm)
    mixers = [getattr(block, "mixer", None) for block in blocks]
    mixer = next((x for x in mixers if isinstance(x, mixer_type)), mixers[0])
    hf.check_type("mixer", mixer, mixer_type)
    vocab, embed = model.embedding.table_shape
    return {
        "vocab_size": vocab,
        "hidden_size": embed,
        "num_hidden_layers": len(blocks),
        "intermediate_size": first.ffn.gate.out_size,
        "rms_norm_eps": first.mixer_norm.epsilon,
        "tie_word_embeddings": model.head is None,
        "attn": _describe_attention(mixers),
    }, mixer


def _describe_attention(mixers: list[Any]) -> Any:
    """Return `attn`, with a table for each kind of attention. **Raises** `ConfigError` for attention without RoPE."""
    tables: dict[str, dict[str, Any]] = {}
    for number, mixer in enumerate(mixers):
        if not isinstance(mixer, Attention):
            continue
        if mixer.rotary is None:
            raise hf.ConfigError("its attention does not turn queries and keys by their positions")
        table = {
            "num_heads": mixer.query.out_size // mixer.head_dim,
            "num_kv_heads": mixer.key.out_size // mixer.head_dim,
            "qkv_bias": hf.has_bias(mixer.query),
            "window_size": mixer.window,
            "rope_theta": mixer.rotary.base,
        }
        tables.setdefault(repr(table), {**table, "layers": []})["layers"].append(number)
    if len(tables) > 1:
        return list(tables.values())
    return next(iter(tables.values()), None)


_GATES = {"swish": jax.nn.silu, "silu": jax.nn.silu, "sigmoid": jax.nn.sigmoid}


def _build_gated_deltanet(config: hf.Config, *, key: Key[Array, ""]) -> hf.Decoder:
    if config["output_gate_activation"] not in _GATES:
        raise hf.ConfigError(
            f"output_gate_activation = {config['output_gate_activation']!r} should be one of {[*_GATES]}"
        )
    heads, groups = read_groups(config)
    mixer = partial(
        GatedDeltaNet,
        config["hidden_size"],
        heads,
        groups=groups,
        key_dim=config["head_dim"],
        value_dim=multiply_size(config, config["head_dim"], "expand_v"),
        conv_width=config["conv_size"] if config["use_short_conv"] else None,
        negative_eigenvalues=config["allow_neg_eigval"],
        gate=config["use_gate"],
        gate_activation=_GATES[config["output_gate_activation"]],
        epsilon=config["rms_norm_eps"],
        out_scale=hf.compute_out_scale(config),
    )
    return build_fla_decoder(config, mixer, key=key)


DELTA_NAMES: hf.NameMap = {
    **kimi_linear.PROJECTION_NAMES,
    **kimi_linear.CONVOLUTION_NAMES,
    "g_proj": "readout.gate",
    "o_norm": "readout.norm",
    "o_proj": "readout.out",
}
DECAY_NAMES: hf.NameMap = {"a_proj": "decay.step", "A_log": "decay.A_log", "dt_bias": "decay.bias"}


def _map_gated_deltanet_names(config: hf.Config) -> hf.NameMap:
    return map_fla_names("gated_delta_net", {**DELTA_NAMES, **DECAY_NAMES})


def describe_delta_inputs(mixer: Any) -> dict[str, Any]:
    """Return the config keys of a delta rule: sizes, convolutions, betas."""
    inputs = mixer.corrector
    projections = inputs.projections
    key_dim = projections.key_dim
    groups = projections.query.out_size // key_dim
    convolutions = projections.convolutions
    return {
        "head_dim": key_dim,
        "num_heads": groups,
        "num_v_heads": None if inputs.group == 1 else groups * inputs.group,
        "expand_v": projections.value_dim / key_dim,
        "use_short_conv": bool(convolutions),
        "conv_size": convolutions[0].width if convolutions else 4,
        "allow_neg_eigval": inputs.max_beta == 2,
        **dict.fromkeys(("use_gate", "use_output_gate"), mixer.readout.gate is not None),
    }


def _describe_gated_deltanet(model: Any) -> dict[str, Any]:
    config, mixer = describe_fla_decoder(model, GatedDeltaNet)
    gate = next((name for name, activation in _GATES.items() if activation is mixer.readout.activation), "swish")
    return config | describe_delta_inputs(mixer) | {"output_gate_activation": gate}


_ATTENTION = hf.Family(
    name="a table of attn",
    architecture="",
    build=_build_gated_deltanet,
    names=_map_gated_deltanet_names,
    defaults={
        "layers": hf.Default([], hf.list_of(hf.integer(minimum=0))),
        "num_heads": 32,
        "num_kv_heads": hf.optional_count(),
        "qkv_bias": False,
        "window_size": hf.optional_count(),
        "rope_theta": hf.Default(10000.0, hf.POSITIVE_NUMBER),
    },
    ignored_keys=frozenset({"qk_norm"}),  # fla keeps it in the file, and makes no norm of it
)
"""A table of the key `attn`, read as a config of its own."""


def _is_table(value: Any) -> bool:
    return isinstance(value, Mapping) and value.keys() >= {"layers", "num_heads"}


def _is_attn(value: Any) -> bool:
    return value is None or _is_table(value) or (isinstance(value, list) and value != [] and all(map(_is_table, value)))


SHARED_DEFAULTS: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 2048,
    "num_hidden_layers": 24,
    "hidden_ratio": hf.optional_count(4),
    "intermediate_size": hf.optional_count(),
    "hidden_act": "swish",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
"""Keys of every family of flash-linear-attention with SwiGLUs, with the usual defaults."""
HYBRID_DEFAULTS: dict[str, Any] = {
    **SHARED_DEFAULTS,
    "attn": hf.Default(
        None,
        hf.ValueKind("null, or a table with layers and num_heads, or a list of such tables", _is_attn),
    ),
}
"""Keys of those with softmax attention in some layers."""
SHARED_FACTS: dict[str, Any] = {
    "embedding": "model.embeddings",
    "aliases": {"norm_eps": "rms_norm_eps"},
    "required_values": {"hidden_act": ("swish",), "attnres_block_size": (None,)},
    # kernels, the length in training, and a loss that adds 1e-4 of the largest logit to gradients only
    "ignored_keys": frozenset(
        """
        attn_mode fuse_norm fuse_swiglu fuse_cross_entropy fuse_linear_cross_entropy max_position_embeddings use_l2warp
        """.split()
    ),
}
"""Facts of every family of flash-linear-attention."""

GATED_DELTANET = hf.Family(
    name="gated_deltanet",
    architecture="GatedDeltaNetForCausalLM",
    build=_build_gated_deltanet,
    names=_map_gated_deltanet_names,
    defaults={
        **HYBRID_DEFAULTS,
        "num_hidden_layers": 21,
        "head_dim": 256,
        "num_heads": 6,
        "num_v_heads": hf.optional_count(),
        "expand_v": hf.Default(2.0, hf.POSITIVE_NUMBER),
        "use_short_conv": True,
        "conv_size": 4,
        "allow_neg_eigval": False,
        "use_gate": True,
        "output_gate_activation": "swish",
    },
    describe=_describe_gated_deltanet,
    **SHARED_FACTS,
)

"""Gated DeltaNet (Yang et al., arXiv:2412.06464) as flash-linear-attention stores it, and what its families share:
pre-norm layers of a mixer `attn` and a SwiGLU, with softmax attention in the layers that the key `attn` lists."""

import math
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import jax
from jaxtyping import Array, Key

from zoo.layers import Attention, GatedDeltaNet, GatedMLP, RMSNorm
from zoo.models.hf import grammar as hf
from zoo.models.parameter_paths import to_snake_case
from zoo.ops.rotary import Rotary

from . import kimi_linear, llama


def make_fla_family(
    name: str,
    architecture: str,
    mixer: type,
    *,
    factory: Callable[[hf.Config], Callable[..., Any]],
    names: Callable[[hf.Config], hf.NameMap],
    describe: Callable[[Any], Mapping[str, Any]],
    defaults: Mapping[str, Any],
    required: Mapping[str, tuple] | None = None,
    ignored: Collection[str] = (),
) -> hf.Family:
    """Make a family, given the class of its mixer; functions of a config that return the factory of the mixer and its
    name map; a function of the mixer that returns its config keys; and keys as in `zoo.models.hf.spec.Family`."""

    def build(config: hf.Config, *, key: Key[Array, ""]) -> hf.Decoder:
        return build_fla_decoder(config, factory(config), key=key)

    def describe_decoder(model: Any) -> dict[str, Any]:
        config, described = describe_fla_decoder(model, mixer)
        return {**config, **describe(described)}

    return hf.Family(
        name=name,
        architecture=architecture,
        build=build,
        names=lambda config: map_fla_names(to_snake_case(mixer.__name__), names(config)),
        defaults=defaults,
        describe=describe_decoder,
        embedding="model.embeddings",
        package="fla",
        aliases={"norm_eps": "rms_norm_eps"},
        required_values={"hidden_act": ("swish",), "attnres_block_size": (None,), **(required or {})},
        ignored_keys=IGNORED_KEYS.union(ignored).difference(defaults),
    )


def build_fla_decoder(
    config: hf.Config, mixer: Callable[..., Any], *, key: Key[Array, ""], **options: Any
) -> hf.Decoder:
    """Build the model of a config, with `mixer` in the layers that `attn` does not list."""
    width = int(config["hidden_size"] * (config["hidden_ratio"] or 4) * 2 / 3)
    ffn = hf.make_gated_mlp_factory(config, width=config["intermediate_size"] or 256 * math.ceil(width / 256))
    layers = [(layer_mixer, ffn) for layer_mixer in _list_mixers(config, mixer)]
    return hf.build_config_decoder(config, layers, hf.make_rms_norm_factory(config), key=key, **options)


def _list_mixers(config: hf.Config, mixer: Callable[..., Any]) -> list[Callable[..., Any]]:
    """Return the mixer factory of each layer. **Raises** `ConfigError` for an `attn` that lists a layer twice, or one
    that is not there."""
    mixers = [mixer] * config["num_hidden_layers"]
    tables = config.get("attn") or []
    for table in tables if isinstance(tables, list) else [tables]:
        given = hf.read_config(_ATTENTION, table, ignore=None)
        sizes = name_heads(hf.Config({**config, **given, "head_dim": None}))
        attention = make_fla_attention_factory(sizes, window=given["window_size"])
        for number in given["layers"]:
            if number >= len(mixers) or mixers[number] is not mixer:
                raise hf.ConfigError(f"attn lists layer {number}, which is listed before or not one of {len(mixers)}")
            mixers[number] = attention
    return mixers


def name_heads(config: hf.Config) -> hf.Config:
    """Return a config with `num_heads` and `num_kv_heads` as `zoo.models.hf.builders` names them.

    **Raises** `ConfigError` unless they divide what they should.
    """
    heads = config["num_heads"]
    for key, size, divisor in (
        ("num_kv_heads", heads, config["num_kv_heads"] or heads),
        ("num_heads", config["hidden_size"], 1 if config.get("head_dim") else heads),
    ):
        if size % divisor:
            raise hf.ConfigError(f"{key} = {divisor} should divide {size}")
    return hf.Config(config, num_attention_heads=heads, num_key_value_heads=config["num_kv_heads"])


def make_fla_attention_factory(config: hf.Config, **options: Any) -> Callable[..., Any]:
    """Return a factory of attention, with RoPE over all channels of a head. **Raises** `ConfigError` for an odd number
    of channels."""
    head_dim = hf.read_head_sizes(config)[2]
    if head_dim % 2:
        raise hf.ConfigError(f"rotary embeddings turn pairs of values, and heads have {head_dim}")
    rotary = Rotary(head_dim, config["rope_theta"])
    return hf.make_attention_factory(config, rotary=rotary, bias=config["qkv_bias"], **options)


def map_fla_names(path: str, mixer: hf.NameMap) -> hf.NameMap:
    """Return the name map of a model, given the names of its mixer `path`. Attention beside it has its usual names."""
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
    hf.check_type("block", first, block_type)
    hf.check_type("ffn", first.ffn, GatedMLP)
    hf.check_type("mixer_norm", first.mixer_norm, RMSNorm)
    mixers = [getattr(block, "mixer", None) for block in blocks]
    mixer = next((x for x in mixers if isinstance(x, mixer_type)), mixers[0])
    hf.check_type("mixer", mixer, mixer_type)
    vocab, embed = model.embedding.table_shape
    tables: dict[str, dict[str, Any]] = {}
    for number, attention in enumerate(mixers):
        if isinstance(attention, Attention):
            table = {**hf.omit(describe_heads(attention), "head_dim", "qk_norm"), "window_size": attention.window}
            tables.setdefault(repr(table), {**table, "layers": []})["layers"].append(number)
    return {
        "vocab_size": vocab,
        "hidden_size": embed,
        "num_hidden_layers": len(blocks),
        "intermediate_size": first.ffn.gate.out_size,
        "rms_norm_eps": first.mixer_norm.epsilon,
        "tie_word_embeddings": model.head is None,
        "attn": list(tables.values()) or None,
    }, mixer


def describe_heads(mixer: Any) -> dict[str, Any]:
    """Return the config keys of the projections of attention, of its RoPE if it has one, and of its QK norm."""
    rope = {} if mixer.rotary is None else {"rope_theta": mixer.rotary.base}
    return {
        "num_heads": mixer.query.out_size // mixer.head_dim,
        "num_kv_heads": mixer.key.out_size // mixer.head_dim,
        "head_dim": mixer.head_dim,
        "qkv_bias": hf.has_bias(mixer.query),
        "qk_norm": mixer.query_norm is not None,
        **rope,
    }


_GATES = {"swish": jax.nn.silu, "silu": jax.nn.silu, "sigmoid": jax.nn.sigmoid}


def _make_gated_delta_net_factory(config: hf.Config) -> Callable[..., GatedDeltaNet]:
    gate = config["output_gate_activation"]
    if gate not in _GATES:
        raise hf.ConfigError(f"output_gate_activation = {gate!r} should be one of {', '.join(_GATES)}")
    return partial(
        GatedDeltaNet,
        **read_grouped_options(config),
        negative_eigenvalues=config["allow_neg_eigval"],
        gate=config["use_gate"],
        gate_activation=_GATES[gate],
    )


def read_grouped_options(config: hf.Config) -> dict[str, Any]:
    """Return the options that delta rules with `num_v_heads` share.

    **Raises** `ConfigError` unless `num_heads` divides `num_v_heads`.
    """
    groups = config["num_heads"]
    heads = config["num_v_heads"] or groups
    if heads % groups:
        raise hf.ConfigError(f"num_v_heads = {heads} heads do not divide evenly over num_heads = {groups}")
    return {**read_delta_options(config), "heads": heads, "groups": None if heads == groups else groups}


def read_delta_options(config: hf.Config) -> dict[str, Any]:
    """Return the options that delta rules with a `head_dim` share."""
    return {
        "embed": config["hidden_size"],
        "heads": config["num_heads"],
        "key_dim": config["head_dim"],
        "value_dim": multiply_size(config, config["head_dim"], "expand_v"),
        "conv_width": config["conv_size"] if config["use_short_conv"] else None,
        "epsilon": config["rms_norm_eps"],
        "out_scale": hf.compute_out_scale(config),
    }


def multiply_size(config: hf.Config, size: int, factor: str) -> int:
    """Return `size` times the value of a key. **Raises** `ConfigError` unless that is a whole number."""
    product = size * config[factor]
    if not round(product) or not math.isclose(round(product), product, rel_tol=1e-5):
        raise hf.ConfigError(f"{factor} = {config[factor]}: times {size} it should be a whole number above 0")
    return round(product)


def describe_delta_rule(mixer: Any) -> dict[str, Any]:
    """Return the config keys of the families of delta rules with a `head_dim`."""
    inputs = mixer.corrector
    decay = getattr(mixer, "decay", None)
    key_dim = inputs.projections.key_dim
    convolutions = inputs.projections.convolutions
    groups = inputs.projections.query.out_size // key_dim
    gates = (name for name, activation in _GATES.items() if activation is mixer.readout.activation)
    return {
        "head_dim": key_dim,
        "num_heads": groups,
        "num_v_heads": None if inputs.group == 1 else groups * inputs.group,
        "expand_v": inputs.projections.value_dim / key_dim,
        "use_short_conv": bool(convolutions),
        "conv_size": convolutions[0].width if convolutions else 4,
        "allow_neg_eigval": inputs.max_beta == 2,
        "num_householder": inputs.num_householder,
        "use_forget_gate": decay is not None,
        "lower_bound": getattr(decay, "lower_bound", None),
        **dict.fromkeys(("use_gate", "use_output_gate"), mixer.readout.gate is not None),
        "output_gate_activation": next(gates, "swish"),
    }


DELTA_NAMES: hf.NameMap = {
    **kimi_linear.PROJECTION_NAMES,
    **kimi_linear.CONVOLUTION_NAMES,
    "g_proj": "readout.gate",
    "o_norm": "readout.norm",
    "o_proj": "readout.out",
}
DECAY_NAMES: hf.NameMap = {"a_proj": "decay.step", "A_log": "decay.A_log", "dt_bias": "decay.bias"}

_ATTENTION = hf.Family(
    name="a table of attn",
    architecture="",
    build=build_fla_decoder,
    names=lambda config: {},
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


# kernels, the length in training, and a loss that adds 1e-4 of the largest logit to gradients only
IGNORED_KEYS = frozenset(
    """
    attn_mode fuse_norm fuse_swiglu fuse_cross_entropy fuse_linear_cross_entropy max_position_embeddings use_l2warp
    """.split()
)
"""Keys that change nothing in any family of flash-linear-attention."""
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
ATTENTION_DEFAULTS: dict[str, Any] = {
    **SHARED_DEFAULTS,
    "num_heads": 32,
    "num_kv_heads": hf.optional_count(),
    "qkv_bias": False,
}
"""Keys of those with attention in every layer."""
HYBRID_DEFAULTS: dict[str, Any] = {
    **SHARED_DEFAULTS,
    "attn": hf.Default(
        None, hf.ValueKind("null, or a table with layers and num_heads, or a list of such tables", _is_attn)
    ),
}
"""Keys of those with softmax attention in some layers."""
DELTA_DEFAULTS: dict[str, Any] = {
    **HYBRID_DEFAULTS,
    "num_hidden_layers": 21,
    "head_dim": 256,
    "num_heads": 6,
    "num_v_heads": hf.optional_count(),
    "expand_v": hf.Default(2.0, hf.POSITIVE_NUMBER),
    "use_short_conv": True,
    "conv_size": 4,
}
"""Keys of those with a delta rule."""

GATED_DELTANET = make_fla_family(
    "gated_deltanet",
    "GatedDeltaNetForCausalLM",
    GatedDeltaNet,
    factory=_make_gated_delta_net_factory,
    names=lambda config: {**DELTA_NAMES, **DECAY_NAMES},
    describe=describe_delta_rule,
    defaults={**DELTA_DEFAULTS, "allow_neg_eigval": False, "use_gate": True, "output_gate_activation": "swish"},
)

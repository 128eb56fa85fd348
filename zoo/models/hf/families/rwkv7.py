"""RWKV-7 (Peng et al., arXiv:2503.14456) in the files of flash-linear-attention: time mixing with values of the first
layer, and channel mixing."""

import dataclasses
import math
from functools import partial
from typing import Any

from jaxtyping import Array, Key

from zoo.layers import RWKV7 as TimeMixing
from zoo.layers import LayerNorm
from zoo.models.hf import grammar as hf

from .rwkv7_layers import FirstValueBlock, FirstValueInputs
from .rwkv_layers import RWKVChannelMixing


def _build_rwkv7(config: hf.Config, *, key: Key[Array, ""]) -> hf.Decoder:
    embed = config["hidden_size"]
    head_dim = config["head_dim"] or embed // config["num_heads"]
    heads = embed // head_dim
    if heads * head_dim != embed or config["num_heads"] not in (None, heads):
        raise hf.ConfigError(f"num_heads = {config['num_heads']} heads of head_dim = {head_dim} are not {embed} wide")
    if any(size != embed for size in config["value_dim"] or ()):
        raise hf.ConfigError(f"value_dim = {config['value_dim']}, and values are hidden_size = {embed} wide")

    def read_rank(name: str, factor: float) -> int:
        return config[name] or max(32, round(factor * embed**0.5 / 32) * 32)

    by_head = head_dim / 64
    mixer = partial(
        TimeMixing,
        embed,
        heads,
        rank=read_rank("a_low_rank_dim", 2.5 * by_head),
        decay_rank=read_rank("decay_low_rank_dim", 2.5 * by_head),
        gate_rank=read_rank("gate_low_rank_dim", 5),
        epsilon=config["layer_norm_eps"],
        out_scale=hf.compute_out_scale(config),
    )
    later = partial(mixer, value_rank=read_rank("v_low_rank_dim", 1.7 * by_head))
    ffn = make_channel_mixing_factory(config)
    norm = hf.make_layer_norm_factory(config, bias=config["norm_bias"])
    count = config["num_hidden_layers"] - 1
    return hf.build_config_decoder(
        config,
        [(mixer, ffn), *[(later, ffn)] * count],
        norm,
        block=list_blocks(config, partial(FirstValueBlock, pre_norm=None), norm),
        layer_inputs=lambda key: FirstValueInputs(),
        key=key,
    )


def make_channel_mixing_factory(config: hf.Config, **options: Any) -> Any:
    """Return a factory of channel mixing. `intermediate_size` defaults to `hidden_ratio` times `hidden_size`, in
    multiples of 32."""
    width = config["intermediate_size"]
    if width is None:
        width = math.ceil(int(config["hidden_size"] * config["hidden_ratio"]) / 32) * 32
    return partial(RWKVChannelMixing, config["hidden_size"], width, out_scale=hf.compute_out_scale(config), **options)


def list_blocks(config: hf.Config, block: Any, norm: Any) -> list[Any]:
    """Return a factory of the block of each layer: the first may begin with a norm (`norm_first`)."""

    def make_first(**parts: Any) -> Any:
        return block(**parts, pre_norm=norm())

    first = make_first if config["norm_first"] else block
    return [first, *[block] * (config["num_hidden_layers"] - 1)]


_SHIFTS = {"x_r": 0, "x_w": 4, "x_k": 1, "x_v": 2, "x_a": 5, "x_g": 3}
_MIXING_NAMES: hf.NameMap = {
    "r_proj": "query",
    "k_proj": "key",
    "v_proj": "value",
    "o_proj": "out",
    "g_norm": "norm",
    "k_k": hf.TensorMapping(("removal",), flat=True),
    "k_a": hf.TensorMapping(("replacement",), flat=True),
    "r_k": "bonus",
    **{
        f"{letter}_lora.lora.{number}": f"{part}.{matrix}"
        for letter, part in {"w": "decay", "a": "rate", "g": "gate", "v": "value_residual"}.items()
        for number, matrix in {0: "down", 2: "up"}.items()
    },
}
_SHIFT_NAMES = {x: hf.TensorMapping((f"shifts.{n}.weight",), leading_ones=2) for x, n in _SHIFTS.items()}
_OLDER_SHIFT_NAMES = {"x_x": hf.TensorMapping(tuple(f"shifts.{n}.weight" for n in _SHIFTS.values()), stacked=True)}


def map_rwkv_layers(config: hf.Config, mixing: hf.NameMap, channel_mixing: hf.NameMap) -> hf.NameMap:
    """Return the name map of RWKV-6 and RWKV-7, given the names of time mixing and of channel mixing."""
    norms = {"pre_norm": "pre_norm", "attn_norm": "mixer_norm", "ffn_norm": "ffn_norm"}
    channel_mixing = hf.prefixed("ffn", "rwkv_channel_mixing", channel_mixing)
    block = {**norms, **hf.prefixed("attn", "", mixing), **channel_mixing}
    shell = {"embeddings": "embedding", "norm": "norm", **hf.prefixed("layers.*", "layers.*", block)}
    return {**hf.prefixed("model", "", shell), "lm_head": "head"}


def _map_rwkv7_names(config: hf.Config, shifts: hf.NameMap = _SHIFT_NAMES) -> hf.NameMap:
    mixing = hf.prefixed("", "rwkv7", {**_MIXING_NAMES, **shifts})
    return map_rwkv_layers(config, mixing, {"key": "key", "value": "value", "x_k": "key_shift.weight"})


def _describe_rwkv7(model: Any) -> dict[str, Any]:
    """Return the config of an RWKV-7 model. **Raises** `ConfigError` for other classes of layers."""
    config, (first, *later) = describe_rwkv(model, FirstValueBlock, TimeMixing)
    mixer = first.mixer
    residual = later[0].mixer.value_residual if later else None
    return config | {
        "head_dim": mixer.head_dim,
        "num_heads": mixer.query.out_size // mixer.head_dim,
        "a_low_rank_dim": mixer.rate.down.out_size,
        "decay_low_rank_dim": mixer.decay.down.out_size,
        "gate_low_rank_dim": mixer.gate.down.out_size,
        "v_low_rank_dim": None if residual is None else residual.down.out_size,
    }


def describe_rwkv(model: Any, block_type: type, mixer_type: type) -> tuple[dict[str, Any], tuple[Any, ...]]:
    """Return the config keys that RWKV-6 and RWKV-7 share, and the blocks. **Raises** `ConfigError` for other classes
    of layers."""
    model, blocks = hf.eval_shape_blocks(model)
    first = blocks[0]
    hf.check_type("mixer", getattr(first, "mixer", first), mixer_type)
    hf.check_type("ffn", first.ffn, RWKVChannelMixing)
    hf.check_type("block", first, block_type)
    hf.check_type("mixer_norm", first.mixer_norm, LayerNorm)
    vocab, embed = model.embedding.table_shape
    config = {
        "vocab_size": vocab,
        "hidden_size": embed,
        "intermediate_size": first.ffn.key.out_size,
        "num_hidden_layers": len(blocks),
        "layer_norm_eps": first.mixer_norm.epsilon,
        "norm_bias": first.mixer_norm.bias is not None,
        "norm_first": first.pre_norm is not None,
        "tie_word_embeddings": model.head is None,
    }
    return config, blocks


_VALUE_DIMS = hf.optional(hf.list_of(hf.COUNT))
IGNORED_KEYS = frozenset(
    """
    attn_mode max_position_embeddings fuse_norm fuse_cross_entropy fuse_linear_cross_entropy fuse_swiglu use_l2warp
    """.split()
)
"""Kernels of flash-linear-attention, the length of training, which nothing depends on, and a term of its loss."""
DEFAULTS: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 2048,
    "hidden_ratio": hf.optional_number(4.0),
    "intermediate_size": hf.optional_count(),
    "num_hidden_layers": 24,
    "norm_first": True,
    "norm_bias": True,
    "layer_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}

_OLDER = hf.Family(
    name="rwkv7",
    architecture="RWKV7ForCausalLM",
    build=_build_rwkv7,
    names=partial(_map_rwkv7_names, shifts=_OLDER_SHIFT_NAMES),
    defaults={
        **DEFAULTS,
        "head_dim": hf.optional_count(64),
        "num_heads": hf.optional_count(),
        "value_dim": hf.Default(None, _VALUE_DIMS),
        "a_low_rank_dim": hf.optional_count(64),
        "decay_low_rank_dim": hf.optional_count(64),
        "gate_low_rank_dim": hf.optional_count(128),
        "v_low_rank_dim": hf.optional_count(16),
    },
    aliases={"norm_eps": "layer_norm_eps"},
    required_values={"hidden_act": ("sqrelu",), "attn": (None,)},
    ignored_keys=IGNORED_KEYS,
    embedding="model.embeddings",
    describe=_describe_rwkv7,
    fits=lambda config, names: any(name.endswith(".attn.x_x") for name in names),
)
"""Files of early 2025, with all token shifts of a layer in one tensor."""
RWKV7 = dataclasses.replace(_OLDER, names=_map_rwkv7_names, variants=(_OLDER,))

"""RWKV-7 (Peng et al., arXiv:2503.14456) as flash-linear-attention stores it: time mixing with the values of the first
layer, and channel mixing."""

import dataclasses
import math
from functools import partial
from typing import Any

from jaxtyping import Array, Key

from zoo.layers import RWKV7 as TimeMixing
from zoo.layers import AbstractMixer, LayerNorm
from zoo.models.hf import grammar as hf

from .rwkv_layers import FirstValueInputs, RWKVChannelMixing, TwoMixerBlock


def build_rwkv(config: hf.Config, mixers: list[Any], *, key: Key[Array, ""], **options: Any) -> hf.Decoder:
    """Build an RWKV-6 or RWKV-7, given the factory of each time mixing; `receptance` and `layer_inputs` are options."""
    receptance = options.pop("receptance", False)
    width = config["intermediate_size"]
    if width is None:
        width = math.ceil(int(config["hidden_size"] * (config["hidden_ratio"] or 4)) / 32) * 32
    sizes = {"weighs_previous": True, "out_scale": hf.compute_out_scale(config)}
    ffn = partial(RWKVChannelMixing, config["hidden_size"], width, receptance=receptance, **sizes)
    norm = hf.make_layer_norm_factory(config, bias=config["norm_bias"])

    def make_first(**parts: Any) -> TwoMixerBlock:
        return TwoMixerBlock(pre_norm=norm() if config["norm_first"] else None, **parts)

    blocks = [make_first, *[TwoMixerBlock] * (len(mixers) - 1)]
    layers = [(mixer, ffn) for mixer in mixers]
    return hf.build_config_decoder(config, layers, norm, block=blocks, key=key, **options)


def map_rwkv_names(mixing: hf.NameMap, channel_mixing: hf.NameMap) -> hf.NameMap:
    """Return the name map of RWKV-6 and RWKV-7, given the names of time mixing and of channel mixing."""
    norms = {"pre_norm": "pre_norm", "attn_norm": "mixer_norm", "ffn_norm": "ffn_norm"}
    ffn = hf.prefixed("ffn", "rwkv_channel_mixing", channel_mixing)
    block = {**norms, **hf.prefixed("attn", "", mixing), **ffn}
    shell = {"model.embeddings": "embedding", "model.norm": "norm", "lm_head": "head"}
    return {**shell, **hf.prefixed("model.layers.*", "layers.*", block)}


def describe_rwkv(model: Any, mixer_type: type[AbstractMixer]) -> tuple[dict[str, Any], list[Any]]:
    """Return the config keys that RWKV-6 and RWKV-7 share, and the time mixing of each layer. **Raises** `ConfigError`
    for other classes of layers."""
    model, blocks = hf.eval_shape_blocks(model)
    first = blocks[0]
    hf.check_type("mixer", getattr(first, "mixer", first), mixer_type)
    hf.check_type("ffn", getattr(first, "ffn", first), RWKVChannelMixing)
    hf.check_type("mixer_norm", first.mixer_norm, LayerNorm)
    vocab, embed = model.embedding.table_shape
    return {
        "vocab_size": vocab,
        "hidden_size": embed,
        "intermediate_size": first.ffn.key.out_size,
        "num_hidden_layers": len(blocks),
        "layer_norm_eps": first.mixer_norm.epsilon,
        "norm_bias": first.mixer_norm.bias is not None,
        "norm_first": first.pre_norm is not None,
        "tie_word_embeddings": model.head is None,
    }, [getattr(block, "mixer", None) for block in blocks]


def _build_rwkv7(config: hf.Config, *, key: Key[Array, ""]) -> hf.Decoder:
    embed, head_dim = config["hidden_size"], config["head_dim"]
    if embed % head_dim or config["num_heads"] not in (None, embed // head_dim):
        raise hf.ConfigError(f"num_heads = {config['num_heads']} heads of head_dim = {head_dim} are not {embed} wide")
    if config["value_dim"] not in (None, [embed] * config["num_hidden_layers"]):
        raise hf.ConfigError(f"value_dim = {config['value_dim']}, and values are hidden_size = {embed} wide")
    ranks = {"rank": "a", "decay_rank": "decay", "gate_rank": "gate"}
    options = {option: config[f"{name}_low_rank_dim"] for option, name in ranks.items()}
    options |= {"epsilon": config["layer_norm_eps"], "out_scale": hf.compute_out_scale(config)}
    mixer = partial(TimeMixing, embed, embed // head_dim, **options)
    later = partial(mixer, value_rank=config["v_low_rank_dim"])
    mixers = [mixer, *[later] * (config["num_hidden_layers"] - 1)]
    return build_rwkv(config, mixers, layer_inputs=lambda key: FirstValueInputs(), key=key)


_SHIFTS = {"r": 0, "w": 4, "k": 1, "v": 2, "a": 5, "g": 3}
"""Our numbers of the token shifts, in the order of older files."""
_LOW_RANK = {"w": "decay", "a": "rate", "g": "gate", "v": "value_residual"}
_MIXING_NAMES: hf.NameMap = {
    "r_proj": "query",
    "k_proj": "key",
    "v_proj": "value",
    "o_proj": "out",
    "g_norm": "norm",
    "r_k": "bonus",
    "k_k": hf.TensorMapping(("removal",), flat=True),
    "k_a": hf.TensorMapping(("replacement",), flat=True),
    **{f"{letter}_lora.lora.0": f"{part}.down" for letter, part in _LOW_RANK.items()},
    **{f"{letter}_lora.lora.2": f"{part}.up" for letter, part in _LOW_RANK.items()},
}
_SHIFT_NAMES = {f"x_{x}": hf.TensorMapping((f"shifts.{n}.weight",), leading_ones=2) for x, n in _SHIFTS.items()}
_OLDER_SHIFT_NAMES = {"x_x": hf.TensorMapping(tuple(f"shifts.{n}.weight" for n in _SHIFTS.values()), stacked=True)}


def _map_rwkv7_names(config: hf.Config, shifts: hf.NameMap = _SHIFT_NAMES) -> hf.NameMap:
    mixing = hf.prefixed("", "rwkv7", {**_MIXING_NAMES, **shifts})
    return map_rwkv_names(mixing, {"key": "key", "value": "value", "x_k": "key_mix"})


def _describe_rwkv7(model: Any) -> dict[str, Any]:
    config, (mixer, *later) = describe_rwkv(model, TimeMixing)
    ranks = {"a": mixer.rate, "decay": mixer.decay, "gate": mixer.gate}
    if later and getattr(later[0], "value_residual", None) is not None:
        ranks["v"] = later[0].value_residual
    sizes = {f"{name}_low_rank_dim": linear.down.out_size for name, linear in ranks.items()}
    return config | sizes | {"head_dim": mixer.head_dim, "num_heads": mixer.query.out_size // mixer.head_dim}


SHARED: dict[str, Any] = {
    "aliases": {"norm_eps": "layer_norm_eps"},
    "required_values": {"hidden_act": ("sqrelu",), "attn": (None,)},
    # kernels, the length in training, and a loss that adds 1e-4 of the largest logit to gradients only
    "ignored_keys": frozenset(
        "attn_mode fuse_norm fuse_cross_entropy fuse_linear_cross_entropy max_position_embeddings use_l2warp".split()
    ),
    "embedding": "model.embeddings",
}
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
        "head_dim": 64,
        "num_heads": hf.optional_count(),
        "value_dim": hf.Default(None, hf.optional(hf.list_of(hf.COUNT))),
        **{f"{name}_low_rank_dim": rank for name, rank in {"a": 64, "decay": 64, "gate": 128, "v": 16}.items()},
    },
    describe=_describe_rwkv7,
    fits=lambda config, names: any(name.endswith(".attn.x_x") for name in names),
    **SHARED,
)
"""Files of early 2025, with all token shifts of a layer in one tensor."""
RWKV7 = dataclasses.replace(_OLDER, names=_map_rwkv7_names, variants=(_OLDER,))

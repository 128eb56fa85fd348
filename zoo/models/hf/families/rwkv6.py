"""RWKV-6 (Peng et al., arXiv:2404.05892) in the files of flash-linear-attention: token shifts that depend on the data,
and channel mixing with a receptance."""

from functools import partial
from typing import Any

from jaxtyping import Array, Key

from zoo.layers import RWKV6 as TimeMixing
from zoo.models.hf import grammar as hf

from . import rwkv7
from .rwkv_layers import TwoMixerBlock


def _build_rwkv6(config: hf.Config, *, key: Key[Array, ""]) -> hf.Decoder:
    embed, heads = config["hidden_size"], config["num_heads"]
    key_size, value_size = (int(embed * config[name]) for name in ("expand_k", "expand_v"))
    for name, size in {"expand_k": key_size, "expand_v": value_size}.items():
        if size % heads:
            raise hf.ConfigError(f"{name} makes {size} features, which do not divide evenly over {heads} heads")
    mixer = partial(
        TimeMixing,
        embed,
        heads,
        head_dim=key_size // heads,
        value_dim=value_size // heads,
        rank=config["proj_low_rank_dim"],
        decay_rank=config["gate_low_rank_dim"],
        epsilon=config["layer_norm_eps"],
        out_scale=hf.compute_out_scale(config),
    )
    norm = hf.make_layer_norm_factory(config, bias=config["norm_bias"])
    layers = [(mixer, rwkv7.make_channel_mixing_factory(config, receptance=True))] * config["num_hidden_layers"]
    return hf.build_config_decoder(config, layers, norm, block=rwkv7.list_blocks(config, TwoMixerBlock, norm), key=key)


_ORDER = (0, 4, 1, 2, 3)
"""Our numbers of the token shifts of receptance, decay, key, value and gate."""


def _list_shifts(part: str) -> tuple[str, ...]:
    return tuple(f"shifts.{number}.{part}.weight" for number in _ORDER)


_MIXING_NAMES: hf.NameMap = {
    "x_proj.0.mu": "shift.weight",
    "x_proj.0.linear.weight": hf.fused(*_list_shifts("adjust.down")),
    "x_proj.2.weight": hf.TensorMapping(_list_shifts("adjust.up"), columns=True),
    "x_bias": hf.TensorMapping(tuple(f"shifts.{number}.weight" for number in _ORDER), stacked=True),
    "r_proj.linear": "query",
    "k_proj.linear": "key",
    "v_proj.linear": "value",
    "g_proj.linear": "gate",
    "w_proj.linear.lora.0": "decay.down",
    "w_proj.linear.lora.2": "decay.up",
    "bonus": "bonus",
    "g_norm": "norm",
    "o_proj": "out",
}
_CHANNEL_MIXING_NAMES: hf.NameMap = {
    "key.linear": "key",
    "key.mu": "key_shift.weight",
    "value": "value",
    "receptance.linear": "receptance",
    "receptance.mu": "receptance_shift.weight",
}


def _map_rwkv6_names(config: hf.Config) -> hf.NameMap:
    return rwkv7.map_rwkv_layers(config, hf.prefixed("", "rwkv6", _MIXING_NAMES), _CHANNEL_MIXING_NAMES)


def _describe_rwkv6(model: Any) -> dict[str, Any]:
    """Return the config of an RWKV-6 model. **Raises** `ConfigError` for other classes of layers."""
    config, (first, *_) = rwkv7.describe_rwkv(model, TwoMixerBlock, TimeMixing)
    mixer = first.mixer
    return config | {
        "num_heads": mixer.query.out_size // mixer.head_dim,
        "expand_k": mixer.query.out_size / config["hidden_size"],
        "expand_v": mixer.value.out_size / config["hidden_size"],
        "proj_low_rank_dim": mixer.shifts[0].adjust.down.out_size,
        "gate_low_rank_dim": mixer.decay.down.out_size,
    }


RWKV6 = hf.Family(
    name="rwkv6",
    architecture="RWKV6ForCausalLM",
    build=_build_rwkv6,
    names=_map_rwkv6_names,
    defaults={
        **rwkv7.DEFAULTS,
        "hidden_ratio": hf.optional_number(3.5),
        "num_heads": 4,
        "expand_k": hf.Default(0.5, hf.POSITIVE_NUMBER),
        "expand_v": hf.Default(1.0, hf.POSITIVE_NUMBER),
        "proj_low_rank_dim": 32,
        "gate_low_rank_dim": 64,
    },
    aliases=rwkv7.RWKV7.aliases,
    required_values=rwkv7.RWKV7.required_values,
    ignored_keys=rwkv7.IGNORED_KEYS,
    embedding="model.embeddings",
    describe=_describe_rwkv6,
)

"""RWKV-6 (Peng et al., arXiv:2404.05892) as flash-linear-attention stores it: token shifts that depend on the data, and
channel mixing with a receptance."""

from functools import partial
from typing import Any

from jaxtyping import Array, Key

from zoo.layers import RWKV6 as TimeMixing
from zoo.models.hf import grammar as hf

from . import rwkv7


def _build_rwkv6(config: hf.Config, *, key: Key[Array, ""]) -> hf.Decoder:
    embed, heads = config["hidden_size"], config["num_heads"]
    sizes = {name: int(embed * config[name]) for name in ("expand_k", "expand_v")}
    if wrong := [name for name, size in sizes.items() if not size or size % heads]:
        raise hf.ConfigError(f"{wrong[0]} makes {sizes[wrong[0]]} features, not a whole number for num_heads = {heads}")
    key_dim, value_dim = (size // heads for size in sizes.values())
    options = {"rank": config["proj_low_rank_dim"], "decay_rank": config["gate_low_rank_dim"]}
    options |= {"epsilon": config["layer_norm_eps"], "out_scale": hf.compute_out_scale(config)}
    mixer = partial(TimeMixing, embed, heads, head_dim=key_dim, value_dim=value_dim, **options)
    return rwkv7.build_rwkv(config, [mixer] * config["num_hidden_layers"], receptance=True, key=key)


def _list_shifts(part: str) -> tuple[str, ...]:
    """Return a part of each token shift, in the order of receptance, decay, key, value and gate."""
    return tuple(f"shifts.{number}.{part}" for number in (0, 4, 1, 2, 3))


_MIXING_NAMES: hf.NameMap = {
    "x_proj.0.mu": "shift.weight",
    "x_proj.0.linear.weight": hf.fused(*_list_shifts("adjust.down.weight")),
    "x_proj.2.weight": hf.TensorMapping(_list_shifts("adjust.up.weight"), columns=True),
    "x_bias": hf.TensorMapping(_list_shifts("weight"), stacked=True),
    **{f"{letter}_proj.linear": part for letter, part in {"r": "query", "k": "key", "v": "value", "g": "gate"}.items()},
    "w_proj.linear.lora.0": "decay.down",
    "w_proj.linear.lora.2": "decay.up",
    "bonus": "bonus",
    "g_norm": "norm",
    "o_proj": "out",
}
_CHANNEL_MIXING_NAMES: hf.NameMap = {
    "key.linear": "key",
    "key.mu": "key_mix",
    "value": "value",
    "receptance.linear": "receptance",
    "receptance.mu": "receptance_mix",
}


def _map_rwkv6_names(config: hf.Config) -> hf.NameMap:
    return rwkv7.map_rwkv_names(hf.prefixed("", "rwkv6", _MIXING_NAMES), _CHANNEL_MIXING_NAMES)


def _describe_rwkv6(model: Any) -> dict[str, Any]:
    config, (mixer, *_) = rwkv7.describe_rwkv(model, TimeMixing)
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
    describe=_describe_rwkv6,
    **rwkv7.SHARED,
)

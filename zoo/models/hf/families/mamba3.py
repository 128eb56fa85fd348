"""Mamba-3 (Lahoti et al., arXiv:2603.15569) as flash-linear-attention stores it, with A = -softplus(W_A u), which is
not the function of the authors' code."""

from functools import partial
from typing import Any

import jax
from jaxtyping import Array, Key

from zoo.layers import Mamba3
from zoo.models.hf import grammar as hf

from . import mamba2


def _build_mamba3(config: hf.Config, *, key: Key[Array, ""]) -> hf.Decoder:
    heads, head_dim = mamba2.read_heads(config)
    mixer = partial(
        Mamba3,
        config["hidden_size"],
        heads,
        head_dim=head_dim,
        state_dim=config["state_size"],
        angles=int(config["state_size"] * config["rope_fraction"]) // 2,
        norm=config["is_outproj_norm"],
        epsilon=config["rms_norm_eps"],
        decay_rate=jax.nn.softplus,
        min_decay_rate=config["A_floor"],
        out_scale=config["num_hidden_layers"] ** -0.5,
    )
    return mamba2.build_mamba(config, mixer, key=key)


_MIXER_NAMES: hf.NameMap = {
    "in_proj": hf.fused("gate", "x", "B", "C", "dt", "A", "trapezoid", "angle"),
    **{name: name for name in ("dt_bias", "B_bias", "C_bias", "B_norm", "C_norm", "D", "norm")},
    "out_proj": "out",
}


def _map_mamba3_names(config: hf.Config) -> hf.NameMap:
    return mamba2.map_mamba_names("mamba3", _MIXER_NAMES)


def _describe_mamba3(model: Any) -> dict[str, Any]:
    config, mixer = mamba2.describe_mamba(model, Mamba3)
    if mixer.decay_rate is not jax.nn.softplus:
        raise hf.ConfigError("its decay_rate is not jax.nn.softplus, which files have")
    state_dim = mixer.B_bias.shape[2]
    return config | {
        "state_size": state_dim,
        "rope_fraction": 0.5 if 4 * mixer.angle.out_size <= state_dim else 1.0,
        "A_floor": mixer.min_decay_rate,
        "is_outproj_norm": mixer.norm is not None,
    }


MAMBA3 = hf.Family(
    name="mamba3",
    architecture="Mamba3ForCausalLM",
    build=_build_mamba3,
    names=_map_mamba3_names,
    defaults={
        **mamba2.FLA_DEFAULTS,
        "rope_fraction": hf.Default(0.5, hf.ValueKind("0.5 or 1", lambda x: hf.is_number(x) and x in (0.5, 1))),
        "A_floor": hf.Default(1e-4, hf.POSITIVE_NUMBER),
        "is_outproj_norm": False,
    },
    aliases={"norm_eps": "rms_norm_eps"},
    required_values={"hidden_act": ("silu", "swish"), "is_mimo": (False,), "n_groups": (1,), "use_bias": (False,)},
    ignored_keys=mamba2.FLA_IGNORED_KEYS | {"mimo_rank"},
    embedding="backbone.embeddings",
    describe=_describe_mamba3,
)

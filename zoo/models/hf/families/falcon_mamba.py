"""Falcon Mamba (Zuo et al., arXiv:2410.05355): Mamba with RMSNorm without weights on dt, B and C."""

from functools import partial

from jaxtyping import Array, Key

from zoo.layers import RMSNorm
from zoo.models.hf import grammar as hf

from .mamba import DEFAULTS, IGNORED_KEYS, REQUIRED_VALUES, build_mamba_decoder, make_mamba_factory, map_mamba_names


def _build_falcon_mamba(config: hf.Config, *, key: Key[Array, ""]) -> hf.Decoder:
    norm = partial(RMSNorm, epsilon=config["mixer_rms_eps"], scaled=False)
    return build_mamba_decoder(config, make_mamba_factory(config, norm=norm), key=key)


FALCON_MAMBA = hf.Family(
    name="falcon_mamba",
    architecture="FalconMambaForCausalLM",
    build=_build_falcon_mamba,
    names=map_mamba_names,
    defaults=DEFAULTS | {"mixer_rms_eps": 1e-6},
    aliases={"layer_norm_epsilon": "rms_norm_eps"},
    required_values=REQUIRED_VALUES,
    ignored_keys=IGNORED_KEYS | {"use_falcon_mambapy"},
    embedding="backbone.embeddings",
)

"""Falcon Mamba (Zuo et al., arXiv:2410.05355): Mamba, with norms that have no weights on steps, B and C."""

from functools import partial

from jaxtyping import Array, Key

from zoo.layers import RMSNorm
from zoo.models.decoder import Decoder
from zoo.models.facts import Config, Family

from .mamba import DEFAULTS, INERT, ONLY, built, mixer, names


def build(config: Config, *, key: Key[Array, ""]) -> Decoder:
    norm = partial(RMSNorm, epsilon=config["mixer_rms_eps"], scaled=False)
    return built(config, mixer(config, norm=norm), key=key)


FALCON_MAMBA = Family(
    name="falcon_mamba",
    architecture="FalconMambaForCausalLM",
    build=build,
    names=names,
    defaults=DEFAULTS | {"mixer_rms_eps": 1e-6},
    aliases={"layer_norm_epsilon": "rms_norm_eps"},
    only=ONLY,
    inert=INERT | {"use_falcon_mambapy"},
    embedding="backbone.embeddings",
)

"""RetNet (Sun et al., arXiv:2307.08621) as flash-linear-attention stores it."""

from functools import partial
from typing import Any

from jaxtyping import Array, Key

from zoo.layers import Retention
from zoo.models.hf import grammar as hf

from . import gla
from .gated_deltanet import build_fla_decoder, build_fla_rotary, describe_fla_decoder, map_fla_names


def _build_retnet(config: hf.Config, *, key: Key[Array, ""]) -> hf.Decoder:
    sizes = gla.read_sizes(config)
    mixer = partial(
        Retention,
        config["hidden_size"],
        **sizes,
        rotary=build_fla_rotary(sizes["key_dim"], 10000.0),
        feature_map=gla.find_feature_map(config),
        gate=config["use_output_gate"],
    )
    return build_fla_decoder(config, mixer, key=key)


def _map_retnet_names(config: hf.Config) -> hf.NameMap:
    return map_fla_names("retention", {**gla.PROJECTION_NAMES, **gla.map_gate_names(config)})


def _describe_retnet(model: Any) -> dict[str, Any]:
    config, mixer = describe_fla_decoder(model, Retention)
    return {**config, **gla.describe_sizes(mixer, config["hidden_size"]), **gla.describe_feature_map(mixer)}


RETNET = hf.Family(
    name="retnet",
    architecture="RetNetForCausalLM",
    build=_build_retnet,
    names=_map_retnet_names,
    defaults={
        **gla.DEFAULTS,
        **gla.GATE_DEFAULTS,
        "hidden_ratio": hf.optional_number(2.0),
        "num_heads": 8,
        "expand_v": hf.Default(2.0, hf.POSITIVE_NUMBER),
    },
    describe=_describe_retnet,
    # fla's model has no convolutions, whatever the config says
    **{**gla.GATE_FACTS, "ignored_keys": gla.GATE_FACTS["ignored_keys"] | {"use_short_conv", "conv_size"}},
)

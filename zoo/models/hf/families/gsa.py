"""Gated slot attention (Zhang et al., arXiv:2409.07146) as flash-linear-attention stores it."""

from functools import partial
from typing import Any

from jaxtyping import Array, Key

from zoo.models.hf import grammar as hf

from . import gla
from .gated_deltanet import SHARED_FACTS, build_fla_decoder, describe_fla_decoder, map_fla_names
from .gsa_layers import GatedSlotAttention


def _build_gsa(config: hf.Config, *, key: Key[Array, ""]) -> hf.Decoder:
    sizes = gla.read_sizes(config)
    del sizes["norm"]  # over all heads, with 1e-5 whatever norm_eps says
    if sizes["heads"] * sizes["value_dim"] != config["hidden_size"]:
        raise hf.ConfigError(f"expand_v = {config['expand_v']}: the norm is over hidden_size features, and values too")
    mixer = partial(
        GatedSlotAttention,
        config["hidden_size"],
        **sizes,
        slots=config["num_slots"] or sizes["key_dim"],
        conv_width=config["conv_size"] if config["use_short_conv"] else None,
        feature_map=gla.find_feature_map(config),
        temperature=config["gate_logit_normalizer"],
        scaled=config["elementwise_affine"],
    )
    return build_fla_decoder(config, mixer, key=key)


def _map_gsa_names(config: hf.Config) -> hf.NameMap:
    names = {**gla.PROJECTION_NAMES, **gla.CONVOLUTION_NAMES, "f_proj": "forget", "g_norm": "readout.norm"}
    return map_fla_names("gated_slot_attention", names)


def _describe_gsa(model: Any) -> dict[str, Any]:
    config, mixer = describe_fla_decoder(model, GatedSlotAttention)
    return {
        **config,
        **gla.describe_sizes(mixer, config["hidden_size"]),
        **gla.describe_feature_map(mixer),
        **gla.describe_convolutions(mixer),
        "num_slots": mixer.slots,
        "gate_logit_normalizer": mixer.temperature,
    }


_FEATURE_MAP = hf.ValueKind("swish or relu", lambda x: hf.WORD.fits(x) and x in ("swish", "relu"))

GSA = hf.Family(
    name="gsa",
    architecture="GSAForCausalLM",
    build=_build_gsa,
    names=_map_gsa_names,
    defaults={
        **gla.DEFAULTS,
        **gla.CONVOLUTION_DEFAULTS,
        "feature_map": hf.Default("swish", _FEATURE_MAP),
        "num_slots": hf.optional_count(64),
        "gate_logit_normalizer": hf.Default(8.0, hf.POSITIVE_NUMBER),
    },
    describe=_describe_gsa,
    **{
        **SHARED_FACTS,
        "aliases": {**SHARED_FACTS["aliases"], "exapnd_k": "expand_k", "exapnd_v": "expand_v"},
        # no layer of fla reads these
        "ignored_keys": SHARED_FACTS["ignored_keys"] | {"clamp_min", "clamp_max", "use_output_gate", "use_norm"},
    },
)

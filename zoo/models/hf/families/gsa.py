"""Gated slot attention (Zhang et al., arXiv:2409.07146) as flash-linear-attention stores it."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

from zoo.models.hf import grammar as hf

from . import gated_deltanet, gla
from .gsa_layers import GatedSlotAttention


def _make_gsa_factory(config: hf.Config) -> Callable[..., GatedSlotAttention]:
    options = gla.read_options(config)
    del options["norm"]  # over all heads, with 1e-5 whatever norm_eps says
    if options["heads"] * options["value_dim"] != config["hidden_size"]:
        raise hf.ConfigError(f"exapnd_v = {config['expand_v']}: the norm is over hidden_size features, and values too")
    return partial(
        GatedSlotAttention,
        **options,
        slots=config["num_slots"] or options["key_dim"],
        temperature=config["gate_logit_normalizer"],
        scaled=config["elementwise_affine"],
    )


def _describe_gsa(mixer: GatedSlotAttention) -> dict[str, Any]:
    return gla.describe_mixer(mixer) | {"num_slots": mixer.slots, "gate_logit_normalizer": mixer.temperature}


GSA = dataclasses.replace(
    gated_deltanet.make_fla_family(
        "gsa",
        "GSAForCausalLM",
        GatedSlotAttention,
        factory=_make_gsa_factory,
        names=lambda config: {**gla.NAMES, "f_proj": "forget", "g_norm": "readout.norm"},
        describe=_describe_gsa,
        defaults={
            **gla.SIZE_DEFAULTS,
            **gla.CONVOLUTION_DEFAULTS,
            "feature_map": gla.choose_feature_map("swish", "relu"),
            "num_slots": hf.optional_count(64),
            "gate_logit_normalizer": hf.Default(8.0, hf.POSITIVE_NUMBER),
        },
        ignored={"clamp_min", "clamp_max", "use_output_gate", "use_norm"},  # no layer of fla reads these
    ),
    aliases={"norm_eps": "rms_norm_eps", "exapnd_k": "expand_k", "exapnd_v": "expand_v"},
)

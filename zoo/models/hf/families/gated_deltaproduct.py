"""Gated DeltaProduct (Siems et al., arXiv:2502.10297) as flash-linear-attention stores it: gated_deltanet with several
delta-rule steps per token."""

import dataclasses
from collections.abc import Callable
from functools import partial

from zoo.layers import GatedDeltaProduct
from zoo.models.hf import grammar as hf

from . import gated_deltanet


def _make_gated_deltaproduct_factory(config: hf.Config) -> Callable[..., GatedDeltaProduct]:
    return partial(
        GatedDeltaProduct,
        **gated_deltanet.read_delta_options(config),
        num_householder=config["num_householder"],
        negative_eigenvalues=config["allow_neg_eigval"],
        decay=config["use_forget_gate"],
        gate=config["use_output_gate"],
    )


def _map_mixer_names(config: hf.Config) -> hf.NameMap:
    """Return the name map. Keys, values and betas of a step are consecutive in files; here the steps of a head are."""
    of_steps = ("k_proj", "v_proj", "b_proj", "k_conv1d", "v_conv1d")
    names = hf.prefixed("", "", {**gated_deltanet.DELTA_NAMES, **gated_deltanet.DECAY_NAMES})
    order = {"groups": config["num_heads"], "runs": config["num_householder"]}
    return {**names, **{name: dataclasses.replace(names[name], **order) for name in of_steps}}


GATED_DELTAPRODUCT = gated_deltanet.make_fla_family(
    "gated_deltaproduct",
    "GatedDeltaProductForCausalLM",
    GatedDeltaProduct,
    factory=_make_gated_deltaproduct_factory,
    names=_map_mixer_names,
    describe=gated_deltanet.describe_delta_rule,
    defaults={
        **hf.omit(gated_deltanet.DELTA_DEFAULTS, "num_v_heads"),
        "num_householder": 1,
        "allow_neg_eigval": False,
        "use_forget_gate": False,
        "use_output_gate": True,
    },
    ignored={"num_v_heads"},  # fla's model does not pass it to its layers
)

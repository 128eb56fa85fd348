"""Comba (Hu et al., arXiv:2506.02475) as flash-linear-attention stores it: what reads and writes the state has unit
length after feedback and correction."""

from functools import partial

from zoo.layers import Comba
from zoo.models.hf import grammar as hf

from . import gated_deltanet

_NAMES: hf.NameMap = {
    **gated_deltanet.DELTA_NAMES,
    **gated_deltanet.DECAY_NAMES,
    "decay": "feedback",
    "D": "correction",
}

COMBA = gated_deltanet.make_fla_family(
    "comba",
    "CombaForCausalLM",
    Comba,
    factory=lambda config: partial(
        Comba,
        **gated_deltanet.read_grouped_options(config),
        normalize_last=True,
        gate=config["use_output_gate"],
    ),
    names=lambda config: _NAMES,
    describe=gated_deltanet.describe_delta_rule,
    defaults={**gated_deltanet.DELTA_DEFAULTS, "use_output_gate": True},
    # the first two are always on: fla's model does not pass them to its layers; the third is initialization
    ignored={"use_inner_decay", "use_output_correction", "correction_factor"},
)

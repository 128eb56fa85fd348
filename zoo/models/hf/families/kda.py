"""Kimi Delta Attention (Kimi team, arXiv:2510.26692) in every layer, as flash-linear-attention stores it."""

from collections.abc import Callable
from functools import partial

from zoo.layers import KimiDeltaAttention
from zoo.models.hf import grammar as hf

from . import gated_deltanet


def _make_kda_factory(config: hf.Config) -> Callable[..., KimiDeltaAttention]:
    if config["safe_gate"] and config["lower_bound"] is None:
        raise hf.ConfigError("safe_gate = True needs a lower_bound")
    options = gated_deltanet.read_grouped_options(config)
    return partial(
        KimiDeltaAttention,
        **options,
        rank=options["value_dim"],
        lower_bound=config["lower_bound"],
        negative_eigenvalues=config["allow_neg_eigval"],
        gate_bias=True,
    )


_LOW_RANK_NAMES: hf.NameMap = {"0": "down", "1": "up"}
_NAMES: hf.NameMap = {
    **hf.omit(gated_deltanet.DELTA_NAMES, "g_proj"),
    **hf.omit(gated_deltanet.DECAY_NAMES, "a_proj"),
    **hf.prefixed("f_proj", "decay.step", _LOW_RANK_NAMES),
    **hf.prefixed("g_proj", "readout.gate", _LOW_RANK_NAMES),
}

KDA = gated_deltanet.make_fla_family(
    "kda",
    "KDAForCausalLM",
    KimiDeltaAttention,
    factory=_make_kda_factory,
    names=lambda config: _NAMES,
    describe=gated_deltanet.describe_delta_rule,
    defaults={
        **gated_deltanet.DELTA_DEFAULTS,
        "num_hidden_layers": 24,
        "num_heads": 16,
        "head_dim": 128,
        "expand_v": hf.Default(1.0, hf.POSITIVE_NUMBER),
        "allow_neg_eigval": False,
        "safe_gate": False,  # it chooses a kernel, which needs a bound
        "lower_bound": hf.Default(
            None, hf.optional(hf.ValueKind("a number below 0", lambda value: hf.NUMBER.fits(value) and value < 0))
        ),
    },
)

"""MesaNet (von Oswald et al., arXiv:2506.05233) as flash-linear-attention stores it."""

from functools import partial
from typing import Any

from zoo.layers import MesaNet
from zoo.models.hf import grammar as hf

from . import gated_deltanet


def _make_mesa_net_factory(config: hf.Config) -> partial[MesaNet]:
    return partial(
        MesaNet,
        config["hidden_size"],
        config["num_heads"],
        key_dim=config["head_dim"],
        conv_width=config["conv_size"],
        gate=config["use_output_gate"],
        steps=config["max_cg_step_training"],
        decode_steps=config["max_cg_step_decoding"],
        least_regularization=config["lambda_lower_bound"],
        epsilon=config["rms_norm_eps"],
        out_scale=hf.compute_out_scale(config),
    )


_NAMES: hf.NameMap = {
    **hf.prefixed("", "projections", {"q_proj": "query", "k_proj": "key", "v_proj": "value"}),
    "q_conv1d": hf.fused("projections.convolutions.0", conv1d_filters=True),
    "k_conv1d": hf.fused("projections.convolutions.1", conv1d_filters=True),
    "a_proj": "decay",
    "b_proj": "rate",
    "lambda_params": "regularization",
    **hf.prefixed("", "readout", {"g_proj": "gate", "o_norm": "norm", "o_proj": "out"}),
}


def _describe_mesa_net(mixer: MesaNet) -> dict[str, Any]:
    convolutions = mixer.projections.convolutions
    return {
        "num_heads": mixer.rate.out_size,
        "head_dim": mixer.projections.key_dim,
        "conv_size": convolutions[0].width if convolutions else 4,
        "use_output_gate": mixer.readout.gate is not None,
        "max_cg_step_training": mixer.steps,
        "max_cg_step_decoding": mixer.decode_steps,
        "lambda_lower_bound": mixer.least_regularization,
    }


MESA_NET = gated_deltanet.make_fla_family(
    "mesa_net",
    "MesaNetForCausalLM",
    MesaNet,
    factory=_make_mesa_net_factory,
    names=lambda config: _NAMES,
    describe=_describe_mesa_net,
    defaults={
        **gated_deltanet.HYBRID_DEFAULTS,
        "num_heads": 16,
        "head_dim": 128,
        "conv_size": 4,
        "use_output_gate": False,
        "lambda_lower_bound": hf.Default(
            0.25, hf.ValueKind("a number from 0 to below 1", lambda value: hf.is_number(value) and 0 <= value < 1)
        ),
        **dict.fromkeys(("max_cg_step_training", "max_cg_step_decoding"), 30),
    },
    ignored={"use_short_conv"},  # fla always has them
)

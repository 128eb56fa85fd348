"""DeltaNet (Yang et al., arXiv:2406.06484) as flash-linear-attention stores it, with its activations and norms of
queries and keys."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax

from zoo.layers import DeltaNet
from zoo.layers.recurrent.common import divide_by_sum, elu_plus_one, l2_normalize
from zoo.models.hf import grammar as hf

from . import gated_deltanet

_WORDS: dict[str, dict[str, Callable]] = {
    "qk_activation": {"silu": jax.nn.silu, "relu": jax.nn.relu, "elu": elu_plus_one, "identity": jax.nn.identity},
    "qk_norm": {"l2": l2_normalize, "sum": divide_by_sum},
}


def _make_delta_net_factory(config: hf.Config) -> Callable[..., DeltaNet]:
    heads = config["num_heads"]
    for name, known in _WORDS.items():
        if config[name] not in known:
            raise hf.ConfigError(f"{name} = {config[name]!r} should be one of {', '.join(known)}")
    return partial(
        DeltaNet,
        config["hidden_size"],
        heads,
        key_dim=_read_head_size(config, "expand_k"),
        value_dim=_read_head_size(config, "expand_v"),
        conv_width=config["conv_size"] if config["use_short_conv"] else None,
        negative_eigenvalues=config["allow_neg_eigval"],
        learned_beta=config["use_beta"],
        activation=_WORDS["qk_activation"][config["qk_activation"]],
        normalize=_WORDS["qk_norm"][config["qk_norm"]],
        gate=config["use_gate"],
        epsilon=config["rms_norm_eps"],
        out_scale=hf.compute_out_scale(config),
    )


def _read_head_size(config: hf.Config, factor: str) -> int:
    size = gated_deltanet.multiply_size(config, config["hidden_size"], factor)
    heads = config["num_heads"]
    if size % heads:
        raise hf.ConfigError(f"{factor} * hidden_size = {size} does not divide evenly over num_heads = {heads}")
    return size // heads


def _describe_delta_net(mixer: DeltaNet) -> dict[str, Any]:
    inputs = mixer.corrector
    functions = {"qk_activation": inputs.activation, "qk_norm": inputs.normalize}
    words = {key: [word for word, x in _WORDS[key].items() if x is function] for key, function in functions.items()}
    if not all(words.values()):
        raise hf.ConfigError("no config has a word for the activation or the norm of its queries and keys")
    embed = mixer.readout.out.out_size
    return {
        **gated_deltanet.describe_delta_rule(mixer),
        "expand_k": inputs.projections.query.out_size / embed,
        "expand_v": inputs.projections.value.out_size / embed,
        "use_beta": inputs.rate is not None,
        **{key: found[0] for key, found in words.items()},
    }


DELTA_NET = gated_deltanet.make_fla_family(
    "delta_net",
    "DeltaNetForCausalLM",
    DeltaNet,
    factory=_make_delta_net_factory,
    names=lambda config: gated_deltanet.DELTA_NAMES,
    describe=_describe_delta_net,
    defaults={
        **hf.omit(gated_deltanet.DELTA_DEFAULTS, "head_dim", "num_v_heads"),
        "num_hidden_layers": 24,
        "num_heads": 16,
        **dict.fromkeys(("expand_k", "expand_v"), hf.Default(1.0, hf.POSITIVE_NUMBER)),
        "allow_neg_eigval": False,
        "use_beta": True,
        "use_gate": False,
        "qk_activation": "silu",
        "qk_norm": "l2",
    },
    ignored={"use_output_norm"},  # fla always has the norm
)

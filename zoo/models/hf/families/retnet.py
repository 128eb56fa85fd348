"""RetNet (Sun et al., arXiv:2307.08621) as flash-linear-attention stores it."""

from collections.abc import Callable
from functools import partial

from zoo.layers import Retention
from zoo.models.hf import grammar as hf

from . import gated_deltanet, gla


def _make_retnet_factory(config: hf.Config) -> Callable[..., Retention]:
    options = gla.read_options(config)
    if options["key_dim"] % 2:
        raise hf.ConfigError(f"expand_k: rotary embeddings turn pairs of values, and keys have {options['key_dim']}")
    return partial(Retention, **options)


RETNET = gated_deltanet.make_fla_family(
    "retnet",
    "RetNetForCausalLM",
    Retention,
    factory=_make_retnet_factory,
    names=gla.map_gated_names,
    describe=gla.describe_mixer,
    defaults={
        **gla.GATED_DEFAULTS,
        "hidden_ratio": hf.optional_count(2),
        "num_heads": 8,
        "expand_v": hf.Default(2.0, hf.POSITIVE_NUMBER),
    },
    ignored={"use_short_conv", "conv_size"},  # fla's model has no convolutions, whatever the config says
)

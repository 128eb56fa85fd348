"""Linear attention (Katharopoulos et al., arXiv:2006.16236) as flash-linear-attention stores it: a norm of each head
in place of the sum of weights."""

from collections.abc import Callable
from functools import partial
from typing import Any

from zoo.layers import LinearAttention
from zoo.models.hf import grammar as hf

from . import gated_deltanet, gla


def _make_linear_attn_factory(config: hf.Config) -> Callable[..., LinearAttention]:
    options = gla.read_options(config)
    options["head_dim"] = options.pop("key_dim")
    divides = config["norm_q"], config["norm_k"]
    return partial(LinearAttention, **options, normalized=config["norm_feature_map"], divides=divides)


def _describe_linear_attn(mixer: LinearAttention) -> dict[str, Any]:
    config = gla.describe_mixer(mixer)
    config |= dict(zip(("norm_q", "norm_k"), mixer.divides, strict=True))
    word = "elementwise_product" if mixer.feature_map is None else config["feature_map"]
    return config | {"norm_feature_map": mixer.normalized, "feature_map": word}


LINEAR_ATTN = gated_deltanet.make_fla_family(
    "linear_attn",
    "LinearAttentionForCausalLM",
    LinearAttention,
    factory=_make_linear_attn_factory,
    names=lambda config: {
        **gla.NAMES,
        "norm": "readout.norm",
        **{f"feature_map_q.layer{number + 1}": f"query_maps.{number}" for number in range(2)},
        **{f"feature_map_k.layer{number + 1}": f"key_maps.{number}" for number in range(2)},
    },
    describe=_describe_linear_attn,
    defaults={
        **gla.SIZE_DEFAULTS,
        "feature_map": gla.choose_feature_map("elementwise_product", "elu", "relu", "identity"),
        "norm_q": False,
        "norm_k": False,
        "norm_feature_map": False,
    },
    required={"tie_feature_map_qk": (False,)},
)

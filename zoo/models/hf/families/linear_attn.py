"""Linear attention (Katharopoulos et al., arXiv:2006.16236) as flash-linear-attention stores it: a norm of each head
in place of the sum of weights."""

from functools import partial
from typing import Any

import jax
from jaxtyping import Array, Key

from zoo.layers import LinearAttention
from zoo.layers.recurrent.common import elu_plus_one
from zoo.models.hf import grammar as hf

from . import gla
from .gated_deltanet import SHARED_FACTS, build_fla_decoder, describe_fla_decoder, map_fla_names


def _keep(x: Any) -> Any:
    return x


_FEATURE_MAPS = {"elementwise_product": None, "elu": elu_plus_one, "relu": jax.nn.relu, "identity": _keep}


def _build_linear_attn(config: hf.Config, *, key: Key[Array, ""]) -> hf.Decoder:
    sizes = gla.read_sizes(config)
    mixer = partial(
        LinearAttention,
        config["hidden_size"],
        head_dim=sizes.pop("key_dim"),
        **sizes,
        feature_map=_FEATURE_MAPS[config["feature_map"]],
        normalized=config["norm_feature_map"],
        divides=(config["norm_q"], config["norm_k"]),
    )
    return build_fla_decoder(config, mixer, key=key)


_MAP_NAMES: hf.NameMap = {
    f"feature_map_{letter}.layer{number + 1}": f"{part}_maps.{number}"
    for letter, part in {"q": "query", "k": "key"}.items()
    for number in range(2)
}


def _map_linear_attn_names(config: hf.Config) -> hf.NameMap:
    return map_fla_names("linear_attention", {**gla.PROJECTION_NAMES, **_MAP_NAMES, "norm": "readout.norm"})


def _describe_linear_attn(model: Any) -> dict[str, Any]:
    config, mixer = describe_fla_decoder(model, LinearAttention)
    sizes = gla.describe_sizes(mixer, config["hidden_size"])
    feature_map = None if mixer.query_maps else mixer.feature_map
    names = [name for name, function in _FEATURE_MAPS.items() if function is feature_map]
    if not names:
        raise hf.ConfigError(f"no config has a word for the feature map {feature_map}")
    norms = dict(zip(("norm_q", "norm_k"), mixer.divides, strict=True))
    return {**config, **sizes, **norms, "norm_feature_map": mixer.normalized, "feature_map": names[0]}


_FEATURE_MAP = hf.ValueKind(f"one of {', '.join(_FEATURE_MAPS)}", lambda x: hf.WORD.fits(x) and x in _FEATURE_MAPS)

LINEAR_ATTN = hf.Family(
    name="linear_attn",
    architecture="LinearAttentionForCausalLM",
    build=_build_linear_attn,
    names=_map_linear_attn_names,
    defaults={
        **gla.DEFAULTS,
        "feature_map": hf.Default("elementwise_product", _FEATURE_MAP),
        "norm_q": False,
        "norm_k": False,
        "norm_feature_map": False,
    },
    describe=_describe_linear_attn,
    **{**SHARED_FACTS, "required_values": {**SHARED_FACTS["required_values"], "tie_feature_map_qk": (False,)}},
)

"""HGRN2 (Qin et al., arXiv:2404.07904) as flash-linear-attention stores it, with lower bounds of forget gates that are
learned over the depth."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

from jaxtyping import Array, Key

from zoo.layers import HGRN2 as Mixer
from zoo.layers import RMSNorm
from zoo.models.hf import grammar as hf
from zoo.parallel import Dim

from . import gated_deltanet, gla
from .hgrn2_layers import BoundedBlock, LowerBounds


def _build_hgrn2(config: hf.Config, *, key: Key[Array, ""]) -> hf.Decoder:
    options = {}
    if config["use_lower_bound"]:
        inputs = partial(LowerBounds, config["num_hidden_layers"], config["hidden_size"], _read_head_size(config))
        options = {"block": BoundedBlock, "layer_inputs": inputs}
    return gated_deltanet.build_fla_decoder(config, _make_hgrn2_factory(config), key=key, **options)


def _read_head_size(config: hf.Config) -> int:
    """Return the size of a head: `expand_ratio`, which wins over `num_heads`. **Raises** `ConfigError` for neither, and
    for one that does not divide `hidden_size`."""
    embed, ratio, heads = (config[key] for key in ("hidden_size", "expand_ratio", "num_heads"))
    size = ratio or embed // (heads or embed)
    if (ratio or heads) is None or not size or embed % size:
        raise hf.ConfigError(f"expand_ratio = {ratio}, num_heads = {heads}: they should divide hidden_size = {embed}")
    return size


def _make_hgrn2_factory(config: hf.Config) -> Callable[..., Mixer]:
    embed, size = config["hidden_size"], _read_head_size(config)
    epsilon = 1e-5 * size  # whatever norm_eps says, and fla divides queries by the root of their size
    return partial(
        Mixer,
        embed,
        embed // size,
        conv_width=config["conv_size"] if config["use_short_conv"] else None,
        norm=partial(RMSNorm, embed, features=Dim("heads", size), epsilon=epsilon, scaled=config["elementwise_affine"]),
        out_scale=hf.compute_out_scale(config),
    )


_NAMES: hf.NameMap = {
    "q_proj": "projections.query",
    "f_proj": "projections.key",
    "i_proj": "projections.value",
    "g_norm": "readout.norm",
    "o_proj": "readout.out",
    **gla.map_convolution_names("qfi"),
}


def _map_names(config: hf.Config) -> hf.NameMap:
    return {**gated_deltanet.map_fla_names("hgrn2", _NAMES), "model.lower_bounds": "layer_inputs.weight"}


def _describe_hgrn2(model: Any) -> dict[str, Any]:
    is_bounded = isinstance(getattr(model, "layer_inputs", None), LowerBounds)
    block_type = BoundedBlock if is_bounded else hf.Block
    config, mixer = gated_deltanet.describe_fla_decoder(model, Mixer, block_type)
    hf.check_type("norm of all heads", mixer.readout.norm, RMSNorm)
    ratio = mixer.projections.key_dim
    return {**config, **gla.describe_mixer(mixer), "expand_ratio": ratio, "use_lower_bound": is_bounded}


HGRN2 = dataclasses.replace(
    gated_deltanet.make_fla_family(
        "hgrn2",
        "HGRN2ForCausalLM",
        Mixer,
        factory=_make_hgrn2_factory,
        names=lambda config: {},
        describe=gla.describe_mixer,
        defaults={
            **gated_deltanet.HYBRID_DEFAULTS,
            **gla.CONVOLUTION_DEFAULTS,
            "num_heads": hf.optional_count(),
            "expand_ratio": hf.optional_count(128),
            "use_lower_bound": True,
            "elementwise_affine": True,
        },
    ),
    build=_build_hgrn2,
    names=_map_names,
    describe=_describe_hgrn2,
)

"""HGRN2 (Qin et al., arXiv:2404.07904) as flash-linear-attention stores it, with lower bounds of forget gates that are
learned over the depth."""

from functools import partial
from typing import Any

from jaxtyping import Array, Key

from zoo.layers import HGRN2 as Mixer
from zoo.layers import RMSNorm
from zoo.models.hf import grammar as hf
from zoo.parallel import Dim

from . import gla
from .gated_deltanet import HYBRID_DEFAULTS, SHARED_FACTS, build_fla_decoder, describe_fla_decoder, map_fla_names
from .hgrn2_layers import BoundedBlock, LowerBounds


def _build_hgrn2(config: hf.Config, *, key: Key[Array, ""]) -> hf.Decoder:
    embed = config["hidden_size"]
    size = config["expand_ratio"] or embed // (config["num_heads"] or 1)  # expand_ratio wins, as in fla
    if not size or embed % size or (config["expand_ratio"], config["num_heads"]) == (None, None):
        sizes = f"expand_ratio = {config['expand_ratio']}, num_heads = {config['num_heads']}"
        raise hf.ConfigError(f"{sizes}: they should divide hidden_size = {embed} evenly over heads")
    heads = embed // size
    epsilon = 1e-5 * size  # whatever norm_eps says, and fla divides queries by the root of their size
    mixer = partial(
        Mixer,
        embed,
        heads,
        conv_width=config["conv_size"] if config["use_short_conv"] else None,
        norm=partial(RMSNorm, embed, features=Dim("heads", size), epsilon=epsilon, scaled=config["elementwise_affine"]),
        out_scale=hf.compute_out_scale(config),
    )
    if not config["use_lower_bound"]:
        return build_fla_decoder(config, mixer, key=key)
    bounds = partial(LowerBounds, config["num_hidden_layers"], embed, size)
    return build_fla_decoder(config, mixer, block=BoundedBlock, layer_inputs=bounds, key=key)


_NAMES: hf.NameMap = {
    "q_proj": "projections.query",
    "f_proj": "projections.key",
    "i_proj": "projections.value",
    "g_norm": "readout.norm",
    "o_proj": "readout.out",
}
_CONVOLUTION_NAMES = dict(zip(("q_conv1d", "f_conv1d", "i_conv1d"), gla.CONVOLUTION_NAMES.values(), strict=True))


def _map_hgrn2_names(config: hf.Config) -> hf.NameMap:
    return {**map_fla_names("hgrn2", {**_NAMES, **_CONVOLUTION_NAMES}), "model.lower_bounds": "layer_inputs.weight"}


def _describe_hgrn2(model: Any) -> dict[str, Any]:
    block_type = BoundedBlock if isinstance(model.layer_inputs, LowerBounds) else hf.Block
    config, mixer = describe_fla_decoder(model, Mixer, block_type)
    norm = mixer.readout.norm
    hf.check_type("norm of all heads", norm, RMSNorm)
    return config | {
        "expand_ratio": mixer.projections.key_dim,
        "elementwise_affine": norm.weight is not None,
        **gla.describe_convolutions(mixer),
        "use_lower_bound": block_type is BoundedBlock,
    }


HGRN2 = hf.Family(
    name="hgrn2",
    architecture="HGRN2ForCausalLM",
    build=_build_hgrn2,
    names=_map_hgrn2_names,
    defaults={
        **HYBRID_DEFAULTS,
        "num_heads": hf.optional_count(),
        "expand_ratio": hf.optional_count(128),
        **gla.CONVOLUTION_DEFAULTS,
        "use_lower_bound": True,
        "elementwise_affine": True,
    },
    describe=_describe_hgrn2,
    **SHARED_FACTS,
)

"""OLMo 3 (OLMo team, arXiv:2512.13961): OLMo 2's layer, with a sliding window in three of four layers, and scaled RoPE
only in the fourth."""

from functools import partial

from jaxtyping import Array, Key

from zoo.layers import RMSNorm
from zoo.models.blocks import PostNormBlock
from zoo.models.decoder import Decoder
from zoo.models.hf.builders import (
    build_config_decoder,
    build_layer_rotaries,
    list_layer_windows,
    list_patterned_types,
    make_gated_mlp_factory,
    make_layerwise_attention_factories,
    make_rms_norm_factory,
    read_layer_types,
)
from zoo.models.hf.kinds import optional_non_negative, optional_words
from zoo.models.hf.rope_config import LAYER_TYPES
from zoo.models.hf.spec import Config, Family

from . import llama, olmo2


def _build_olmo3(config: Config, *, key: Key[Array, ""]) -> Decoder:
    types = read_layer_types(config, list_patterned_types(Config(config, sliding_window_pattern=4)))
    windows = list_layer_windows(types, config["sliding_window"])
    rotaries = build_layer_rotaries(config, types)
    bias = config["attention_bias"]
    norm_over_heads = partial(RMSNorm, epsilon=config["rms_norm_eps"])
    options = {"norm_over_heads": norm_over_heads, "bias": bias, "out_bias": bias}
    mixers = make_layerwise_attention_factories(config, windows, rotaries, **options)
    ffn = make_gated_mlp_factory(config)
    layers = [(mixer, ffn) for mixer in mixers]
    return build_config_decoder(config, layers, make_rms_norm_factory(config), block=PostNormBlock, key=key)


OLMO3 = Family(
    name="olmo3",
    architecture="Olmo3ForCausalLM",
    build=_build_olmo3,
    names=olmo2.map_olmo2_names,
    defaults={
        **olmo2.DEFAULTS,
        "rope_parameters": {kind: {"rope_theta": 500000.0} for kind in LAYER_TYPES},
        "sliding_window": optional_non_negative(4096),
        "layer_types": optional_words(),
    },
    ignored_tensors=llama.LLAMA.ignored_tensors,
)

"""OLMo 3 (OLMo team, arXiv:2512.13961): OLMo 2's layer, with a sliding window in three of four layers, and scaled RoPE
only in the fourth."""

from functools import partial

from jaxtyping import Array, Key

from zoo.layers import RMSNorm
from zoo.models.hf import grammar as hf

from . import llama, olmo2


def _build_olmo3(config: hf.Config, *, key: Key[Array, ""]) -> hf.Decoder:
    types = hf.read_layer_types(config, hf.list_patterned_types(hf.Config(config, sliding_window_pattern=4)))
    windows = hf.list_layer_windows(types, config["sliding_window"])
    rotaries = hf.build_layer_rotaries(config, types)
    bias = config["attention_bias"]
    norm_over_heads = partial(RMSNorm, epsilon=config["rms_norm_eps"])
    options = {"norm_over_heads": norm_over_heads, "bias": bias, "out_bias": bias}
    mixers = hf.make_layerwise_attention_factories(config, windows, rotaries, **options)
    ffn = hf.make_gated_mlp_factory(config)
    layers = [(mixer, ffn) for mixer in mixers]
    return hf.build_config_decoder(config, layers, hf.make_rms_norm_factory(config), block=hf.PostNormBlock, key=key)


OLMO3 = hf.Family(
    name="olmo3",
    architecture="Olmo3ForCausalLM",
    build=_build_olmo3,
    names=olmo2.map_olmo2_names,
    defaults={
        **olmo2.DEFAULTS,
        "rope_parameters": {kind: {"rope_theta": 500000.0} for kind in hf.LAYER_TYPES},
        "sliding_window": hf.optional_non_negative(4096),
        "layer_types": hf.optional_words(),
    },
    ignored_tensors=llama.LLAMA.ignored_tensors,
)

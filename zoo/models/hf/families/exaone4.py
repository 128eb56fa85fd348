"""EXAONE 4.0 (LG AI Research, arXiv:2507.11407): norms after attention and MLP, QK norm per head; of four layers, three
have a sliding window and RoPE, and the fourth has neither."""

from collections.abc import Callable

from jaxtyping import Array, Key

from zoo.layers import Attention
from zoo.models.blocks import PostNormBlock
from zoo.models.decoder import Decoder
from zoo.models.hf.builders import (
    build_config_decoder,
    build_rotary,
    list_layer_windows,
    list_patterned_types,
    make_gated_mlp_factory,
    make_head_norm_factory,
    make_layerwise_attention_factories,
    make_rms_norm_factory,
    read_layer_types,
)
from zoo.models.hf.kinds import WINDOW_PATTERN, Default, optional_count, optional_non_negative, optional_words
from zoo.models.hf.spec import Config, Family

from . import llama, olmo2


def _build_exaone4(config: Config, *, key: Key[Array, ""]) -> Decoder:
    ffn = make_gated_mlp_factory(config)
    norm = make_rms_norm_factory(config)
    layers = [(mixer, ffn) for mixer in make_exaone4_mixers(config)]
    return build_config_decoder(config, layers, norm, block=PostNormBlock, key=key)


def make_exaone4_mixers(config: Config) -> list[Callable[..., Attention]]:
    """Return a factory of attention per layer: with QK norm, and with RoPE where there is a window, or none at all."""
    rotary = build_rotary(config)
    window = config["sliding_window"]
    windows = list_layer_windows(read_layer_types(config, _list_default_types(config)), window)
    rotaries = [rotary if window is None or own is not None else None for own in windows]
    return make_layerwise_attention_factories(config, windows, rotaries, qk_norm=make_head_norm_factory(config))


def _list_default_types(config: Config) -> list[str]:
    """Return the default `layer_types`."""
    if config["sliding_window"] is None:
        return ["full_attention"] * config["num_hidden_layers"]
    return list_patterned_types(config)


DEFAULTS = {
    **{key: value for key, value in llama.DEFAULTS.items() if key not in ("attention_bias", "mlp_bias")},
    "vocab_size": 102400,
    "intermediate_size": 16384,
    "num_key_value_heads": optional_count(32),
    "rms_norm_eps": 1e-5,
    "sliding_window": optional_non_negative(4096),
    "sliding_window_pattern": Default(4, WINDOW_PATTERN),
    "layer_types": optional_words(),
}

EXAONE4 = Family(
    name="exaone4",
    architecture="Exaone4ForCausalLM",
    build=_build_exaone4,
    names=olmo2.map_olmo2_names,
    defaults=DEFAULTS,
    ignored_tensors=llama.LLAMA.ignored_tensors,
)

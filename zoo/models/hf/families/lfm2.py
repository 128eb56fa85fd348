"""LFM2 (Liquid AI, arXiv:2511.23404): short convolutions with two gates in most layers, and grouped-query attention
with QK norm in the others."""

from collections.abc import Callable
from functools import partial
from types import MappingProxyType
from typing import Any

from jaxtyping import Array, Key

from zoo.layers import DoubleGatedConvolution
from zoo.models.decoder import Decoder
from zoo.models.hf.builders import (
    build_config_decoder,
    compute_out_scale,
    make_attention_factory,
    make_gated_mlp_factory,
    make_head_norm_factory,
    make_rms_norm_factory,
    pick_mixers,
    read_layer_types,
)
from zoo.models.hf.kinds import Default, optional_count, optional_layer_numbers, optional_words
from zoo.models.hf.spec import Config, Family, NameMap, fused, prefixed
from zoo.models.hf.values import POSITIVE_NUMBER

from . import llama, mixtral


def _build_lfm2(config: Config, *, key: Key[Array, ""]) -> Decoder:
    ffn = make_gated_mlp_factory(config, width=_compute_width(config))
    attended = config["full_attn_idxs"]
    numbers = range(config["num_hidden_layers"])
    if attended is None:
        attended = numbers
    default = ["full_attention" if number in attended else "conv" for number in numbers]
    layers = [(mixer, ffn) for mixer in list_lfm2_mixers(config, default)]
    return build_config_decoder(config, layers, make_rms_norm_factory(config), key=key)


def list_lfm2_mixers(config: Config, default: list[str]) -> list[Callable[..., Any]]:
    """Return the mixer factory of each layer. `default`: types of the layers of a config without `layer_types`.

    **Raises** `ConfigError` for another type than conv and full_attention.
    """
    attention = make_attention_factory(config, qk_norm=make_head_norm_factory(config))
    mixers = {"conv": make_convolution_factory(config), "full_attention": attention}
    return pick_mixers(read_layer_types(config, default), mixers)


def make_convolution_factory(config: Config) -> Callable[..., DoubleGatedConvolution]:
    """Return a factory of the short convolutions of LFM's decoders."""
    return partial(
        DoubleGatedConvolution,
        config["hidden_size"],
        conv_width=config["conv_L_cache"],
        bias=config["conv_bias"],
        out_scale=compute_out_scale(config),
    )


def _compute_width(config: Config) -> int:
    """Return the width of the MLPs: `intermediate_size`, or two thirds of it, times the multiplier, rounded up."""
    width = config["intermediate_size"]
    if not config["block_auto_adjust_ff_dim"]:
        return width
    width = int(2 * width / 3)
    unit = config["block_multiple_of"]
    return -(-int(config["block_ffn_dim_multiplier"] * width) // unit) * unit


_NORM_NAMES: NameMap = {"operator_norm": "mixer_norm", "ffn_norm": "ffn_norm"}
_ATTENTION_NAMES: NameMap = {
    "q_proj": "query",
    "k_proj": "key",
    "v_proj": "value",
    "out_proj": "out",
    "q_layernorm": "query_norm",
    "k_layernorm": "key_norm",
}
_CONVOLUTION_NAMES: NameMap = {
    "in_proj": fused("input_gate", "output_gate", "into"),
    "conv": fused("convolution", conv1d_filters=True),
    "out_proj": "out",
}


def map_lfm2_layers(
    feed_forward: NameMap, attention: NameMap | None = None, further_norms: NameMap = MappingProxyType({})
) -> NameMap:
    """Return the name map of LFM's decoders, given the names of the feed-forward layers; of the attention if they are
    not LFM2's; and of norms besides the two before sublayers."""
    if attention is None:
        attention = prefixed("", "attention", _ATTENTION_NAMES)
    block = {
        **_NORM_NAMES,
        **further_norms,
        **prefixed("self_attn", "", attention),
        **prefixed("conv", "double_gated_convolution", _CONVOLUTION_NAMES),
        **prefixed("feed_forward", "", feed_forward),
    }
    shell = {"model.embed_tokens": "embedding", "model.embedding_norm": "norm", "lm_head": "head"}
    return {**shell, **prefixed("model.layers.*", "layers.*", block)}


def _map_lfm2_names(config: Config) -> NameMap:
    return map_lfm2_layers(prefixed("", "gated_mlp", mixtral.EXPERT_NAMES))


DEFAULTS = {
    **{key: value for key, value in llama.DEFAULTS.items() if key not in ("attention_bias", "mlp_bias")},
    "vocab_size": 65536,
    "num_key_value_heads": optional_count(8),
    "max_position_embeddings": 128000,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_theta": 1000000.0},
    "layer_types": optional_words(),
    "conv_bias": False,
    "conv_L_cache": 3,
}
ALIASES = {"norm_eps": "rms_norm_eps", "tie_embedding": "tie_word_embeddings"}

LFM2 = Family(
    name="lfm2",
    architecture="Lfm2ForCausalLM",
    build=_build_lfm2,
    names=_map_lfm2_names,
    defaults={
        **DEFAULTS,
        "hidden_size": 2560,
        "intermediate_size": 12288,
        "full_attn_idxs": optional_layer_numbers(),
        "block_multiple_of": 256,
        "block_ffn_dim_multiplier": Default(1.0, POSITIVE_NUMBER),
        "block_auto_adjust_ff_dim": True,
    },
    aliases={**ALIASES, "block_ff_dim": "intermediate_size"},
    ignored_keys=frozenset(  # Liquid AI's files have them, and the class does not read them
        """
        block_dim block_mlp_init_scale block_norm_eps block_out_init_scale block_use_swiglu block_use_xavier_init
        conv_dim conv_dim_out conv_use_xavier_init num_heads use_pos_enc
        """.split()
    ),
    ignored_tensors=llama.LLAMA.ignored_tensors,
)

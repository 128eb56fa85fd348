"""LFM2 (Liquid AI, arXiv:2511.23404): short convolutions with two gates in most layers, and grouped-query attention
with QK norm in the others."""

from collections.abc import Callable
from functools import partial
from types import MappingProxyType
from typing import Any

from jaxtyping import Array, Key

from zoo.layers import DoubleGatedConvolution
from zoo.models.hf import grammar as hf

from . import llama, mixtral


def _build_lfm2(config: hf.Config, *, key: Key[Array, ""]) -> hf.Decoder:
    ffn = hf.make_gated_mlp_factory(config, width=_compute_width(config))
    attended = config["full_attn_idxs"]
    numbers = range(config["num_hidden_layers"])
    if attended is None:
        attended = numbers
    default = ["full_attention" if number in attended else "conv" for number in numbers]
    layers = [(mixer, ffn) for mixer in list_lfm2_mixers(config, default)]
    return hf.build_config_decoder(config, layers, hf.make_rms_norm_factory(config), key=key)


def list_lfm2_mixers(config: hf.Config, default: list[str]) -> list[Callable[..., Any]]:
    """Return the mixer factory of each layer. `default`: types of the layers of a config without `layer_types`.

    **Raises** `ConfigError` for another type than conv and full_attention.
    """
    attention = hf.make_attention_factory(config, qk_norm=hf.make_head_norm_factory(config))
    mixers = {"conv": make_convolution_factory(config), "full_attention": attention}
    return hf.pick_mixers(hf.read_layer_types(config, default), mixers)


def make_convolution_factory(config: hf.Config) -> Callable[..., DoubleGatedConvolution]:
    """Return a factory of the short convolutions of LFM's decoders."""
    return partial(
        DoubleGatedConvolution,
        config["hidden_size"],
        conv_width=config["conv_L_cache"],
        bias=config["conv_bias"],
        out_scale=hf.compute_out_scale(config),
    )


def _compute_width(config: hf.Config) -> int:
    """Return the width of the MLPs: `intermediate_size`, or two thirds of it, times the multiplier, rounded up."""
    width = config["intermediate_size"]
    if not config["block_auto_adjust_ff_dim"]:
        return width
    width = int(2 * width / 3)
    unit = config["block_multiple_of"]
    return -(-int(config["block_ffn_dim_multiplier"] * width) // unit) * unit


_NORM_NAMES: hf.NameMap = {"operator_norm": "mixer_norm", "ffn_norm": "ffn_norm"}
_ATTENTION_NAMES: hf.NameMap = {
    "q_proj": "query",
    "k_proj": "key",
    "v_proj": "value",
    "out_proj": "out",
    "q_layernorm": "query_norm",
    "k_layernorm": "key_norm",
}
_CONVOLUTION_NAMES: hf.NameMap = {
    "in_proj": hf.fused("input_gate", "output_gate", "into"),
    "conv": hf.fused("convolution", conv1d_filters=True),
    "out_proj": "out",
}


def map_lfm2_layers(
    feed_forward: hf.NameMap, attention: hf.NameMap | None = None, further_norms: hf.NameMap = MappingProxyType({})
) -> hf.NameMap:
    """Return the name map of LFM's decoders, given the names of the feed-forward layers; of the attention if they are
    not LFM2's; and of norms besides the two before sublayers."""
    if attention is None:
        attention = hf.prefixed("", "attention", _ATTENTION_NAMES)
    block = {
        **_NORM_NAMES,
        **further_norms,
        **hf.prefixed("self_attn", "", attention),
        **hf.prefixed("conv", "double_gated_convolution", _CONVOLUTION_NAMES),
        **hf.prefixed("feed_forward", "", feed_forward),
    }
    shell = {"model.embed_tokens": "embedding", "model.embedding_norm": "norm", "lm_head": "head"}
    return {**shell, **hf.prefixed("model.layers.*", "layers.*", block)}


def _map_lfm2_names(config: hf.Config) -> hf.NameMap:
    return map_lfm2_layers(hf.prefixed("", "gated_mlp", mixtral.EXPERT_NAMES))


DEFAULTS = {
    **hf.omit(llama.DEFAULTS, "attention_bias", "mlp_bias"),
    "vocab_size": 65536,
    "num_key_value_heads": hf.optional_count(8),
    "max_position_embeddings": 128000,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_theta": 1000000.0},
    "layer_types": hf.optional_words(),
    "conv_bias": False,
    "conv_L_cache": 3,
}
ALIASES = {"norm_eps": "rms_norm_eps", "tie_embedding": "tie_word_embeddings"}

LFM2 = hf.Family(
    name="lfm2",
    architecture="Lfm2ForCausalLM",
    build=_build_lfm2,
    names=_map_lfm2_names,
    defaults={
        **DEFAULTS,
        "hidden_size": 2560,
        "intermediate_size": 12288,
        "full_attn_idxs": hf.optional_layer_numbers(),
        "block_multiple_of": 256,
        "block_ffn_dim_multiplier": hf.Default(1.0, hf.POSITIVE_NUMBER),
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

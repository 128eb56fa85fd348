"""Bamba (IBM, Princeton, CMU and UIUC, "Bamba: Inference-Efficient Hybrid Mamba2 Model", 2024): Mamba-2 in most layers
and attention in a few, which turns half of each head, and a gated MLP after each."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from jaxtyping import Array, Key

from zoo.layers import Mamba2
from zoo.models.hf import grammar as hf

from . import llama
from .mamba import COUNT_OR_AUTO
from .mamba2 import MIXER_NAMES, TIME_STEP_LIMIT, read_dt_limits


def _build_bamba(config: hf.Config, *, key: Key[Array, ""]) -> hf.Decoder:
    count = config["num_hidden_layers"]
    chosen = config["attn_layer_indices"] or []
    if outside := [number for number in chosen if number >= count]:
        raise hf.ConfigError(f"attn_layer_indices has {outside[0]}, and the {count} layers are numbered from 0")
    bias = config["attention_bias"]
    attention = hf.make_attention_factory(config, bias=bias, out_bias=bias)
    mamba = make_mamba2_factory(config)
    ffn = hf.make_gated_mlp_factory(config, bias=config["mlp_bias"])
    layers = [(attention if number in chosen else mamba, ffn) for number in range(count)]
    return hf.build_config_decoder(config, layers, hf.make_rms_norm_factory(config), key=key)


def make_mamba2_factory(config: hf.Config, *, inner: int | None = None, **options: Any) -> Callable[..., Mamba2]:
    """Return a factory of `Mamba2` with the sizes of a hybrid's config, and these options. It has `inner` channels
    (`mamba_d_ssm`), `mamba_expand * hidden_size` by default.

    **Raises** `ConfigError` unless heads share out the channels, and groups the heads.
    """
    heads = config["mamba_n_heads"]
    groups = config["mamba_n_groups"]
    words = "mamba_d_ssm"
    if inner is None:
        inner = config["mamba_expand"] * config["hidden_size"]
        words = "mamba_expand * hidden_size"
    head_dim = config["mamba_d_head"]
    if head_dim == "auto":
        head_dim = inner // heads
    if inner != heads * head_dim:
        raise hf.ConfigError(f"{words} = {inner} should be mamba_n_heads * mamba_d_head = {heads} * {head_dim}")
    if heads % groups:
        raise hf.ConfigError(f"mamba_n_heads = {heads} heads do not divide evenly over mamba_n_groups = {groups}")
    options = {
        "head_dim": head_dim,
        "groups": groups,
        "state_dim": config["mamba_d_state"],
        "conv_width": config["mamba_d_conv"],
        "bias": config["mamba_proj_bias"],
        "conv_bias": config["mamba_conv_bias"],
        "epsilon": config["rms_norm_eps"],
        "dt_limit": read_dt_limits(config),
        "out_scale": hf.compute_out_scale(config),
        **options,
    }
    return partial(Mamba2, config["hidden_size"], heads, **options)


def map_bamba_layers(mixers: hf.NameMap, feed_forward: hf.NameMap) -> hf.NameMap:
    """Return the name map of a model whose layers are called as Bamba's and Jamba's are."""
    block = {"input_layernorm": "mixer_norm", "pre_ff_layernorm": "ffn_norm", **mixers, **feed_forward}
    shell = {"model.embed_tokens": "embedding", "model.final_layernorm": "norm", "lm_head": "head"}
    return {**shell, **hf.prefixed("model.layers.*", "layers.*", block)}


def _map_bamba_names(config: hf.Config) -> hf.NameMap:
    mixers = {**ATTENTION_NAMES, **MAMBA2_NAMES}
    return map_bamba_layers(mixers, hf.prefixed("feed_forward", "gated_mlp", llama.GATED_MLP_NAMES))


ATTENTION_NAMES = hf.prefixed("self_attn", "attention", llama.ATTENTION_NAMES)
MAMBA2_NAMES = hf.prefixed("mamba", "mamba2", MIXER_NAMES)

MAMBA2_DEFAULTS: Mapping[str, Any] = {
    "mamba_n_heads": 128,
    "mamba_d_head": hf.Default("auto", COUNT_OR_AUTO),
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
    "time_step_limit": TIME_STEP_LIMIT,
}
REQUIRED_VALUES: Mapping[str, tuple] = {"hidden_act": ("silu", "swish")}
"""The activation is Mamba's, too, which has no other."""
IGNORED_KEYS = frozenset({"mamba_chunk_size", "num_logits_to_keep", "use_mamba_kernels"})
"""Implementation."""

BAMBA = hf.Family(
    name="bamba",
    architecture="BambaForCausalLM",
    build=_build_bamba,
    names=_map_bamba_names,
    defaults={
        **llama.DEFAULTS,
        "vocab_size": 128000,
        "intermediate_size": 14336,
        "num_key_value_heads": hf.optional_count(8),
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        "attn_layer_indices": hf.optional_layer_numbers(),
        **MAMBA2_DEFAULTS,
    },
    required_values=REQUIRED_VALUES,
    ignored_keys=IGNORED_KEYS
    | {
        "attn_rotary_emb",  # in older files, but transformers does not read it: half of each head turns
        "z_loss_coefficient",  # training
    },
    ignored_tensors=llama.LLAMA.ignored_tensors,
)

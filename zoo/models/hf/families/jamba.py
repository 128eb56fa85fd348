"""Jamba (Lieber et al., arXiv:2403.19887): Mamba in most layers, with norms of steps, B and C, and attention without
positions in a few; a mixture of experts after every other mixer, and a gated MLP after the rest."""

from functools import partial

from jaxtyping import Array, Key

from zoo.layers import Mamba, RMSNorm, SoftmaxRouter
from zoo.models.hf import grammar as hf

from . import bamba, llama
from .mamba import COUNT_OR_AUTO, MIXER_NAMES


def _build_jamba(config: hf.Config, *, key: Key[Array, ""]) -> hf.Decoder:
    rank = config["mamba_dt_rank"]
    if rank == "auto":
        rank = None
    mamba = partial(
        Mamba,
        config["hidden_size"],
        inner=config["mamba_expand"] * config["hidden_size"],
        state_dim=config["mamba_d_state"],
        rank=rank,
        conv_width=config["mamba_d_conv"],
        bias=config["mamba_proj_bias"],
        conv_bias=config["mamba_conv_bias"],
        norm=partial(RMSNorm, epsilon=config["rms_norm_eps"]),
        out_scale=hf.compute_out_scale(config),
    )
    attention = hf.make_attention_factory(config, rotary=None)
    mixers = [attention if chosen else mamba for chosen in _mark_layers(config, "attn")]
    dense = hf.make_gated_mlp_factory(config)
    if config["num_experts"] > 1:
        experts = hf.make_mixture_factory(config, partial(SoftmaxRouter, renormalize=False), config["num_experts"])
    else:
        experts = dense  # one expert is an MLP, which no router precedes
    ffns = [experts if chosen else dense for chosen in _mark_layers(config, "expert")]
    layers = list(zip(mixers, ffns, strict=True))
    return hf.build_config_decoder(config, layers, hf.make_rms_norm_factory(config), key=key)


def _mark_layers(config: hf.Config, kind: str) -> list[bool]:
    """Return True for each layer of a kind: one of every `period`, the first of them at `offset`.

    **Raises** `ConfigError` for an offset beyond the period.
    """
    period = config[f"{kind}_layer_period"]
    offset = config[f"{kind}_layer_offset"]
    if offset >= period:
        raise hf.ConfigError(f"{kind}_layer_offset = {offset} should be below {kind}_layer_period = {period}")
    return [number % period == offset for number in range(config["num_hidden_layers"])]


def _map_jamba_names(config: hf.Config) -> hf.NameMap:
    return _map_jamba_layers(
        {"router": "router.scores", **hf.prefixed("experts.*", "experts.*", llama.GATED_MLP_NAMES)}
    )


def _map_jamba_memory_names(config: hf.Config) -> hf.NameMap:
    return _map_jamba_layers(
        {"router": "router.scores", **hf.prefixed("experts", "experts.*", llama.FUSED_EXPERT_NAMES)}
    )


def _map_jamba_layers(mixture: hf.NameMap) -> hf.NameMap:
    norms = {"dt_layernorm": "dt_norm", "b_layernorm": "B_norm", "c_layernorm": "C_norm"}
    mixers = {**bamba.ATTENTION_NAMES, **hf.prefixed("mamba", "mamba", {**MIXER_NAMES, **norms})}
    feed_forward = {
        **hf.prefixed("feed_forward", "gated_mlp", llama.GATED_MLP_NAMES),
        **hf.prefixed("feed_forward", "mixture_of_experts", mixture),
    }
    return bamba.map_bamba_layers(mixers, feed_forward)


JAMBA = hf.Family(
    name="jamba",
    architecture="JambaForCausalLM",
    build=_build_jamba,
    names=_map_jamba_names,
    defaults={
        **hf.omit(llama.DEFAULTS, "rope_parameters", "max_position_embeddings", "attention_bias", "mlp_bias"),
        "vocab_size": 65536,
        "intermediate_size": 14336,
        "num_key_value_heads": hf.optional_count(8),
        "num_experts": 16,
        "num_experts_per_tok": 2,
        "expert_layer_period": 2,
        "expert_layer_offset": hf.non_negative(1),
        "attn_layer_period": 8,
        "attn_layer_offset": hf.non_negative(4),
        "mamba_d_state": 16,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_dt_rank": hf.Default("auto", COUNT_OR_AUTO),
        "mamba_conv_bias": True,
        "mamba_proj_bias": False,
    },
    aliases={"num_local_experts": "num_experts"},
    required_values={
        **bamba.REQUIRED_VALUES,
        "mamba_inner_layernorms": (True,),
        "sliding_window": (None,),
    },
    ignored_keys=frozenset(
        {
            "max_position_embeddings",  # training length, which no layer reads
            *("use_mamba_kernels", "use_mambapy", "use_associative_scan"),  # implementation
            *("num_logits_to_keep", "calc_logits_for_entire_prompt"),
        }
    ),
    memory_names=_map_jamba_memory_names,
)

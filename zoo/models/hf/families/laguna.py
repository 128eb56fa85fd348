"""Laguna (Poolside, "Laguna XS.2", 2026): attention with QK norm and a softplus gate for each head, full with RoPE on
half of each head or in a sliding window, in numbers of heads that differ by layer; a mixture of experts routed by
sigmoid scores and a selection bias, after a dense layer."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from zoo.layers import GatedAttention
from zoo.models.hf import grammar as hf

from . import dots1, llama


def _build_laguna(config: hf.Config, *, key: Key[Array, ""]) -> hf.Decoder:
    mixers = _make_gated_mixers(config)
    routing = {"n_group": 1, "topk_group": 1, "norm_topk_prob": True, "first_k_dense_replace": 1}
    config = hf.Config(config, **routing)
    cap = config["moe_router_logit_softcapping"] or None
    router = hf.make_biased_router_factory(config, soft_cap=cap)
    widths = {"width": config["moe_intermediate_size"], "shared": config["shared_expert_intermediate_size"]}
    sparse = hf.make_mixture_factory(config, router, config["num_experts"], **widths)
    dense = hf.make_gated_mlp_factory(config)
    ffns = [sparse if is_sparse else dense for is_sparse in dots1.mark_dots1_moe_layers(config)]
    norm = hf.make_rms_norm_factory(config)
    return hf.build_config_decoder(config, list(zip(mixers, ffns, strict=True)), norm, key=key)


def _make_gated_mixers(config: hf.Config) -> list[Callable[..., GatedAttention]]:
    """Return a factory of attention per layer; one for all layers of equal heads, window and RoPE."""
    layers = config["num_hidden_layers"]
    types = hf.read_layer_types(config, ["full_attention"] * layers)
    heads = config["num_attention_heads_per_layer"]
    if heads is None:
        heads = [config["num_attention_heads"]] * layers
    if len(heads) != layers:
        raise hf.ConfigError(f"num_attention_heads_per_layer should have a number for each of {layers} layers")
    config = hf.Config(config, head_dim=hf.read_head_sizes(config)[2])
    windows = hf.list_layer_windows(types, config["sliding_window"])
    bias = config["attention_bias"]
    options = {
        "attention": GatedAttention,
        "per_head": config["gating"] is not False,
        "activation": _compute_softplus,
        "qk_norm": hf.make_head_norm_factory(config),
        "bias": bias,
        "out_bias": bias,
    }
    kinds = list(zip(heads, windows, hf.build_layer_rotaries(config, types), strict=True))
    factories = {
        kind: hf.make_attention_factory(
            hf.Config(config, num_attention_heads=kind[0]), window=kind[1], rotary=kind[2], **options
        )
        for kind in dict.fromkeys(kinds)
    }
    return [factories[kind] for kind in kinds]


def _compute_softplus(x: Float[Array, "*rows gates"]) -> Float[Array, "*rows gates"]:
    """Compute log(1 + e^x) in float32."""
    return jax.nn.softplus(x.astype(jnp.float32)).astype(x.dtype)


def _map_laguna_layers(mixture: hf.NameMap) -> hf.NameMap:
    attention = hf.prefixed("self_attn", "gated_attention", {**llama.ATTENTION_NAMES, "g_proj": "gate"})
    feed_forward = {
        **hf.prefixed("mlp", "gated_mlp", llama.GATED_MLP_NAMES),
        **hf.prefixed("mlp", "mixture_of_experts", {"gate": "router.scores", **mixture}),
    }
    return llama.map_llama_layers(feed_forward, attention)


def _map_laguna_names(config: hf.Config) -> hf.NameMap:
    mixture = {
        "experts.e_score_correction_bias": "router.selection_bias",
        **hf.prefixed("shared_expert", "shared", llama.GATED_MLP_NAMES),
        **hf.prefixed("experts.*", "experts.*", llama.GATED_MLP_NAMES),
    }
    return _map_laguna_layers(mixture)


def _map_laguna_memory_names(config: hf.Config) -> hf.NameMap:
    mixture = {
        "gate.e_score_correction_bias": "router.selection_bias",
        **hf.prefixed("shared_experts", "shared", llama.GATED_MLP_NAMES),
        **hf.prefixed("experts", "experts.*", llama.FUSED_EXPERT_NAMES),
    }
    return _map_laguna_layers(mixture)


def _is_gate(value: object) -> bool:
    return isinstance(value, bool) or value == "per-head"


LAGUNA = hf.Family(
    name="laguna",
    architecture="LagunaForCausalLM",
    build=_build_laguna,
    names=_map_laguna_names,
    defaults={
        **hf.omit(llama.DEFAULTS, "mlp_bias"),
        "vocab_size": 100352,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 40,
        "num_attention_heads": 48,
        "num_attention_heads_per_layer": hf.Default(None, hf.optional(hf.list_of(hf.COUNT))),
        "num_key_value_heads": hf.optional_count(8),
        "head_dim": hf.optional_count(128),
        "max_position_embeddings": 131072,
        "rope_parameters": {
            "full_attention": {"rope_theta": 500000.0, "partial_rotary_factor": 0.5},
            "sliding_attention": {"rope_theta": 10000.0, "partial_rotary_factor": 1.0},
        },
        "sliding_window": hf.optional_non_negative(512),
        "layer_types": hf.optional_words(),
        "mlp_layer_types": hf.optional_words(),
        "gating": hf.Default(True, hf.ValueKind('true or "per-head", or false for a gate of each channel', _is_gate)),
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "routed_scaling_factor": hf.Default(1.0, hf.POSITIVE_NUMBER),
        "moe_router_logit_softcapping": hf.Default(0.0, hf.NON_NEGATIVE_NUMBER),
    },
    aliases={"moe_routed_scaling_factor": "routed_scaling_factor"},
    required_values={"moe_apply_router_weight_on_input": (False,), "routed_scaling_factor": (None,)},
    ignored_tensors=llama.LLAMA.ignored_tensors,
    memory_names=_map_laguna_memory_names,
)

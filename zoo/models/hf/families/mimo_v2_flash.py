"""MiMo-V2-Flash (Xiaomi, arXiv:2601.02780): full attention in every sixth layer, and else a sliding window with sinks,
twice the KV heads and a RoPE of smaller base; RoPE on a third of each head, and scaled values of another size; a
mixture of experts routed by sigmoid scores and a selection bias. Multi-token prediction modules (MTP) are not read."""

from collections.abc import Sequence
from functools import partial

from jaxtyping import Array, Key

from zoo.models.hf import grammar as hf

from . import dots1, llama
from .mimo_v2_flash_layers import ValueScaledAttention


def _build_mimo_v2_flash(config: hf.Config, *, key: Key[Array, ""]) -> hf.Decoder:
    router = hf.make_biased_router_factory(
        hf.Config(config, routed_scaling_factor=config["routed_scaling_factor"] or 1.0)
    )
    experts = config["n_routed_experts"]
    width = config["moe_intermediate_size"]
    sparse = hf.make_mixture_factory(config, router, experts, width=width)
    dense = hf.make_gated_mlp_factory(config)
    pattern = config["hybrid_layer_pattern"]
    frequency = config["moe_layer_pattern"]
    if frequency is not None and config["mlp_layer_types"] is None:
        config = hf.Config(config, mlp_layer_types=["sparse" if is_moe else "dense" for is_moe in frequency])
    is_sparse = dots1.mark_dots1_moe_layers(hf.Config(config, first_k_dense_replace=1))
    if pattern is None:
        is_local = [n > 1 and n % 6 for n in range(1, config["num_hidden_layers"] + 1)]
    else:
        is_local = pattern
    types = hf.read_layer_types(config, ["sliding_attention" if local else "full_attention" for local in is_local])
    mixers = _make_mixers(config, types)
    layers = [(mixer, sparse if is_moe else dense) for mixer, is_moe in zip(mixers, is_sparse, strict=True)]
    return hf.build_config_decoder(config, layers, hf.make_rms_norm_factory(config), key=key)


def _make_mixers(config: hf.Config, types: Sequence[str]) -> list[hf.MixerFactory]:
    """Return a factory of attention per layer. A `sliding_window_size` does not count the token itself.

    **Raises** `ConfigError` without a number of KV heads, and for sliding layers of other sizes than full ones, but
    twice the KV heads.
    """
    sizes = {key: config[key] for key in ("num_attention_heads", "head_dim", "v_head_dim")}
    if config["num_key_value_heads"] is None:
        raise hf.ConfigError("num_key_value_heads = null: give the number of KV heads of full layers")
    sizes["num_key_value_heads"] = kv_heads = 2 * config["num_key_value_heads"]
    for key, value in sizes.items():
        if config[f"swa_{key}"] not in (None, value):
            raise hf.ConfigError(f"swa_{key} = {config[f'swa_{key}']}, and here sliding layers have {value}")
    size = config["sliding_window_size"]
    scale = config["attention_value_scale"]
    window = config["sliding_window"] if size is None else size + 1
    make = partial(
        hf.make_attention_factory,
        config,
        attention=ValueScaledAttention,
        value_dim=config["v_head_dim"],
        value_scale=1.0 if scale is None else scale,
        bias=config["attention_bias"],
    )
    factories = {}
    for kind, own in dict(zip(types, hf.list_layer_windows(types, window), strict=True)).items():
        local = {} if own is None else {"sinks": True, "kv_heads": kv_heads}
        factories[kind] = make(window=own, rotary=hf.build_rotary(config, layer_type=kind), **local)
    return [factories[kind] for kind in types]


def _map_mimo_v2_flash_names(
    config: hf.Config, experts: hf.NameMap | None = None, sinks: str = "attention_sink_bias"
) -> hf.NameMap:
    if experts is None:
        experts = hf.prefixed("experts.*", "experts.*", llama.GATED_MLP_NAMES)
    mixture = {"gate": "router.scores", "gate.e_score_correction_bias": "router.selection_bias", **experts}
    feed_forward = {
        **hf.prefixed("mlp", "gated_mlp", llama.GATED_MLP_NAMES),
        **hf.prefixed("mlp", "mixture_of_experts", mixture),
    }
    attention = hf.prefixed("self_attn", "value_scaled_attention", {**llama.ATTENTION_NAMES, sinks: "sinks"})
    return llama.map_llama_layers(feed_forward, attention)


def _map_mimo_v2_flash_memory_names(config: hf.Config) -> hf.NameMap:
    return _map_mimo_v2_flash_names(config, hf.prefixed("experts", "experts.*", llama.FUSED_EXPERT_NAMES), "sinks")


_ROPE = {"rope_type": "default", "partial_rotary_factor": 0.334}

MIMO_V2_FLASH = hf.Family(
    name="mimo_v2_flash",
    architecture="MiMoV2FlashForCausalLM",
    build=_build_mimo_v2_flash,
    names=_map_mimo_v2_flash_names,
    defaults={
        **hf.omit(dots1.DEFAULTS, "first_k_dense_replace"),
        "vocab_size": 152576,
        "intermediate_size": 16384,
        "num_hidden_layers": 48,
        "num_attention_heads": 64,
        "num_key_value_heads": hf.optional_count(4),
        "head_dim": hf.optional_count(192),
        "v_head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {
            "full_attention": {"rope_theta": 5000000.0, **_ROPE},
            "sliding_attention": {"rope_theta": 10000.0, **_ROPE},
        },
        "sliding_rope_theta": hf.optional_number(),
        "sliding_window": hf.optional_non_negative(129),
        "sliding_window_size": hf.optional_count(),
        "layer_types": hf.optional_words(),
        "mlp_layer_types": hf.optional_words(),
        "hybrid_layer_pattern": hf.optional_layer_numbers(),
        "moe_layer_pattern": hf.optional_layer_numbers(),
        **dict.fromkeys(
            ("swa_num_attention_heads", "swa_num_key_value_heads", "swa_head_dim", "swa_v_head_dim"),
            hf.optional_count(),
        ),
        "attention_value_scale": hf.optional_number(0.707),
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "routed_scaling_factor": hf.optional_number(),
    },
    aliases={
        "num_local_experts": "n_routed_experts",
        "swa_rope_theta": "sliding_rope_theta",
        "layernorm_epsilon": "rms_norm_eps",
        "moe_layer_freq": "moe_layer_pattern",
    },
    required_values={
        "scoring_func": ("sigmoid",),
        "topk_method": ("noaux_tc",),
        "n_shared_experts": (None,),
        "add_swa_attention_sink_bias": (True,),
        "add_full_attention_sink_bias": (False,),
    },
    ignored_keys=frozenset(
        {"attention_chunk_size", "hybrid_block_size"}
    ),  # of kernels, or null where there is a pattern
    ignored_tensors=llama.LLAMA.ignored_tensors,
    other_modules=(r"^model\.mtp\.",),
    memory_names=_map_mimo_v2_flash_memory_names,
)

"""DeepSeek-V4 (DeepSeek-AI, 2026): residual streams mixed by hyper-connections; attention with one key for all heads,
to a window and to compressed keys, all of them or those that an indexer selects; mixtures of experts routed by the id
of a token in the first layers, and by scores and a selection bias after them. Modules of multi-token prediction (MTP)
are not read."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jaxtyping import Array, Key

from zoo.layers import BiasedRouter, BlockIndexer, CompressedAttention, HashRouter
from zoo.models.hf import grammar as hf

from . import llama
from .gpt_oss_layers import ClampedGatedMLP

_RATES = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
"""Tokens of a block, by the type of a layer."""
_BLOCK_SIZES = hf.ValueKind(
    f"a table of whole numbers above 0 for {' and '.join(_RATES)}",
    lambda value: bool(value) and hf.table_of(hf.COUNT).fits(value) and value.keys() <= _RATES.keys(),
)
_LAYERS_OF_RATES = {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}
"""Types of layers by the `compress_ratios` of older files."""
_SCORES = {"sqrtsoftplus": "sqrt_softplus", "softmax": "softmax", "sigmoid": "sigmoid"}
_SCORE = hf.ValueKind(f"one of {', '.join(_SCORES)}", lambda value: hf.WORD.fits(value) and value in _SCORES)


def _build_deepseek_v4(config: hf.Config, *, key: Key[Array, ""]) -> hf.Decoder:
    norm = hf.make_rms_norm_factory(config)
    ffns = _make_mixtures(config)
    kinds = _read_mixture_types(config)
    wiring = hf.make_hyper_connections(
        config["hidden_size"],
        config["hc_mult"],
        norm,
        epsilon=config["hc_eps"],
        norm_epsilon=config["rms_norm_eps"],
        iterations=config["hc_sinkhorn_iters"],
        keeps_tokens="hash_moe" in kinds,
        key=jax.random.fold_in(key, 1),
    )
    mixers = hf.pick_mixers(_read_attention_types(config), _make_compressed_mixers(config))
    layers = list(zip(mixers, [ffns[kind] for kind in kinds], strict=True))
    return hf.build_config_decoder(config, layers, norm, key=key, **wiring)


def _make_compressed_mixers(config: hf.Config) -> dict[str, Callable[..., CompressedAttention]]:
    """Return the factories of attention by the type of a layer. **Raises** `ConfigError` for sizes that do not fit."""
    heads = config["num_attention_heads"]
    groups = config["o_groups"]
    if heads % groups:
        raise hf.ConfigError(f"num_attention_heads = {heads} do not divide evenly over o_groups = {groups}")
    turned = hf.build_rotary(config, interleaved=True, layer_type="compress")
    if turned.dim > config["index_head_dim"]:
        raise hf.ConfigError(f"index_head_dim = {config['index_head_dim']}, and {turned.dim} of them are to be turned")
    for kind, rope in config["rope_parameters"].items():
        if rope["rope_type"] in ("dynamic", "longrope"):
            raise hf.ConfigError(f"rope_type {rope['rope_type']!r} of {kind}: keys of blocks are turned once")
    rates = {**_RATES, **(config["compress_rates"] or {})}
    sizes = {"query_latent": config["q_lora_rank"], "epsilon": config["rms_norm_eps"]}
    make = partial(
        CompressedAttention,
        config["hidden_size"],
        heads,
        head_dim=config["head_dim"],
        window=config["sliding_window"],
        out_groups=groups,
        out_latent=config["o_lora_rank"],
        out_scale=hf.compute_out_scale(config),
        **sizes,
    )
    sparse = {"block": rates["compressed_sparse_attention"], "overlap": True}
    indexer = partial(
        BlockIndexer,
        config["hidden_size"],
        config["index_n_heads"],
        head_dim=config["index_head_dim"],
        top=config["index_topk"],
        **sizes,
        **sparse,
    )
    return {
        "sliding_attention": partial(make, rotary=hf.build_rotary(config, interleaved=True, layer_type="main")),
        "heavily_compressed_attention": partial(make, rotary=turned, block=rates["heavily_compressed_attention"]),
        "compressed_sparse_attention": partial(make, rotary=turned, indexer=indexer, **sparse),
    }


def _make_mixtures(config: hf.Config) -> dict[str, hf.FeedForwardFactory]:
    """Return the factories of mixtures of experts by the type of a layer."""
    options = {"score": _SCORES[config["scoring_func"]], "scale": config["routed_scaling_factor"]}
    routers = {
        "hash_moe": partial(HashRouter, vocab=config["vocab_size"], **options),
        "moe": partial(BiasedRouter, **options),
    }
    expert = make_clamped_mlp_factory(config)
    make = partial(hf.make_mixture_factory, config, experts=config["n_routed_experts"], expert=expert, shared=expert)
    return {kind: make(router) for kind, router in routers.items()}


def make_clamped_mlp_factory(config: hf.Config) -> Callable[..., ClampedGatedMLP]:
    """Return a factory of experts with a SwiGLU that is clamped to `swiglu_limit`."""
    options = {"limit": config["swiglu_limit"], "bias": False, "out_scale": hf.compute_out_scale(config)}
    return partial(
        ClampedGatedMLP, config["hidden_size"], config["moe_intermediate_size"], alpha=1.0, offset=0.0, **options
    )


def _read_attention_types(config: hf.Config) -> list[str]:
    """Return the type of attention of each layer: `layer_types`, or by `compress_ratios`, or, by default, two heavily
    compressed layers, and then such layers and sparse ones in turns.

    **Raises** `ConfigError` for other ratios, and for ratios and types that differ.
    """
    count = config["num_hidden_layers"]
    ratios = config["compress_ratios"]
    if ratios is None:
        default = [_LAYERS_OF_RATES[ratio] for ratio in [128, 128, *[128, 4] * count][:count]]
        return hf.read_layer_types(config, default)
    if unknown := [ratio for ratio in ratios if ratio not in _LAYERS_OF_RATES]:
        raise hf.ConfigError(f"compress_ratios has {unknown[0]}, and layers here are of {[*_LAYERS_OF_RATES]}")
    types = [_LAYERS_OF_RATES[ratio] for ratio in ratios[:count]]
    if types != hf.read_layer_types(config, types):
        raise hf.ConfigError("compress_ratios and layer_types are two words for one thing and say different things")
    return types


def _read_mixture_types(config: hf.Config) -> list[str]:
    """Return "hash_moe" or "moe" for each layer: `mlp_layer_types`, or by `num_hash_layers`, 3 by default.

    **Raises** `ConfigError` for other types, and for a number and types that differ.
    """
    count = config["num_hidden_layers"]
    types = config["mlp_layer_types"]
    hashed = config["num_hash_layers"]
    by_count = ["hash_moe" if number < (3 if hashed is None else hashed) else "moe" for number in range(count)]
    if types is None:
        return by_count
    if len(types) != count or not set(types) <= {"hash_moe", "moe"}:
        raise hf.ConfigError(f"mlp_layer_types should say hash_moe or moe for all {count} layers")
    if hashed is not None and by_count != list(types):
        raise hf.ConfigError("num_hash_layers and mlp_layer_types are two words for one thing and say different things")
    return list(types)


CONNECTION_NAMES = {"fn": "projection.weight", "base": "base", "scale": "scale"}


def _map_names(head: str, attention: hf.NameMap, mixture: hf.NameMap, others: hf.NameMap) -> hf.NameMap:
    """Return the name map of a model, from the names of the head and of the parts of a layer."""
    block = {
        **hf.prefixed("", "compressed_attention", attention),
        **hf.prefixed("", "mixture_of_experts", mixture),
        **others,
    }
    shell = {
        "model.embed_tokens": "embedding",
        "model.norm": "norm.norm",
        **hf.prefixed("", "norm", {f"model.hc_head.hc_{name}": ours for name, ours in CONNECTION_NAMES.items()}),
        head: "head",
    }
    return {**shell, **hf.prefixed("model.layers.*", "layers.*", block)}


def _map_deepseek_v4_names(config: hf.Config) -> hf.NameMap:
    compressor = {"wkv": "value", "wgate": "gate", "ape": "places", "norm": "norm"}
    attention = {
        "attn_sink": "sinks",
        "wq_a": "query_down",
        "q_norm": "query_norm",
        "wq_b": "query_up",
        "wkv": "key",
        "norm": "key_norm",
        "wo_a": "out_down",
        "wo_b": "out",
        "indexer.wq_b": "indexer.query_up",
        "indexer.weights_proj": "indexer.head_weights",
        **hf.prefixed("compressor", "compressor", compressor),
        **hf.prefixed("indexer.compressor", "indexer.compressor", compressor),
    }
    mlp = {"w1": "gate", "w3": "up", "w2": "down"}
    mixture = {
        "gate": "router.scores",
        "gate.bias": "router.selection_bias",
        "gate.tid2eid": "router.table",
        **hf.prefixed("shared_experts", "shared", mlp),
        **hf.prefixed("experts.*", "experts.*", mlp),
    }
    others = {"attn_norm": "mixer_norm", "ffn_norm": "ffn_norm"}
    for theirs, ours in (("attn", "mixer"), ("ffn", "ffn")):
        others |= {f"hc_{theirs}_{name}": f"{ours}_connection.{field}" for name, field in CONNECTION_NAMES.items()}
    return _map_names("head", hf.prefixed("attn", "", attention), hf.prefixed("ffn", "", mixture), others)


def _map_deepseek_v4_memory_names(config: hf.Config) -> hf.NameMap:
    compressor = {"kv_proj": "value", "gate_proj": "gate", "position_bias": "places", "kv_norm": "norm"}
    attention = {
        "sinks": "sinks",
        "q_a_proj": "query_down",
        "q_a_norm": "query_norm",
        "q_b_proj": "query_up",
        "kv_proj": "key",
        "kv_norm": "key_norm",
        "o_a_proj": "out_down",
        "o_b_proj": "out",
        "compressor.indexer.q_b_proj": "indexer.query_up",
        "compressor.indexer.scorer.weights_proj": "indexer.head_weights",
        **hf.prefixed("compressor", "compressor", compressor),
        **hf.prefixed("compressor.indexer", "indexer.compressor", compressor),
    }
    mixture = {
        "gate": "router.scores",
        "gate.e_score_correction_bias": "router.selection_bias",
        "gate.tid2eid": "router.table",
        **hf.prefixed("shared_experts", "shared", llama.GATED_MLP_NAMES),
        **hf.prefixed("experts", "experts.*", llama.FUSED_EXPERT_NAMES),
    }
    others = {
        **hf.prefixed("", "", llama.PRE_NORM_NAMES),
        **hf.prefixed("attn_hc", "mixer_connection", CONNECTION_NAMES),
        **hf.prefixed("ffn_hc", "ffn_connection", CONNECTION_NAMES),
    }
    return _map_names("lm_head", hf.prefixed("self_attn", "", attention), hf.prefixed("mlp", "", mixture), others)


def _default_rope(theta: float) -> dict[str, Any]:
    return {"rope_theta": theta, "partial_rotary_factor": 64 / 512}


DEEPSEEK_V4 = hf.Family(
    name="deepseek_v4",
    architecture="DeepseekV4ForCausalLM",
    build=_build_deepseek_v4,
    names=_map_deepseek_v4_names,
    defaults={
        "vocab_size": 129280,
        "hidden_size": 4096,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 43,
        "num_attention_heads": 64,
        "head_dim": 512,
        "q_lora_rank": 1024,
        "num_experts_per_tok": 6,
        "n_routed_experts": 256,
        "routed_scaling_factor": hf.Default(1.5, hf.POSITIVE_NUMBER),
        "scoring_func": hf.Default("sqrtsoftplus", _SCORE),
        "max_position_embeddings": 1048576,
        "rope_parameters": {"main": _default_rope(10000.0), "compress": _default_rope(160000.0)},
        "compress_rope_theta": hf.Default(160000.0, hf.POSITIVE_NUMBER),
        "qk_rope_head_dim": hf.optional_count(),
        "layer_types": hf.optional_words(),
        "compress_ratios": hf.optional_layer_numbers(),
        "compress_rates": hf.Default(None, hf.optional(_BLOCK_SIZES)),
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
        "mlp_layer_types": hf.optional_words(),
        "num_hash_layers": hf.optional_non_negative(),
        "swiglu_limit": hf.Default(10.0, hf.POSITIVE_NUMBER),
        "sliding_window": 128,
        "o_groups": 8,
        "o_lora_rank": 1024,
        "index_n_heads": 64,
        "index_head_dim": 128,
        "index_topk": 512,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
    },
    aliases={"num_local_experts": "n_routed_experts", "intermediate_size": "moe_intermediate_size"},
    required_values={
        "num_key_value_heads": (1,),
        "n_shared_experts": (1,),
        "norm_topk_prob": (True,),
        "topk_method": ("noaux_tc",),
        "hidden_act": ("silu",),
        "attention_bias": (False,),
        "mlp_bias": (False,),
    },
    ignored_keys=frozenset({"num_nextn_predict_layers", "router_jitter_noise"}),
    other_modules=(r"(^|\.)mtp\.",),
    int64_tensors=(r"\.gate\.tid2eid$",),
    memory_names=_map_deepseek_v4_memory_names,
    head="head",
)

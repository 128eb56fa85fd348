"""Llama 4, text (Meta, "Llama 4", 2025): of four layers, three attend within chunks of positions, with interleaved RoPE
and a QK norm without weights; the fourth attends to all tokens, without RoPE, and scales queries by position. Layers
with experts, whose inputs the sigmoid of the router scales, and a shared expert take turns with dense ones."""

from functools import partial

from jaxtyping import Array, Key

from zoo.layers.query_scale import QueryScale
from zoo.models.build import MixerFactory
from zoo.models.decoder import Decoder
from zoo.models.hf.builders import (
    build_config_decoder,
    build_rotary,
    make_attention_factory,
    make_gated_mlp_factory,
    make_head_norm_factory,
    make_rms_norm_factory,
    read_layer_types,
)
from zoo.models.hf.errors import ConfigError
from zoo.models.hf.kinds import optional_count, optional_layer_numbers, optional_words
from zoo.models.hf.spec import Config, Family, NameMap, fused, prefixed

from . import llama
from .llama4_text_layers import ChunkedAttention, InputWeightedMixture, TopSigmoidRouter


def _build_llama4_text(config: Config, *, key: Key[Array, ""]) -> Decoder:
    router = partial(TopSigmoidRouter, config["hidden_size"], config["num_experts"], config["num_experts_per_tok"])
    expert = make_gated_mlp_factory(config)
    sparse = partial(InputWeightedMixture, router, expert, config["num_experts"], shared=expert)
    dense = make_gated_mlp_factory(config, width=config["intermediate_size_mlp"])
    step = config["interleave_moe_layer_step"]
    layers = range(config["num_hidden_layers"])
    if config["moe_layers"] is None:
        sparse_layers = layers[step - 1 :: step]
    else:
        sparse_layers = config["moe_layers"]
    ffns = [sparse if number in sparse_layers else dense for number in layers]
    pairs = list(zip(_make_mixers(config), ffns, strict=True))
    return build_config_decoder(config, pairs, make_rms_norm_factory(config), key=key)


def _make_mixers(config: Config) -> list[MixerFactory]:
    """Return a factory of attention per layer: in chunks as `layer_types` says, with RoPE as `no_rope_layers` says."""
    layers = range(1, config["num_hidden_layers"] + 1)
    interval = config["no_rope_layer_interval"]
    rotates = config["no_rope_layers"] or [int(number % interval != 0) for number in layers]
    if len(rotates) < len(layers):
        raise ConfigError(f"no_rope_layers has {len(rotates)} entries, for {len(layers)} layers")
    types = read_layer_types(config, ["chunked_attention" if rope else "full_attention" for rope in rotates])
    if unknown := sorted({*types} - {"chunked_attention", "full_attention"}):
        raise ConfigError(f"layer_types has {unknown[0]!r}, and layers here are chunked_attention or full_attention")
    scale = QueryScale(config["attn_scale"], config["floor_scale"], offset=1)
    if not config["attn_temperature_tuning"]:
        scale = None
    if config["use_qk_norm"]:
        qk_norm = make_head_norm_factory(config, scaled=False)
    else:
        qk_norm = None
    bias = dict.fromkeys(("bias", "out_bias"), config["attention_bias"])
    with_rope = {"rotary": build_rotary(config, interleaved=True), "qk_norm": qk_norm}
    make = partial(make_attention_factory, config, attention=ChunkedAttention, **bias)
    factories = {
        (chunk, bool(rope)): make(
            chunk=config["attention_chunk_size"] if chunk == "chunked_attention" else None,
            **(with_rope if rope else {"rotary": None, "query_scale": scale}),
        )
        for chunk, rope in zip(types, rotates, strict=False)
    }
    return [factories[chunk, bool(rope)] for chunk, rope in zip(types, rotates, strict=False)]


def _map_llama4_text_names(config: Config) -> NameMap:
    experts = {
        "gate_up_proj": fused("gate.weight", "up.weight", transposed=True),
        "down_proj": fused("down.weight", transposed=True),
    }
    mixture = {
        "router": "router.scores",
        **prefixed("experts", "experts.*", experts),
        **prefixed("shared_expert", "shared", llama.GATED_MLP_NAMES),
    }
    feed_forward = {
        **prefixed("feed_forward", "gated_mlp", llama.GATED_MLP_NAMES),
        **prefixed("feed_forward", "input_weighted_mixture", mixture),
    }
    return llama.map_llama_layers(
        feed_forward, prefixed("self_attn", "chunked_attention.attention", llama.ATTENTION_NAMES)
    )


LLAMA4_TEXT = Family(
    name="llama4_text",
    architecture="Llama4ForCausalLM",
    build=_build_llama4_text,
    names=_map_llama4_text_names,
    defaults={
        **{key: value for key, value in llama.DEFAULTS.items() if key != "mlp_bias"},
        "vocab_size": 202048,
        "hidden_size": 5120,
        "intermediate_size": 8192,
        "intermediate_size_mlp": 16384,
        "num_hidden_layers": 48,
        "num_attention_heads": 40,
        "num_key_value_heads": optional_count(8),
        "head_dim": optional_count(128),
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_theta": 500000.0},
        "num_experts": 16,
        "num_experts_per_tok": 1,
        "moe_layers": optional_layer_numbers(),
        "interleave_moe_layer_step": 1,
        "use_qk_norm": True,
        "no_rope_layers": optional_layer_numbers(),
        "no_rope_layer_interval": 4,
        "attention_chunk_size": 8192,
        "layer_types": optional_words(),
        "attn_temperature_tuning": True,
        "floor_scale": 8192,
        "attn_scale": 0.1,
    },
    aliases={"num_local_experts": "num_experts"},
    ignored_keys=frozenset({"for_llm_compressor", "router_jitter_noise"}),
    ignored_tensors=llama.LLAMA.ignored_tensors,
)

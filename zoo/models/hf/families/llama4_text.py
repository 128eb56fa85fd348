"""Llama 4, text (Meta, "Llama 4", 2025): of four layers, three attend within chunks of positions, with interleaved RoPE
and a QK norm without weights; the fourth attends to all tokens, without RoPE, and scales queries by position. Layers
with experts, whose inputs the sigmoid of the router scales, and a shared expert take turns with dense ones."""

from functools import partial

from jaxtyping import Array, Key

from zoo.layers.query_scale import QueryScale
from zoo.models.hf import grammar as hf

from . import llama
from .llama4_text_layers import ChunkedAttention, InputWeightedMixture, TopSigmoidRouter


def _build_llama4_text(config: hf.Config, *, key: Key[Array, ""]) -> hf.Decoder:
    router = partial(TopSigmoidRouter, config["hidden_size"], config["num_experts"], config["num_experts_per_tok"])
    expert = hf.make_gated_mlp_factory(config)
    sparse = partial(InputWeightedMixture, router, expert, config["num_experts"], shared=expert)
    dense = hf.make_gated_mlp_factory(config, width=config["intermediate_size_mlp"])
    step = config["interleave_moe_layer_step"]
    layers = range(config["num_hidden_layers"])
    if config["moe_layers"] is None:
        sparse_layers = layers[step - 1 :: step]
    else:
        sparse_layers = config["moe_layers"]
    ffns = [sparse if number in sparse_layers else dense for number in layers]
    pairs = list(zip(_make_mixers(config), ffns, strict=True))
    return hf.build_config_decoder(config, pairs, hf.make_rms_norm_factory(config), key=key)


def _make_mixers(config: hf.Config) -> list[hf.MixerFactory]:
    """Return a factory of attention per layer: in chunks as `layer_types` says, with RoPE as `no_rope_layers` says."""
    layers = range(1, config["num_hidden_layers"] + 1)
    interval = config["no_rope_layer_interval"]
    rotates = config["no_rope_layers"] or [int(number % interval != 0) for number in layers]
    if len(rotates) < len(layers):
        raise hf.ConfigError(f"no_rope_layers has {len(rotates)} entries, for {len(layers)} layers")
    types = hf.read_layer_types(config, ["chunked_attention" if rope else "full_attention" for rope in rotates])
    if unknown := sorted({*types} - {"chunked_attention", "full_attention"}):
        raise hf.ConfigError(f"layer_types has {unknown[0]!r}, and layers here are chunked_attention or full_attention")
    scale = QueryScale(config["attn_scale"], config["floor_scale"], offset=1)
    if not config["attn_temperature_tuning"]:
        scale = None
    if config["use_qk_norm"]:
        qk_norm = hf.make_head_norm_factory(config, scaled=False)
    else:
        qk_norm = None
    bias = dict.fromkeys(("bias", "out_bias"), config["attention_bias"])
    with_rope = {"rotary": hf.build_rotary(config, interleaved=True), "qk_norm": qk_norm}
    make = partial(hf.make_attention_factory, config, attention=ChunkedAttention, **bias)
    factories = {
        (chunk, bool(rope)): make(
            chunk=config["attention_chunk_size"] if chunk == "chunked_attention" else None,
            **(with_rope if rope else {"rotary": None, "query_scale": scale}),
        )
        for chunk, rope in zip(types, rotates, strict=False)
    }
    return [factories[chunk, bool(rope)] for chunk, rope in zip(types, rotates, strict=False)]


def _map_llama4_text_names(config: hf.Config) -> hf.NameMap:
    experts = {
        "gate_up_proj": hf.fused("gate.weight", "up.weight", transposed=True),
        "down_proj": hf.fused("down.weight", transposed=True),
    }
    mixture = {
        "router": "router.scores",
        **hf.prefixed("experts", "experts.*", experts),
        **hf.prefixed("shared_expert", "shared", llama.GATED_MLP_NAMES),
    }
    feed_forward = {
        **hf.prefixed("feed_forward", "gated_mlp", llama.GATED_MLP_NAMES),
        **hf.prefixed("feed_forward", "input_weighted_mixture", mixture),
    }
    return llama.map_llama_layers(
        feed_forward, hf.prefixed("self_attn", "chunked_attention.attention", llama.ATTENTION_NAMES)
    )


LLAMA4_TEXT = hf.Family(
    name="llama4_text",
    architecture="Llama4ForCausalLM",
    build=_build_llama4_text,
    names=_map_llama4_text_names,
    defaults={
        **hf.omit(llama.DEFAULTS, "mlp_bias"),
        "vocab_size": 202048,
        "hidden_size": 5120,
        "intermediate_size": 8192,
        "intermediate_size_mlp": 16384,
        "num_hidden_layers": 48,
        "num_attention_heads": 40,
        "num_key_value_heads": hf.optional_count(8),
        "head_dim": hf.optional_count(128),
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_theta": 500000.0},
        "num_experts": 16,
        "num_experts_per_tok": 1,
        "moe_layers": hf.optional_layer_numbers(),
        "interleave_moe_layer_step": 1,
        "use_qk_norm": True,
        "no_rope_layers": hf.optional_layer_numbers(),
        "no_rope_layer_interval": 4,
        "attention_chunk_size": 8192,
        "layer_types": hf.optional_words(),
        "attn_temperature_tuning": True,
        "floor_scale": 8192,
        "attn_scale": 0.1,
    },
    aliases={"num_local_experts": "num_experts"},
    ignored_keys=frozenset({"for_llm_compressor", "router_jitter_noise"}),
    ignored_tensors=llama.LLAMA.ignored_tensors,
)

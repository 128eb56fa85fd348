"""Kolibri 1 (Aleph Alpha, "Kolibri 1", 2026): attention with QK norm, of five layers four with a sliding window and
RoPE and the fifth with neither; norms before and after each sublayer; a mixture of many small experts in every layer,
chosen by logits and a selection bias."""

from functools import partial

from jaxtyping import Array, Key

from zoo.models.hf import grammar as hf

from . import llama
from .kolibri1_layers import LogitBiasedRouter


def _build_kolibri1(config: hf.Config, *, key: Key[Array, ""]) -> hf.Decoder:
    types = hf.read_layer_types(config, hf.list_patterned_types(hf.Config(config, sliding_window_pattern=5)))
    window = config["sliding_window"]
    windows = hf.list_layer_windows(types, window)
    rotary = hf.build_rotary(config)
    rotaries = [rotary if window is None or own is not None else None for own in windows]
    norms = {"qk_norm": hf.make_head_norm_factory(config)}
    mixers = hf.make_layerwise_attention_factories(config, windows, rotaries, **norms)
    router = partial(LogitBiasedRouter, renormalize=config["norm_topk_prob"])
    widths = {"width": config["moe_intermediate_size"], "shared": config["shared_expert_intermediate_size"]}
    experts = hf.make_mixture_factory(config, router, config["num_local_experts"], **widths)
    norm = hf.make_rms_norm_factory(config)
    layers = [(mixer, experts) for mixer in mixers]
    return hf.build_config_decoder(config, layers, norm, block=hf.make_sandwich_block(norm), key=key)


def _map_kolibri1_names(config: hf.Config) -> hf.NameMap:
    """Return the name map of files."""
    norms = {"post_attn_norm": "mixer_post_norm", "post_ffn_norm": "ffn_post_norm"}
    bias = {"moe.router.expert_bias": "mixture_of_experts.router.selection_bias"}
    return _map_layers(norms, bias, hf.prefixed("experts.*", "experts.*", llama.GATED_MLP_NAMES))


def _map_kolibri1_memory_names(config: hf.Config) -> hf.NameMap:
    norms = {"post_self_attn_layernorm": "mixer_post_norm", "post_mlp_layernorm": "ffn_post_norm"}
    bias = {"mlp.gate.e_score_correction_bias": "mixture_of_experts.router.selection_bias"}
    return _map_layers(norms, bias, hf.prefixed("experts", "experts.*", llama.FUSED_EXPERT_NAMES))


def _map_layers(post_norms: hf.NameMap, bias: hf.NameMap, experts: hf.NameMap) -> hf.NameMap:
    mixture = {"gate": "router.scores", **hf.prefixed("shared_experts", "shared", llama.GATED_MLP_NAMES), **experts}
    feed_forward = {**hf.prefixed("mlp", "mixture_of_experts", mixture), **bias}
    return llama.map_llama_layers(feed_forward, norms={**llama.PRE_NORM_NAMES, **post_norms})


KOLIBRI1 = hf.Family(
    name="kolibri1",
    architecture="Kolibri1ForCausalLM",
    build=_build_kolibri1,
    names=_map_kolibri1_names,
    defaults={
        **hf.omit(llama.DEFAULTS, "mlp_bias", "attention_bias", "intermediate_size"),
        "vocab_size": 128000,
        "hidden_size": 2560,
        "num_hidden_layers": 50,
        "num_attention_heads": 48,
        "num_key_value_heads": hf.optional_count(4),
        "head_dim": hf.optional_count(128),
        "max_position_embeddings": 262144,
        "sliding_window": hf.optional_non_negative(513),
        "layer_types": hf.optional_words(),
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_local_experts": 384,
        "num_experts_per_tok": 6,
        "norm_topk_prob": False,
    },
    aliases={"num_experts": "num_local_experts"},
    ignored_tensors=llama.LLAMA.ignored_tensors,
    memory_names=_map_kolibri1_memory_names,
)

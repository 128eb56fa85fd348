"""MiniMax-M2 (MiniMax, "MiniMax-M2", 2025): QK norm over all heads, RoPE on half of each head, and a mixture of experts
routed by sigmoid scores and a selection bias."""

from functools import partial

from jaxtyping import Array, Key

from zoo.layers import BiasedRouter, RMSNorm
from zoo.models.hf import grammar as hf

from . import llama, mixtral


def _build_minimax_m2(config: hf.Config, *, key: Key[Array, ""]) -> hf.Decoder:
    if config["rotary_dim"] is not None:
        factor = config["rotary_dim"] / hf.read_head_sizes(config)[2]
        config = hf.Config(config, rope_parameters={**config["rope_parameters"], "partial_rotary_factor": factor})
    experts = hf.make_mixture_factory(config, partial(BiasedRouter, smallest=0.0), config["num_experts"])
    norm = partial(RMSNorm, epsilon=config["rms_norm_eps"])
    return hf.build_moe_decoder(config, [True] * config["num_hidden_layers"], experts, norm_over_heads=norm, key=key)


def _map_minimax_m2_names(config: hf.Config) -> hf.NameMap:
    experts = hf.prefixed("experts.*", "experts.*", mixtral.EXPERT_NAMES)
    mixture = {"gate": "router.scores", "e_score_correction_bias": "router.selection_bias", **experts}
    return llama.map_llama_layers(hf.prefixed("block_sparse_moe", "mixture_of_experts", mixture))


def _map_minimax_m2_memory_names(config: hf.Config) -> hf.NameMap:
    experts = hf.prefixed("experts", "experts.*", llama.FUSED_EXPERT_NAMES)
    mixture = {"gate": "router.scores", "e_score_correction_bias": "router.selection_bias", **experts}
    return llama.map_llama_layers(hf.prefixed("mlp", "mixture_of_experts", mixture))


MINIMAX_M2 = hf.Family(
    name="minimax_m2",
    architecture="MiniMaxM2ForCausalLM",
    build=_build_minimax_m2,
    names=_map_minimax_m2_names,
    defaults={
        **hf.omit(llama.DEFAULTS, "attention_bias", "mlp_bias"),
        "vocab_size": 200064,
        "hidden_size": 3072,
        "intermediate_size": 1536,
        "num_hidden_layers": 62,
        "num_attention_heads": 48,
        "num_key_value_heads": hf.optional_count(8),
        "head_dim": hf.optional_count(128),
        "max_position_embeddings": 196608,
        "rope_parameters": {"rope_theta": 5000000.0, "partial_rotary_factor": 1.0},
        "rotary_dim": hf.optional_count(),
        "num_experts": 256,
        "num_experts_per_tok": 8,
    },
    aliases={"num_local_experts": "num_experts"},
    required_values={"scoring_func": ("sigmoid",), "use_qk_norm": (True,), "qk_norm_type": ("per_layer",)},
    ignored_keys=frozenset(
        {"num_mtp_modules", "mtp_transformer_layers", "use_mtp", "use_routing_bias", "router_jitter_noise"}
    ),
    ignored_tensors=llama.LLAMA.ignored_tensors,
    memory_names=_map_minimax_m2_memory_names,
)

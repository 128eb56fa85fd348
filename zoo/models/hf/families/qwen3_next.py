"""Qwen3-Next (Qwen team, 2025): of four layers three with the gated delta rule (arXiv:2412.06464) and the fourth with
gated attention (arXiv:2505.06708), each before a mixture of experts with a gated shared expert; RMSNorm scales 1 + w.
A module of multi-token prediction has gated attention before such a mixture."""

from typing import Any

from jaxtyping import Array, Key

from zoo.models.hf import grammar as hf

from . import llama, qwen2_moe, qwen3_5_text


def _build_qwen3_next(config: hf.Config, *, key: Key[Array, ""]) -> hf.Decoder:
    mixers = qwen3_5_text.list_qwen3_5_mixers(config)
    dense = hf.make_gated_mlp_factory(config)
    ffns = [dense] * len(mixers)
    if config["num_experts"]:
        experts = qwen2_moe.make_qwen2_moe_mixture(config, renormalize=config["norm_topk_prob"])
        ffns = [experts if is_sparse else dense for is_sparse in qwen2_moe.mark_qwen2_moe_layers(config)]
    layers = list(zip(mixers, ffns, strict=True))
    return hf.build_config_decoder(config, layers, hf.make_rms_norm_factory(config, offset=1.0), key=key)


def _map_qwen3_next_layers(config: hf.Config, mixture: hf.NameMap) -> hf.NameMap:
    groups = config["linear_num_key_heads"]
    delta_inputs = {
        "in_proj_qkvz": hf.fused("query", "key", "value", "readout.gate", groups=groups),
        "in_proj_ba": hf.fused("rate", "decay.step", groups=groups),
    }
    feed_forward = qwen2_moe.name_qwen2_moe_feed_forward(mixture)
    return qwen3_5_text.map_qwen3_5_layers(config, feed_forward, delta_inputs)


def _map_qwen3_next_names(config: hf.Config) -> hf.NameMap:
    return _map_qwen3_next_layers(config, qwen2_moe.MIXTURE_NAMES)


def _map_qwen3_next_memory_names(config: hf.Config) -> hf.NameMap:
    return _map_qwen3_next_layers(config, qwen2_moe.FUSED_MIXTURE_NAMES)


def _take_sparse_layer(config: hf.Config) -> dict[str, Any]:
    types = {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
    return {**types, "decoder_sparse_step": 1, "mlp_only_layers": None}


QWEN3_NEXT = hf.Family(
    name="qwen3_next",
    architecture="Qwen3NextForCausalLM",
    build=_build_qwen3_next,
    names=_map_qwen3_next_names,
    defaults={
        **qwen3_5_text.DEFAULTS,
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 48,
        "num_key_value_heads": hf.optional_count(2),
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts": hf.non_negative(512),
        "num_experts_per_tok": 10,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": hf.optional_layer_numbers(),
    },
    required_values={"attention_bias": (False,)},
    ignored_tensors=llama.LLAMA.ignored_tensors,
    other_modules=(r"^mtp\.",),
    memory_names=_map_qwen3_next_memory_names,
    predictors=hf.PredictorFacts(qwen3_5_text.name_qwen3_5_predictor, _take_sparse_layer, count_key=None),
)

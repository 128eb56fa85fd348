"""Qwen3.5's mixture of experts (Qwen team, 2026), its language model: Qwen3.5's layers, with a mixture of experts and
a gated shared expert in place of the MLP. Modules of multi-token prediction are not read."""

from jaxtyping import Array, Key

from zoo.models.hf import grammar as hf

from . import qwen2_moe, qwen3_5_text


def _build_qwen3_5_moe(config: hf.Config, *, key: Key[Array, ""]) -> hf.Decoder:
    experts = qwen2_moe.make_qwen2_moe_mixture(config, renormalize=True)
    layers = [(mixer, experts) for mixer in qwen3_5_text.list_qwen3_5_mixers(config)]
    return hf.build_config_decoder(config, layers, hf.make_rms_norm_factory(config, offset=1.0), key=key)


def _map_qwen3_5_moe_names(config: hf.Config) -> hf.NameMap:
    mixture = hf.prefixed("mlp", "mixture_of_experts", qwen2_moe.MIXTURE_NAMES)
    return qwen3_5_text.map_qwen3_5_layers(config, mixture)


def _map_qwen3_5_moe_memory_names(config: hf.Config) -> hf.NameMap:
    mixture = hf.prefixed("mlp", "mixture_of_experts", qwen2_moe.FUSED_MIXTURE_NAMES)
    return qwen3_5_text.map_qwen3_5_layers(config, mixture)


DEFAULTS = {
    **hf.omit(qwen3_5_text.DEFAULTS, "intermediate_size"),
    "hidden_size": 2048,
    "num_hidden_layers": 40,
    "num_key_value_heads": hf.optional_count(2),
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts": 256,
    "num_experts_per_tok": 8,
}

QWEN3_5_MOE_TEXT = hf.Family(
    name="qwen3_5_moe_text",
    architecture="Qwen3_5MoeForCausalLM",
    build=_build_qwen3_5_moe,
    names=_map_qwen3_5_moe_names,
    defaults=DEFAULTS,
    required_values={**qwen3_5_text.QWEN3_5_TEXT.required_values, "norm_topk_prob": (True, None)},
    ignored_keys=qwen3_5_text.QWEN3_5_TEXT.ignored_keys | {"intermediate_size"},
    ignored_tensors=qwen3_5_text.QWEN3_5_TEXT.ignored_tensors,
    other_modules=qwen3_5_text.QWEN3_5_TEXT.other_modules,
    memory_names=_map_qwen3_5_moe_memory_names,
)

"""GLM-4.5 (Zeng et al., arXiv:2508.06471): RoPE on half of each head, QKV biases, and DeepSeek-V3's mixture of experts
and modules of multi-token prediction (MTP), which files have after the last layer."""

from typing import Any

from jaxtyping import Array, Key

from zoo.models.hf import grammar as hf

from . import dots1, llama
from .deepseek_v3 import PREDICTORS, find_mtp_tensors


def build_glm4_moe(config: hf.Config, *, key: Key[Array, ""]) -> hf.Decoder:
    """Build the model of a GLM-4.5 config."""
    width = config["moe_intermediate_size"]
    norm = hf.make_head_norm_factory(config) if config["use_qk_norm"] else None
    shared = config["n_shared_experts"] * width
    router = hf.make_biased_router_factory(config)
    experts = hf.make_mixture_factory(config, router, config["n_routed_experts"], width=width, shared=shared)
    return hf.build_moe_decoder(
        config, dots1.mark_dots1_moe_layers(config), experts, qk_norm=norm, bias=config["attention_bias"], key=key
    )


def _describe_glm4_moe(model: Any) -> dict[str, Any]:
    """Return the config with an explicit `partial_rotary_factor`, since this family's default is 0.5."""
    config = hf.describe_mixture(model)
    return {**config, "rope_parameters": {"partial_rotary_factor": 1.0, **config["rope_parameters"]}}


GLM4_MOE = hf.Family(
    name="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    build=build_glm4_moe,
    names=dots1.map_dots1_names,
    defaults={
        **dots1.DEFAULTS,
        "vocab_size": 151552,
        "num_hidden_layers": 46,
        "num_attention_heads": 96,
        "num_key_value_heads": hf.optional_count(8),
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "first_k_dense_replace": hf.non_negative(1),
        "use_qk_norm": False,
    },
    aliases={"num_local_experts": "n_routed_experts"},
    ignored_keys=frozenset({"num_nextn_predict_layers", "num_mtp_layers"}),
    ignored_tensors=llama.LLAMA.ignored_tensors,
    find_ignored_tensors=find_mtp_tensors,
    memory_names=dots1.map_dots1_memory_names,
    describe=_describe_glm4_moe,
    predictors=PREDICTORS,
)

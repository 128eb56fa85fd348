"""GLM-4.5 (Zeng et al., arXiv:2508.06471): a rotation of half of each head, biases on queries, keys and values, and
DeepSeek-V3's mixture of experts. Layers that predict further tokens, which files have behind the others, are not
read."""

from typing import Any

from jaxtyping import Array, Key

from zoo.models.decoder import Decoder
from zoo.models.facts import Config, Family
from zoo.models.pieces import biased_router, head_norm, mixture, sparse_decoder

from . import dots1, llama
from .deepseek_v3 import predictors
from .describe import described_mixture


def build(config: Config, *, key: Key[Array, ""]) -> Decoder:
    width, norm = config["moe_intermediate_size"], head_norm(config) if config["use_qk_norm"] else None
    shared, router = config["n_shared_experts"] * width, biased_router(config)
    experts = mixture(config, router, config["n_routed_experts"], width=width, shared=shared)
    return sparse_decoder(config, dots1.sparse(config), experts, qk_norm=norm, bias=config["attention_bias"], key=key)


def describe(model: Any) -> dict[str, Any]:
    """Of a rotation that leaves nothing out, too, which other families need not say."""
    found = described_mixture(model)
    return {**found, "rope_parameters": {"partial_rotary_factor": 1.0, **found["rope_parameters"]}}


GLM4_MOE = Family(
    name="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    build=build,
    names=dots1.names,
    defaults={
        **dots1.DEFAULTS,
        "vocab_size": 151552,
        "num_hidden_layers": 46,
        "num_attention_heads": 96,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "first_k_dense_replace": 1,
        "use_qk_norm": False,
    },
    aliases={"num_local_experts": "n_routed_experts"},
    inert=frozenset({"num_nextn_predict_layers", "num_mtp_layers"}),
    ignored=llama.LLAMA.ignored,
    unread=predictors,
    live_names=dots1.live_names,
    describe=describe,
)

"""Hy4 (Tencent Hunyuan, 2026): GLM-5's sparse latent attention with sinks and a gate, and mixtures of experts with a
clamped SwiGLU, on residual streams that do not mix. Modules of multi-token prediction (MTP) are not read."""

from collections.abc import Mapping
from functools import partial

import jax
from jaxtyping import Array, Key

from zoo.layers import SparseLatentAttention
from zoo.models.hf import grammar as hf
from zoo.models.hyper_connections import IndependentHyperConnection

from . import deepseek_v2, deepseek_v4, deepseek_v32, glm_moe_dsa, llama
from .hy_v4_layers import StreamSelectionBlock

_DERIVED = {"head_dim": None, "num_key_value_heads": None, "first_k_dense_replace": 1}
_DEFAULT_TYPES = {"index_topk_pattern": None, "index_topk_freq": 4, "index_skip_topk_offset": 2}
"""In the words of GLM-5's config: layers 0 and 1 have an indexer, and every fourth after it."""


def _build_hy_v4(config: hf.Config, *, key: Key[Array, ""]) -> hf.Decoder:
    config = hf.Config(config, **_DERIVED, **_DEFAULT_TYPES)
    embed = config["hidden_size"]
    streams = config["hc_mult"]
    indexer = deepseek_v32.make_indexer_factory(config, interleaved=False)
    indexer = partial(indexer, rotates_last=True, epsilon=config["rms_norm_eps"])
    attention = hf.make_latent_attention_factory(config, gate="channels", sinks=True)
    indexers = {"full": indexer, "shared": None}
    factories = {kind: partial(SparseLatentAttention, attention, indexer) for kind, indexer in indexers.items()}
    mixers = hf.pick_mixers(glm_moe_dsa.read_indexer_types(config), factories)
    epsilons = {"epsilon": config["hc_eps"], "norm_epsilon": config["rms_norm_eps"]}
    connection = partial(IndependentHyperConnection, embed, streams, magnitude=config["hc_magnitude"], **epsilons)
    norm = hf.make_rms_norm_factory(config)
    wiring = hf.make_hyper_connections(embed, streams, norm, **epsilons, key=jax.random.fold_in(key, 1))
    wiring["block"] = StreamSelectionBlock
    wiring["parts"] = {"mixer_connection": connection, "ffn_connection": connection}
    expert = deepseek_v4.make_clamped_mlp_factory(config)
    router = hf.make_biased_router_factory(config)
    return deepseek_v2.build_latent_decoder(config, router, mixers=mixers, expert=expert, key=key, **wiring)


_FILES = {
    "gate": "linear_gate",
    "sinks": "learnable_sink_param",
    "mixer_connection": "hc_pre.hc_attn_layer.hc_",
    "ffn_connection": "hc_pre.hc_mlp_layer.hc_",
    "norm": "hc_pre.hc_head.hc_head_",
}
"""Our names -> the beginnings of theirs in files, where modules in memory have others."""
_MEMORY = {
    "gate": "gate_proj",
    "sinks": "sinks",
    "mixer_connection": "attn_hc.",
    "ffn_connection": "ffn_hc.",
    "norm": "hc_head.hc_",
}


def _map_hy_v4_names(config: hf.Config, theirs: Mapping[str, str]) -> hf.NameMap:
    latent = {**deepseek_v2.map_latent_names(config), theirs["gate"]: "gate", theirs["sinks"]: "sinks"}
    block = dict(llama.PRE_NORM_NAMES)
    shell = {"model.norm": "norm.norm"}
    for name, field in deepseek_v4.CONNECTION_NAMES.items():
        shell[f"model.{theirs['norm']}{name}"] = f"norm.{field}"
        for ours in ("mixer_connection", "ffn_connection"):
            block[f"{theirs[ours]}{name}"] = f"{ours}.{field}"
    attention = deepseek_v32.map_sparse_attention(latent)
    return {**deepseek_v2.map_latent_layers(deepseek_v2.MEMORY_EXPERT_NAMES, attention, block), **shell}


_GLM = glm_moe_dsa.GLM_MOE_DSA

HY_V4 = hf.Family(
    name="hy_v4",
    architecture="HYV4ForCausalLM",
    build=_build_hy_v4,
    names=partial(_map_hy_v4_names, theirs=_FILES),
    defaults={
        **hf.omit(_GLM.declared, *_DERIVED, *_DEFAULT_TYPES),
        "vocab_size": 120832,
        "hidden_size": 2816,
        "intermediate_size": 6912,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 34,
        "num_attention_heads": 32,
        "max_position_embeddings": 262144,
        "q_lora_rank": 1536,
        "routed_scaling_factor": hf.Default(2.827, hf.POSITIVE_NUMBER),
        "index_n_heads": 16,
        "hc_mult": 4,
        "hc_magnitude": 2.0,
        "hc_eps": 1e-6,
        "swiglu_limit": hf.Default(10.0, hf.POSITIVE_NUMBER),
    },
    aliases={"num_local_experts": "n_routed_experts"},
    ignored_keys=frozenset({"head_dim", "num_key_value_heads", "layer_types", "qk_head_dim", "learnable_sink_init"}),
    ignored_tensors=llama.LLAMA.ignored_tensors,
    older_endings={  # transformers writes the gates of MLPs under the name of attention's gate
        "mlp.linear_gate.weight": "mlp.gate_proj.weight",
        "shared_experts.linear_gate.weight": "shared_experts.gate_proj.weight",
    },
    other_modules=(r"(^|\.)mtp_layers\.",),
    memory_names=partial(_map_hy_v4_names, theirs=_MEMORY),
)

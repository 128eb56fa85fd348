"""DeepSeek-V3.2 (arXiv:2512.02556): DeepSeek-V3 with latent attention to the keys that an indexer selects. Modules of
multi-token prediction (MTP), which files have after the last layer, are not read."""

from collections.abc import Callable
from functools import partial

from jaxtyping import Array, Key

from zoo.layers import LightningIndexer, SparseLatentAttention
from zoo.models.hf import grammar as hf

from . import deepseek_v2, deepseek_v3


def _build_deepseek_v32(config: hf.Config, *, key: Key[Array, ""]) -> hf.Decoder:
    mixer = make_sparse_attention_factory(config, make_indexer_factory(config, interleaved=False))
    mixers = [mixer] * config["num_hidden_layers"]
    return deepseek_v2.build_latent_decoder(config, hf.make_biased_router_factory(config), mixers=mixers, key=key)


def make_sparse_attention_factory(
    config: hf.Config, indexer: Callable[..., LightningIndexer] | None
) -> Callable[..., SparseLatentAttention]:
    """Return a factory of latent attention to the keys that an indexer selects; without one, another layer's selection.

    **Raises** `ConfigError` for queries without a latent, which the indexer reads.
    """
    if config["q_lora_rank"] is None:
        raise hf.ConfigError("q_lora_rank = None, and the indexer reads the latent of queries")
    return partial(SparseLatentAttention, hf.make_latent_attention_factory(config, interleaved=True), indexer)


def make_indexer_factory(config: hf.Config, *, interleaved: bool) -> Callable[..., LightningIndexer]:
    """Return a factory of indexers. **Raises** `ConfigError` for an indexer with heads smaller than their RoPE."""
    head_dim = config["index_head_dim"]
    rope_dim = config["qk_rope_head_dim"]
    if head_dim < rope_dim:
        raise hf.ConfigError(f"index_head_dim = {head_dim}, and qk_rope_head_dim = {rope_dim} of them are to be turned")
    sizes = {"query_latent": config["q_lora_rank"], "head_dim": head_dim, "top": config["index_topk"]}
    return partial(LightningIndexer, config["hidden_size"], config["index_n_heads"], **sizes, interleaved=interleaved)


_INDEXER_NAMES: hf.NameMap = {"wq_b": "query_up", "wk": "key", "k_norm": "key_norm", "weights_proj": "head_weights"}


def map_sparse_attention(latent: hf.NameMap) -> hf.NameMap:
    """Return the name map of a layer's attention, from the names of its latent attention."""
    attention = {**hf.prefixed("", "attention", latent), **hf.prefixed("indexer", "indexer", _INDEXER_NAMES)}
    return hf.prefixed("self_attn", "sparse_latent_attention", attention)


def map_sparse_names(config: hf.Config, experts: hf.NameMap = deepseek_v2.FILE_EXPERT_NAMES) -> hf.NameMap:
    """Return the name map of files, or with other names of experts."""
    return deepseek_v2.map_latent_layers(experts, map_sparse_attention(deepseek_v2.map_latent_names(config)))


def map_sparse_memory_names(config: hf.Config) -> hf.NameMap:
    """Return the name map in memory, with all experts of a layer in one tensor."""
    return map_sparse_names(config, deepseek_v2.MEMORY_EXPERT_NAMES)


_V3 = deepseek_v3.DEEPSEEK_V3

DEEPSEEK_V32 = hf.Family(
    name="deepseek_v32",
    architecture="DeepseekV32ForCausalLM",
    build=_build_deepseek_v32,
    names=map_sparse_names,
    defaults={
        **hf.omit(_V3.declared, "rope_interleave"),
        "max_position_embeddings": 163840,
        "mlp_layer_types": hf.optional_words(),
        "index_topk": 2048,
        "index_head_dim": 128,
        "index_n_heads": 64,
    },
    aliases={**_V3.aliases, "num_experts": "n_routed_experts"},
    required_values={**_V3.required_values, "rope_interleave": (True,)},
    ignored_keys=_V3.ignored_keys | {"layer_types", "mlp_bias"},  # all layers are alike; the class has no such bias
    ignored_tensors=_V3.ignored_tensors,
    find_ignored_tensors=deepseek_v3.find_mtp_tensors,
    memory_names=map_sparse_memory_names,
)

"""A.X K1 (SK Telecom, 2026): DeepSeek-V3's layers with a norm after the mixture of experts. Published files have that
norm in dense layers too, which do not use it, and no selection bias in their routers."""

import re
from collections.abc import Collection
from typing import Any

from jaxtyping import Array, Key

from zoo.layers import IdentityNorm
from zoo.models.hf import grammar as hf

from . import deepseek_v2, dots1, llama
from .deepseek_v3 import DEEPSEEK_V3, build_deepseek_v3, find_mtp_tensors

_POST_NORM = re.compile(r"\blayers\.(\d+)\.(?:mlp\.)?post_mlp_layernorm\.weight$")


def _build_axk1(config: hf.Config, *, key: Key[Array, ""]) -> hf.Decoder:
    norm = hf.make_rms_norm_factory(config)

    def make_sparse_block(**parts: Any) -> hf.SandwichBlock:
        return hf.SandwichBlock(mixer_post_norm=IdentityNorm(), ffn_post_norm=norm(), **parts)

    blocks = [make_sparse_block if is_sparse else hf.Block for is_sparse in dots1.mark_dots1_moe_layers(config)]
    return build_deepseek_v3(config, block=blocks, key=key)


def _map_axk1_layers(config: hf.Config, experts: hf.NameMap, post_norm: str) -> hf.NameMap:
    attention = hf.prefixed("self_attn", "latent_attention", deepseek_v2.map_latent_names(config))
    norms = {**llama.PRE_NORM_NAMES, post_norm: "ffn_post_norm"}
    return deepseek_v2.map_latent_layers(experts, attention, norms)


def _map_axk1_names(config: hf.Config) -> hf.NameMap:
    return _map_axk1_layers(config, deepseek_v2.FILE_EXPERT_NAMES, "post_mlp_layernorm")


def _map_axk1_memory_names(config: hf.Config) -> hf.NameMap:
    return _map_axk1_layers(config, deepseek_v2.MEMORY_EXPERT_NAMES, "mlp.post_mlp_layernorm")


def _find_unused_tensors(config: hf.Config, tensors: Collection[str]) -> set[str]:
    """Return the norms of dense layers, which these do not use, and the tensors of multi-token prediction."""
    is_sparse = dots1.mark_dots1_moe_layers(config)
    layers = {name: int(match[1]) for name in tensors if (match := _POST_NORM.search(name))}
    unused = {name for name, layer in layers.items() if layer < len(is_sparse) and not is_sparse[layer]}
    return unused | find_mtp_tensors(config, tensors)


AXK1 = hf.Family(
    name="axk1",
    architecture="AXK1ForCausalLM",
    build=_build_axk1,
    names=_map_axk1_names,
    defaults={
        **DEEPSEEK_V3.declared,
        "vocab_size": 163840,
        "num_attention_heads": 64,
        "num_key_value_heads": hf.optional_count(64),
        "q_lora_rank": 1536,
        "max_position_embeddings": 32768,
        "n_routed_experts": 192,
        "first_k_dense_replace": hf.non_negative(1),
        "mlp_layer_types": hf.optional_words(),
    },
    aliases=DEEPSEEK_V3.aliases,
    required_values={"moe_layer_freq": (1,), "scoring_func": ("sigmoid",)},
    ignored_keys=DEEPSEEK_V3.ignored_keys | {"topk_method"},  # the class has one, whatever it says
    ignored_tensors=llama.LLAMA.ignored_tensors,
    optional_tensors=(r"\.gate\.e_score_correction_bias$",),
    find_ignored_tensors=_find_unused_tensors,
    memory_names=_map_axk1_memory_names,
)

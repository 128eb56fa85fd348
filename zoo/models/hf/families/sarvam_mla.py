"""Sarvam's mixture of experts with latent attention (Sarvam AI, "Sarvam-105B", 2026): DeepSeek-V3's layer, with other
defaults and older words for them."""

import dataclasses

from jaxtyping import Array, Key

from zoo.models.hf import grammar as hf

from . import deepseek_v3


def _build_sarvam_mla(config: hf.Config, *, key: Key[Array, ""]) -> hf.Decoder:
    return deepseek_v3.build_deepseek_v3(hf.Config(config, head_dim=None), key=key)


_DEEPSEEK = deepseek_v3.DEEPSEEK_V3

SARVAM_MLA = dataclasses.replace(
    _DEEPSEEK,
    name="sarvam_mla",
    architecture="DeepseekV3ForCausalLM",
    build=_build_sarvam_mla,
    defaults={
        **hf.omit(_DEEPSEEK.declared, "head_dim"),
        "vocab_size": 262144,
        "hidden_size": 4096,
        "intermediate_size": 16384,
        "num_hidden_layers": 32,
        "num_attention_heads": 64,
        "num_key_value_heads": hf.optional_count(),
        "q_lora_rank": hf.optional_count(),
        "n_routed_experts": 128,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": hf.non_negative(1),
    },
    aliases={
        "num_local_experts": "n_routed_experts",
        "num_experts": "n_routed_experts",
        "num_shared_experts": "n_shared_experts",
    },
    # head_dim follows from other keys, and older files say the width of what is cached
    ignored_keys=_DEEPSEEK.ignored_keys | {"head_dim", "q_head_dim"},
)

"""LongCat-Flash (Meituan LongCat team, arXiv:2509.01322): layers of two latent attentions, two MLPs, and a mixture of
experts some of which return their input. Modules of multi-token prediction (MTP) are not read."""

import re
from collections.abc import Collection
from functools import partial

import jax
from jaxtyping import Array, Key

from zoo.layers import BiasedRouter, Dropout
from zoo.models.hf import grammar as hf

from . import deepseek_v2, llama
from .longcat_flash_layers import ShortcutBlock


def _build_longcat_flash(config: hf.Config, *, key: Key[Array, ""]) -> hf.Decoder:
    halves = _count_halves(config)
    config = hf.Config({**config, "num_hidden_layers": halves})  # by which matrices are initialized
    embed = config["hidden_size"]
    norm = hf.make_rms_norm_factory(config)
    scales = ((embed / config["q_lora_rank"]) ** 0.5, (embed / config["kv_lora_rank"]) ** 0.5)
    attention = hf.make_latent_attention_factory(config, interleaved=True, latent_scales=scales)
    ffn = hf.make_gated_mlp_factory(config)
    mixture = hf.make_mixture_factory(
        config,
        partial(BiasedRouter, score="softmax", renormalize=False, scale=config["routed_scaling_factor"]),
        config["n_routed_experts"],
        width=config["moe_intermediate_size"],
        identities=config["zero_expert_num"],
    )

    def make_second(key: Key[Array, ""]) -> hf.Block:
        mixer_key, ffn_key = jax.random.split(key)
        parts = {"mixer": attention(key=mixer_key), "ffn": ffn(key=ffn_key), "dropout": Dropout(0.0)}
        return hf.Block(mixer_norm=norm(), ffn_norm=norm(), **parts)

    layers = [(attention, ffn)] * (halves // 2)
    parts = {"mixture": mixture, "second": make_second}
    return hf.build_config_decoder(config, layers, norm, block=ShortcutBlock, parts=parts, key=key)


def _count_halves(config: hf.Config) -> int:
    """Return the number of halves of layers, of one attention each. transformers counts them as `num_hidden_layers`,
    and prefers it to `num_layers`."""
    halves = config["num_hidden_layers"]
    if halves is None:
        return 2 * config["num_layers"]
    if halves % 2:
        raise hf.ConfigError(f"num_hidden_layers = {halves} counts two attentions a layer, so it should be even")
    return halves


def _map_longcat_flash_names(config: hf.Config, experts: hf.NameMap) -> hf.NameMap:
    attention = hf.prefixed("", "latent_attention", deepseek_v2.map_latent_names(config))
    mlp = hf.prefixed("", "gated_mlp", llama.GATED_MLP_NAMES)
    mixture = {
        "router.classifier": "router.scores",
        "router.e_score_correction_bias": "router.selection_bias",
        **experts,
    }
    block = hf.prefixed("mlp", "mixture", mixture)
    for number, half in enumerate(("", "second")):
        block |= hf.prefixed(f"self_attn.{number}", half, attention)
        block |= hf.prefixed(f"mlps.{number}", half, mlp)
        block |= hf.prefixed("", half, {f"{norm}.{number}": ours for norm, ours in llama.PRE_NORM_NAMES.items()})
    return llama.map_llama_layers(block, {}, {})


_EXPERT_NUMBER = re.compile(r"\.mlp\.experts\.(\d+)\.(?:gate|up)_proj\.")


def _find_unused_tensors(config: hf.Config, tensors: Collection[str]) -> set[str]:
    """Return the matrices of experts without computation, which transformers has and writes, and never uses. Published
    files lack them."""
    numbers = {name: int(match[1]) for name in tensors if (match := _EXPERT_NUMBER.search(name))}
    return {name for name, number in numbers.items() if number >= config["n_routed_experts"]}


LONGCAT_FLASH = hf.Family(
    name="longcat_flash",
    architecture="LongcatFlashForCausalLM",
    build=_build_longcat_flash,
    names=partial(_map_longcat_flash_names, experts=deepseek_v2.FILE_EXPERT_NAMES),
    defaults={
        **hf.omit(llama.DEFAULTS, "mlp_bias"),
        "vocab_size": 131072,
        "hidden_size": 6144,
        "intermediate_size": 12288,
        "moe_intermediate_size": 2048,
        "num_layers": 28,
        "num_hidden_layers": hf.optional_count(),
        "num_attention_heads": 64,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_theta": 10000000.0},
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "num_experts_per_tok": 12,
        "n_routed_experts": 512,
        "zero_expert_num": hf.non_negative(256),
        "routed_scaling_factor": hf.Default(6.0, hf.POSITIVE_NUMBER),
    },
    aliases={
        "ffn_hidden_size": "intermediate_size",
        "expert_ffn_hidden_size": "moe_intermediate_size",
        "moe_topk": "num_experts_per_tok",
        "num_local_experts": "n_routed_experts",
    },
    required_values={
        "attention_method": ("MLA",),
        "mla_scale_q_lora": (True,),
        "mla_scale_kv_lora": (True,),
        "router_bias": (False,),
        "zero_expert_type": ("identity",),
    },
    ignored_keys=frozenset({"qk_head_dim"}),
    ignored_tensors=llama.LLAMA.ignored_tensors,
    other_modules=(r"(^|\.)mtp\.",),
    find_ignored_tensors=_find_unused_tensors,
    memory_names=partial(_map_longcat_flash_names, experts=deepseek_v2.MEMORY_EXPERT_NAMES),
)

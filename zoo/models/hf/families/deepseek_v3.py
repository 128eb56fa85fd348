"""DeepSeek-V3 (arXiv:2412.19437): DeepSeek-V2's layers, routed by sigmoid scores and a selection bias that is not
trained by gradient, and modules of multi-token prediction (MTP, section 2.2), which files have after the last layer."""

import re
from collections.abc import Collection
from typing import Any

from jaxtyping import Array, Key

from zoo.models.hf import grammar as hf

from . import deepseek_v2, llama


def build_deepseek_v3(config: hf.Config, *, key: Key[Array, ""], **options: Any) -> hf.Decoder:
    """Build the model of a DeepSeek-V3 config. `options` are passed to `build_decoder`."""
    mixer = hf.make_latent_attention_factory(config, interleaved=config["rope_interleave"])
    mixers = [mixer] * config["num_hidden_layers"]
    router = hf.make_biased_router_factory(config)
    return deepseek_v2.build_latent_decoder(config, router, mixers=mixers, key=key, **options)


_LAYER_NUMBER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def find_mtp_tensors(config: hf.Config, tensors: Collection[str]) -> set[str]:
    """Return the tensors of multi-token prediction modules, numbered like layers from `num_hidden_layers` on. Only such
    a module has an `eh_proj`, so that with a wrong `num_hidden_layers` no layer is ignored."""
    layer_of = {name: int(match[1]) for name in tensors if (match := _LAYER_NUMBER.search(name))}
    mtp_layers = {layer for name, layer in layer_of.items() if name.endswith(".eh_proj.weight")}
    return {name for name, n in layer_of.items() if n in mtp_layers and n >= config["num_hidden_layers"]}


def _name_deepseek_v3_predictor(config: hf.Config, number: int) -> dict[str, str]:
    layer = f"model.layers.{config['num_hidden_layers'] + number}"
    return {
        layer: "layers.0",
        f"{layer}.enorm": "embedding_norm",
        f"{layer}.hnorm": "state_norm",
        f"{layer}.eh_proj": "projection",
        f"{layer}.shared_head.norm": "norm",
        f"{layer}.embed_tokens": "embedding",
        f"{layer}.shared_head.head": "head",
    }


def _take_sparse_layer(config: hf.Config) -> dict[str, Any]:
    return {"num_hidden_layers": 1, "first_k_dense_replace": 0}


PREDICTORS = hf.PredictorFacts(_name_deepseek_v3_predictor, _take_sparse_layer)

DEEPSEEK_V3 = hf.Family(
    name="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    build=build_deepseek_v3,
    names=deepseek_v2.map_deepseek_v2_names,
    defaults={
        **deepseek_v2.DEFAULTS,
        "vocab_size": 129280,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "num_key_value_heads": hf.optional_count(128),
        "max_position_embeddings": 4096,
        "rope_interleave": True,
        "first_k_dense_replace": hf.non_negative(3),
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "routed_scaling_factor": hf.Default(2.5, hf.POSITIVE_NUMBER),
        "n_group": 8,
        "topk_group": 4,
        "norm_topk_prob": True,
    },
    aliases={"num_local_experts": "n_routed_experts"},
    required_values={"moe_layer_freq": (1,), "scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)},
    ignored_keys=deepseek_v2.IGNORED_KEYS | {"num_nextn_predict_layers", "num_mtp_layers"},
    ignored_tensors=llama.LLAMA.ignored_tensors,
    find_ignored_tensors=find_mtp_tensors,
    memory_names=deepseek_v2.map_deepseek_v2_memory_names,
    predictors=PREDICTORS,
)

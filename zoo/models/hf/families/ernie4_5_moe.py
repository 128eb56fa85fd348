"""ERNIE 4.5's mixture of experts (Baidu, "ERNIE 4.5 Technical Report", 2025): LLaMA's layer with
interleaved RoPE, routing by softmax scores and a selection bias, and shared experts."""

from functools import partial

from jaxtyping import Array, Key

from zoo.layers import BiasedRouter
from zoo.models.hf import grammar as hf

from . import llama, qwen2_moe

_MIN_WEIGHT_SUM = 1e-12
"""Lower bound of the sum that routing weights are divided by."""


def _build_ernie4_5_moe(config: hf.Config, *, key: Key[Array, ""]) -> hf.Decoder:
    width = config["moe_intermediate_size"]
    shared = None
    if config["moe_num_shared_experts"]:
        shared = config["moe_num_shared_experts"] * width
    experts = hf.make_mixture_factory(
        config,
        partial(BiasedRouter, score="softmax", smallest=_MIN_WEIGHT_SUM),
        config["num_experts"],
        width=width,
        shared=shared,
    )
    return hf.build_moe_decoder(
        config, _mark_ernie4_5_moe_layers(config), experts, rotary=hf.build_rotary(config, interleaved=True), key=key
    )


def _mark_ernie4_5_moe_layers(config: hf.Config) -> list[bool]:
    """Return True per layer that is a mixture of experts: every `moe_layer_interval`-th one from
    `moe_layer_start_index` to `moe_layer_end_index`, inclusive; -1 is the last layer."""
    layers = config["num_hidden_layers"]
    step = config["moe_layer_interval"]
    first = config["moe_layer_start_index"]
    last = config["moe_layer_end_index"]
    if not -1 <= last <= layers:
        raise hf.ConfigError(f"moe_layer_end_index = {last} should be the number of a layer, or -1 for the last")
    if last == -1:
        last = layers - 1
    return [(number + 1) % step == 0 and first <= number <= last for number in range(layers)]


def _map_mixture_names(bias: str) -> hf.NameMap:
    return {
        "gate": "router.scores",
        bias: hf.TensorMapping(("router.selection_bias",), leading_ones=1),
        **hf.prefixed("shared_experts", "shared", llama.GATED_MLP_NAMES),
    }


def _map_ernie4_5_moe_names(config: hf.Config) -> hf.NameMap:
    mixture = _map_mixture_names("moe_statics.e_score_correction_bias")
    return qwen2_moe.map_qwen2_moe_layers({**mixture, **hf.prefixed("experts.*", "experts.*", llama.GATED_MLP_NAMES)})


def _map_ernie4_5_moe_memory_names(config: hf.Config) -> hf.NameMap:
    mixture = _map_mixture_names("gate.moe_statics.e_score_correction_bias")
    return qwen2_moe.map_qwen2_moe_layers({**mixture, **hf.prefixed("experts", "experts.*", llama.FUSED_EXPERT_NAMES)})


ERNIE4_5_MOE = hf.Family(
    name="ernie4_5_moe",
    architecture="Ernie4_5_MoeForCausalLM",
    build=_build_ernie4_5_moe,
    names=_map_ernie4_5_moe_names,
    defaults={
        **hf.omit(llama.DEFAULTS, "attention_bias", "mlp_bias"),
        "vocab_size": 103424,
        "hidden_size": 2560,
        "intermediate_size": 12288,
        "num_hidden_layers": 28,
        "num_attention_heads": 20,
        "num_key_value_heads": hf.optional_count(4),
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_theta": 500000.0},
        "moe_intermediate_size": 1536,
        "num_experts": 64,
        "num_experts_per_tok": 6,
        "moe_num_shared_experts": hf.non_negative(2),
        "moe_layer_start_index": hf.non_negative(1),
        "moe_layer_end_index": hf.Default(-1, hf.integer()),
        "moe_layer_interval": 1,
    },
    aliases={"moe_num_experts": "num_experts", "moe_k": "num_experts_per_tok"},
    required_values={
        "use_bias": (False,),
        "moe_norm_min": (_MIN_WEIGHT_SUM,),
        "moe_gate": ("topk",),
        "moe_use_aux_free": (True,),
    },
    ignored_keys=frozenset({"moe_capacity", "num_nextn_predict_layers"}),
    ignored_tensors=llama.LLAMA.ignored_tensors,
    other_modules=(r"^model\.mtp_",),
    memory_names=_map_ernie4_5_moe_memory_names,
)

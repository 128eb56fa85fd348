"""Qwen3.5 (Qwen team, 2026), its language model: of four layers three with the gated delta rule (arXiv:2412.06464) and
the fourth with gated attention (arXiv:2505.06708), RoPE on a quarter of each head, and RMSNorm scales 1 + w. It has a
module of multi-token prediction with gated attention. Without images, its multimodal RoPE is plain RoPE."""

from collections.abc import Callable
from functools import partial
from typing import Any

from jaxtyping import Array, Key

from zoo.layers import GatedAttention, GroupedGatedDeltaNet
from zoo.models.hf import grammar as hf

from . import llama


def _build_qwen3_5(config: hf.Config, *, key: Key[Array, ""]) -> hf.Decoder:
    ffn = hf.make_gated_mlp_factory(config)
    layers = [(mixer, ffn) for mixer in list_qwen3_5_mixers(config)]
    return hf.build_config_decoder(config, layers, hf.make_rms_norm_factory(config, offset=1.0), key=key)


def list_qwen3_5_mixers(config: hf.Config) -> list[Callable[..., Any]]:
    """Return the mixer factory of each layer. **Raises** `ConfigError` for another type than linear_attention and
    full_attention."""
    interval = config["full_attention_interval"]
    count = config["num_hidden_layers"]
    default = hf.list_layer_types(((n + 1) % interval for n in range(count)), local="linear_attention")
    qk_norm = hf.make_head_norm_factory(config, offset=1.0)
    mixers = {
        "linear_attention": make_delta_factory(config),
        "full_attention": hf.make_attention_factory(config, attention=GatedAttention, qk_norm=qk_norm),
    }
    return hf.pick_mixers(hf.read_layer_types(config, default), mixers)


def make_delta_factory(config: hf.Config) -> Callable[..., GroupedGatedDeltaNet]:
    """Return a factory of the gated delta rule."""
    return partial(
        GroupedGatedDeltaNet,
        config["hidden_size"],
        config["linear_num_value_heads"],
        groups=config["linear_num_key_heads"],
        key_dim=config["linear_key_head_dim"],
        value_dim=config["linear_value_head_dim"],
        conv_width=config["linear_conv_kernel_dim"],
        activation=hf.find_activation(config),
        epsilon=config["rms_norm_eps"],
        out_scale=hf.compute_out_scale(config),
    )


DELTA_NAMES: hf.NameMap = {
    "conv1d": hf.fused("query_convolution", "key_convolution", "value_convolution", conv1d_filters=True),
    "dt_bias": "decay.bias",
    "A_log": "decay.A_log",
    "out_proj": "readout.out",
}
"""Names of the gated delta rule, without its input projections and its norm."""
DELTA_INPUT_NAMES: hf.NameMap = {
    "in_proj_qkv": hf.fused("query", "key", "value"),
    "in_proj_z": "readout.gate",
    "in_proj_b": "rate",
    "in_proj_a": "decay.step",
}


def map_qwen3_5_layers(
    config: hf.Config, feed_forward: hf.NameMap, delta_inputs: hf.NameMap = DELTA_INPUT_NAMES
) -> hf.NameMap:
    """Return a LLaMA-like name map with Qwen3.5's mixers, given the names of the feed-forward layers, and of the input
    projections of the delta rule if they are others."""
    delta = {**delta_inputs, **DELTA_NAMES, "norm": "readout.norm"}
    mixers = {
        **hf.prefixed("linear_attn", "grouped_gated_delta_net", delta),
        **hf.prefixed("self_attn", "gated_attention", name_gated_attention(config)),
    }
    return llama.map_llama_layers(feed_forward, mixers)


def name_gated_attention(config: hf.Config) -> hf.NameMap:
    """Return the names of gated attention, whose queries and gates are one matrix, head by head."""
    query = hf.fused("query", "gate", groups=config["num_attention_heads"])
    return {**hf.omit(llama.ATTENTION_NAMES, "q_proj"), "q_proj": query}


def _map_qwen3_5_names(config: hf.Config) -> hf.NameMap:
    return map_qwen3_5_layers(config, hf.prefixed("mlp", "gated_mlp", llama.GATED_MLP_NAMES))


DEFAULTS = {
    **hf.omit(llama.DEFAULTS, "attention_bias", "mlp_bias"),
    "vocab_size": 248320,
    "intermediate_size": 12288,
    "num_attention_heads": 16,
    "num_key_value_heads": hf.optional_count(4),
    "head_dim": hf.optional_count(256),
    "max_position_embeddings": 32768,
    "rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.25},
    "layer_types": hf.optional_words(),
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}


def name_qwen3_5_predictor(config: hf.Config, number: int) -> dict[str, str]:
    """Return the names of a predictor's modules."""
    return {
        f"mtp.layers.{number}": "layers.0",
        "mtp.pre_fc_norm_embedding": "embedding_norm",
        "mtp.pre_fc_norm_hidden": "state_norm",
        "mtp.fc": "projection",
        "mtp.norm": "norm",
    }


def _take_attention_layer(config: hf.Config) -> dict[str, Any]:
    return {"num_hidden_layers": 1, "layer_types": ["full_attention"]}


QWEN3_5_TEXT = hf.Family(
    name="qwen3_5_text",
    architecture="Qwen3_5ForCausalLM",
    build=_build_qwen3_5,
    names=_map_qwen3_5_names,
    defaults=DEFAULTS,
    required_values={
        "attention_bias": (False,),
        "attn_output_gate": (True,),
        "mamba_ssm_dtype": ("float32", None),
        "mlp_only_layers": ([], None),
    },
    ignored_keys=frozenset(
        {"mrope_section", "mrope_interleaved", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"}
    ),
    ignored_tensors=llama.LLAMA.ignored_tensors,
    other_modules=(r"^mtp\.",),
    predictors=hf.PredictorFacts(name_qwen3_5_predictor, _take_attention_layer, count_key="mtp_num_hidden_layers"),
)

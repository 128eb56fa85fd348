"""LLaMA 1 to 3 (Touvron et al., arXiv:2302.13971; Llama team, arXiv:2407.21783), and models of its architecture."""

from typing import Any

from jaxtyping import Array, Key

from zoo.models.hf import grammar as hf

ATTENTION_NAMES: hf.NameMap = {
    "q_proj": "query",
    "k_proj": "key",
    "v_proj": "value",
    "o_proj": "out",
    "q_norm": "query_norm",
    "k_norm": "key_norm",
}
PRE_NORM_NAMES: hf.NameMap = {"input_layernorm": "mixer_norm", "post_attention_layernorm": "ffn_norm"}
GATED_MLP_NAMES: hf.NameMap = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down"}
FUSED_EXPERT_NAMES: hf.NameMap = {"gate_up_proj": hf.fused("gate.weight", "up.weight"), "down_proj": "down.weight"}
"""All experts of a layer in one tensor, as transformers has them in memory."""


def build_llama(config: hf.Config, *, key: Key[Array, ""]) -> hf.Decoder:
    """Build the model of a LLaMA-like config."""
    norm = hf.make_rms_norm_factory(config)
    bias = config["attention_bias"]
    mixer = hf.make_attention_factory(config, bias=bias, out_bias=bias)
    layers = [(mixer, hf.make_gated_mlp_factory(config, bias=config["mlp_bias"]))] * config["num_hidden_layers"]
    return hf.build_config_decoder(config, layers, norm, key=key)


def map_llama_names(config: hf.Config) -> hf.NameMap:
    """Return the name map of dense LLaMA-like models."""
    return map_llama_layers(hf.prefixed("mlp", "gated_mlp", GATED_MLP_NAMES))


def map_llama_layers(
    feed_forward: hf.NameMap, mixer: hf.NameMap | None = None, norms: hf.NameMap = PRE_NORM_NAMES
) -> hf.NameMap:
    """Return a LLaMA-like name map, given the names of the feed-forward layers and, if they are others, of the mixer
    and of the norms."""
    if mixer is None:
        mixer = hf.prefixed("self_attn", "attention", ATTENTION_NAMES)
    block = {**norms, **mixer, **feed_forward}
    shell = {"model.embed_tokens": "embedding", "model.norm": "norm", "lm_head": "head"}
    return {**shell, **hf.prefixed("model.layers.*", "layers.*", block)}


DEFAULTS: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": hf.optional_count(),
    "head_dim": hf.optional_count(),
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_theta": 10000.0},
    "attention_bias": False,
    "mlp_bias": False,
}

LLAMA = hf.Family(
    name="llama",
    architecture="LlamaForCausalLM",
    build=build_llama,
    names=map_llama_names,
    defaults=DEFAULTS,
    ignored_tensors=(r"\.rotary_emb\.inv_freq$",),
    describe=hf.describe_dense,
)

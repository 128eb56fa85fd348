"""Command R (Cohere, "Command R", 2024): attention and feed-forward in parallel on one norm, LayerNorm without a bias,
interleaved RoPE, and scaled logits of a tied head; in Command R+ a QK norm for each head."""

from collections.abc import Sequence
from functools import partial

from jaxtyping import Array, Key

from zoo.layers.norm import PerHeadLayerNorm
from zoo.models.hf import grammar as hf

from . import llama


def _build_cohere(config: hf.Config, *, key: Key[Array, ""]) -> hf.Decoder:
    bias = config["attention_bias"]
    rotary = hf.build_rotary(config, interleaved=True)
    if config["use_qk_norm"]:
        qk_norm = partial(PerHeadLayerNorm, epsilon=config["layer_norm_eps"])
    else:
        qk_norm = None
    mixer = hf.make_attention_factory(config, rotary=rotary, bias=bias, out_bias=bias, norm_over_heads=qk_norm)
    return build_cohere_layers(config, [mixer] * config["num_hidden_layers"], key=key)


def build_cohere_layers(config: hf.Config, mixers: Sequence[hf.MixerFactory], *, key: Key[Array, ""]) -> hf.Decoder:
    """Build Cohere's layers with these mixers."""
    norm = hf.make_layer_norm_factory(config, bias=False)
    ffn = hf.make_gated_mlp_factory(config)
    options = {"logits_multiplier": config["logit_scale"]}
    layers = [(mixer, ffn) for mixer in mixers]
    return hf.build_config_decoder(config, layers, norm, block=hf.make_one_norm_block, key=key, **options)


def map_cohere_names(config: hf.Config) -> hf.NameMap:
    """Return the name map of Cohere's models."""
    norms = {"input_layernorm": "mixer_norm"}
    attention = {
        **hf.omit(llama.ATTENTION_NAMES, "q_norm", "k_norm"),
        "q_norm.weight": "query_norm.norms.*.weight",
        "k_norm.weight": "key_norm.norms.*.weight",
    }
    mixer = hf.prefixed("self_attn", "attention", attention)
    return llama.map_llama_layers(hf.prefixed("mlp", "gated_mlp", llama.GATED_MLP_NAMES), mixer, norms)


DEFAULTS = {
    **hf.omit(llama.DEFAULTS, "mlp_bias", "rms_norm_eps"),
    "vocab_size": 256000,
    "hidden_size": 8192,
    "intermediate_size": 22528,
    "num_hidden_layers": 40,
    "num_attention_heads": 64,
    "max_position_embeddings": 8192,
    "layer_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_theta": 500000.0},
    "logit_scale": 0.0625,
}

COHERE = hf.Family(
    name="cohere",
    architecture="CohereForCausalLM",
    build=_build_cohere,
    names=map_cohere_names,
    defaults={**DEFAULTS, "use_qk_norm": False},
    ignored_tensors=llama.LLAMA.ignored_tensors,
)

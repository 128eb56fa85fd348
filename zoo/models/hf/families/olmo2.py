"""OLMo 2 (OLMo team, arXiv:2501.00656): norms after attention and MLP, and QK norm over all heads."""

from functools import partial

from jaxtyping import Array, Key

from zoo.layers import RMSNorm
from zoo.models.hf import grammar as hf

from . import llama


def _build_olmo2(config: hf.Config, *, key: Key[Array, ""]) -> hf.Decoder:
    bias = config["attention_bias"]
    qk_norm = partial(RMSNorm, epsilon=config["rms_norm_eps"])
    mixer = hf.make_attention_factory(config, bias=bias, out_bias=bias, norm_over_heads=qk_norm)
    layers = [(mixer, hf.make_gated_mlp_factory(config))] * config["num_hidden_layers"]
    return hf.build_config_decoder(config, layers, hf.make_rms_norm_factory(config), block=hf.PostNormBlock, key=key)


def map_olmo2_names(config: hf.Config) -> hf.NameMap:
    """Return the name map of LLaMA-like models with norms after each sublayer."""
    norms = {"post_attention_layernorm": "mixer_norm", "post_feedforward_layernorm": "ffn_norm"}
    return llama.map_llama_layers(hf.prefixed("mlp", "gated_mlp", llama.GATED_MLP_NAMES), norms=norms)


DEFAULTS = {
    **hf.omit(llama.DEFAULTS, "mlp_bias"),
    "vocab_size": 50304,
    "rms_norm_eps": 1e-5,
}

OLMO2 = hf.Family(
    name="olmo2",
    architecture="Olmo2ForCausalLM",
    build=_build_olmo2,
    names=map_olmo2_names,
    defaults=DEFAULTS,
    ignored_tensors=llama.LLAMA.ignored_tensors,
)

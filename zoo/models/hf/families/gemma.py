"""Gemma (Mesnard et al., arXiv:2403.08295): LLaMA's layer with RMSNorm scales 1 + w, GeGLU, and embeddings
times sqrt(hidden_size)."""

from jaxtyping import Array, Key

from zoo.models.hf import grammar as hf

from . import llama


def _build_gemma(config: hf.Config, *, key: Key[Array, ""]) -> hf.Decoder:
    # "gelu" of the first releases is its tanh approximation, as in transformers
    if config["hidden_act"] == "gelu":
        config = hf.Config(config, hidden_act="gelu_pytorch_tanh")
    norm = hf.make_rms_norm_factory(config, offset=1.0)
    bias = config["attention_bias"]
    mixer = hf.make_attention_factory(config, bias=bias, out_bias=bias)
    ffn = hf.make_gated_mlp_factory(config)
    layers = [(mixer, ffn)] * config["num_hidden_layers"]
    return hf.build_config_decoder(config, layers, norm, multiplier=config["hidden_size"] ** 0.5, key=key)


DEFAULTS = {
    **hf.omit(llama.DEFAULTS, "mlp_bias"),
    "vocab_size": 256000,
    "hidden_size": 3072,
    "intermediate_size": 24576,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": hf.optional_count(16),
    "head_dim": hf.optional_count(256),
    "hidden_act": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}

GEMMA = hf.Family(
    name="gemma",
    architecture="GemmaForCausalLM",
    build=_build_gemma,
    names=llama.map_llama_names,
    defaults=DEFAULTS,
    required_values={"hidden_activation": (None, "gelu_pytorch_tanh")},
    ignored_tensors=llama.LLAMA.ignored_tensors,
    describe=hf.describe_dense,
)

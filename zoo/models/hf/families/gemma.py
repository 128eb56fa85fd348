"""Gemma (Mesnard et al., arXiv:2403.08295): LLaMA's layer with RMSNorm scales 1 + w, GeGLU, and embeddings
times sqrt(hidden_size)."""

from jaxtyping import Array, Key

from zoo.models.decoder import Decoder
from zoo.models.hf.builders import (
    build_config_decoder,
    make_attention_factory,
    make_gated_mlp_factory,
    make_rms_norm_factory,
)
from zoo.models.hf.kinds import optional_count
from zoo.models.hf.spec import Config, Family

from . import llama


def _build_gemma(config: Config, *, key: Key[Array, ""]) -> Decoder:
    # "gelu" of the first releases is its tanh approximation, as in transformers
    if config["hidden_act"] == "gelu":
        config = Config(config, hidden_act="gelu_pytorch_tanh")
    norm = make_rms_norm_factory(config, offset=1.0)
    bias = config["attention_bias"]
    mixer = make_attention_factory(config, bias=bias, out_bias=bias)
    ffn = make_gated_mlp_factory(config)
    layers = [(mixer, ffn)] * config["num_hidden_layers"]
    return build_config_decoder(config, layers, norm, multiplier=config["hidden_size"] ** 0.5, key=key)


DEFAULTS = {
    **{key: value for key, value in llama.DEFAULTS.items() if key != "mlp_bias"},
    "vocab_size": 256000,
    "hidden_size": 3072,
    "intermediate_size": 24576,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": optional_count(16),
    "head_dim": optional_count(256),
    "hidden_act": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}

GEMMA = Family(
    name="gemma",
    architecture="GemmaForCausalLM",
    build=_build_gemma,
    names=llama.map_llama_names,
    defaults=DEFAULTS,
    required_values={"hidden_activation": (None, "gelu_pytorch_tanh")},
    ignored_tensors=llama.LLAMA.ignored_tensors,
    describe=llama.describe_dense,
)

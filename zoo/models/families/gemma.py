"""Gemma (Mesnard et al., arXiv:2403.08295): LLaMA's layer with norms that multiply by 1 + w, a gate of gelu, and
embeddings times sqrt(hidden_size)."""

from jaxtyping import Array, Key

from zoo.models.assemble import layer
from zoo.models.blocks import Block
from zoo.models.decoder import Decoder
from zoo.models.facts import Config, Family
from zoo.models.pieces import attention, decoder, gated_mlp, rms_norm

from . import llama


def build(config: Config, *, key: Key[Array, ""]) -> Decoder:
    # the first releases say "gelu" and mean its tanh form, as transformers reads them
    config = Config(config, hidden_act="gelu_pytorch_tanh") if config["hidden_act"] == "gelu" else config
    norm, bias = rms_norm(config, offset=1.0), config["attention_bias"]
    block = layer(Block, norm=norm, mixer=attention(config, bias=bias, out_bias=bias), ffn=gated_mlp(config))
    kinds = [block] * config["num_hidden_layers"]
    return decoder(config, kinds, norm, multiplier=config["hidden_size"] ** 0.5, key=key)


DEFAULTS = {
    **{key: value for key, value in llama.DEFAULTS.items() if key != "mlp_bias"},
    "vocab_size": 256000,
    "hidden_size": 3072,
    "intermediate_size": 24576,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}

GEMMA = Family(
    name="gemma",
    architecture="GemmaForCausalLM",
    build=build,
    names=llama.names,
    defaults=DEFAULTS,
    only={"hidden_activation": (None, "gelu_pytorch_tanh")},
    ignored=llama.LLAMA.ignored,
    describe=llama.described,
)

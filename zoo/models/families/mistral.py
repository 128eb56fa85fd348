"""Mistral 7B (Jiang et al., arXiv:2310.06825): LLaMA's layer, with a sliding window in all of them or none."""

from jaxtyping import Array, Key

from zoo.models.assemble import layer
from zoo.models.blocks import Block
from zoo.models.decoder import Decoder
from zoo.models.facts import Config, Family
from zoo.models.pieces import attention, decoder, gated_mlp, rms_norm

from . import llama


def build(config: Config, *, key: Key[Array, ""]) -> Decoder:
    norm = rms_norm(config)
    mixer = attention(config, window=config["sliding_window"])
    block = layer(Block, norm=norm, mixer=mixer, ffn=gated_mlp(config))
    return decoder(config, [block] * config["num_hidden_layers"], norm, key=key)


DEFAULTS = {
    **{key: value for key, value in llama.DEFAULTS.items() if key not in ("attention_bias", "mlp_bias")},
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
}

MISTRAL = Family(
    name="mistral",
    architecture="MistralForCausalLM",
    build=build,
    names=llama.names,
    defaults=DEFAULTS,
    only={"layer_types": (None,)},
    ignored=llama.LLAMA.ignored,
    describe=llama.described,
)

"""Qwen3, its dense models (Yang et al., arXiv:2505.09388): RMS norms over each head's query and key, and a width of
heads that does not follow from the model's."""

from jaxtyping import Array, Key

from zoo.models.decoder import Decoder
from zoo.models.facts import Config, Family
from zoo.models.pieces import head_norm

from . import llama, qwen2


def build(config: Config, *, key: Key[Array, ""]) -> Decoder:
    bias = config["attention_bias"]
    return qwen2.windowed(config, key=key, bias=bias, out_bias=bias, qk_norm=head_norm(config))


QWEN3 = Family(
    name="qwen3",
    architecture="Qwen3ForCausalLM",
    build=build,
    names=llama.names,
    defaults={**qwen2.DEFAULTS, "head_dim": 128, "attention_bias": False},
    ignored=llama.LLAMA.ignored,
    describe=llama.described,
)

"""Qwen2 and Qwen2.5 (Yang et al., arXiv:2407.10671; arXiv:2412.15115): LLaMA's layer with biases on queries, keys and
values, the upper layers windowed where a config asks for it."""

from typing import Any

from jaxtyping import Array, Key

from zoo.models.assemble import kinds_of, layer
from zoo.models.blocks import Block
from zoo.models.decoder import Decoder
from zoo.models.facts import Config, Family
from zoo.models.pieces import attention, decoder, gated_mlp, layer_types, rms_norm, windows
from zoo.models.stack import Kind

from . import llama


def build(config: Config, *, key: Key[Array, ""]) -> Decoder:
    return windowed(config, key=key, bias=True)


def windowed(config: Config, *, key: Key[Array, ""], **options: Any) -> Decoder:
    """LLaMA's layers, with attention of these options and a window from layer `max_window_layers` on."""
    norm, window = rms_norm(config), config["sliding_window"] if config["use_sliding_window"] else None
    upper = "full_attention" if window is None else "sliding_attention"
    full = min(config["max_window_layers"], config["num_hidden_layers"])
    usual = ["full_attention"] * full + [upper] * (config["num_hidden_layers"] - full)

    def kind(window: int | None) -> Kind:
        return layer(Block, norm=norm, mixer=attention(config, window=window, **options), ffn=gated_mlp(config))

    return decoder(config, kinds_of(windows(layer_types(config, usual), window), kind), norm, key=key)


DEFAULTS = {
    **{key: value for key, value in llama.DEFAULTS.items() if key not in ("attention_bias", "mlp_bias")},
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "layer_types": None,
}

QWEN2 = Family(
    name="qwen2",
    architecture="Qwen2ForCausalLM",
    build=build,
    names=llama.names,
    defaults=DEFAULTS,
    only={"use_mrope": (False,)},
    ignored=llama.LLAMA.ignored,
    describe=llama.described,
)

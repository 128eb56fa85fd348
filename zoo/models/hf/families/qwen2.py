"""Qwen2 and Qwen2.5 (Yang et al., arXiv:2407.10671; arXiv:2412.15115): LLaMA's layer with QKV biases, and sliding
windows in the upper layers if `use_sliding_window`."""

from typing import Any

from jaxtyping import Array, Key

from zoo.models.decoder import Decoder
from zoo.models.hf.builders import (
    build_config_decoder,
    list_layer_types,
    list_layer_windows,
    make_gated_mlp_factory,
    make_rms_norm_factory,
    make_windowed_attention_factories,
    read_layer_types,
)
from zoo.models.hf.kinds import Default, optional_count, optional_non_negative, optional_words
from zoo.models.hf.spec import Config, Family
from zoo.models.hf.values import integer

from . import llama


def _build_qwen2(config: Config, *, key: Key[Array, ""]) -> Decoder:
    return build_windowed_decoder(config, key=key, bias=True)


def build_windowed_decoder(config: Config, *, key: Key[Array, ""], **options: Any) -> Decoder:
    """Build LLaMA's layers with these options of attention, and sliding windows from layer `max_window_layers` on."""
    norm = make_rms_norm_factory(config)
    window = config["sliding_window"] if config["use_sliding_window"] else None
    numbers = range(config["num_hidden_layers"])
    default = list_layer_types(window is not None and n >= config["max_window_layers"] for n in numbers)
    windows = list_layer_windows(read_layer_types(config, default), window)
    mixers = make_windowed_attention_factories(config, windows, **options)
    ffn = make_gated_mlp_factory(config)
    return build_config_decoder(config, [(mixer, ffn) for mixer in mixers], norm, key=key)


DEFAULTS = {
    **{key: value for key, value in llama.DEFAULTS.items() if key not in ("attention_bias", "mlp_bias")},
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": optional_count(32),
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": optional_non_negative(4096),
    "max_window_layers": Default(28, integer()),
    "layer_types": optional_words(),
}

QWEN2 = Family(
    name="qwen2",
    architecture="Qwen2ForCausalLM",
    build=_build_qwen2,
    names=llama.map_llama_names,
    defaults=DEFAULTS,
    required_values={"use_mrope": (False,)},
    ignored_tensors=llama.LLAMA.ignored_tensors,
    describe=llama.describe_dense,
)

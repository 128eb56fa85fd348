"""Qwen2 and Qwen2.5 (Yang et al., arXiv:2407.10671; arXiv:2412.15115): LLaMA's layer with QKV biases, and sliding
windows in the upper layers if `use_sliding_window`."""

from typing import Any

from jaxtyping import Array, Key

from zoo.models.hf import grammar as hf

from . import llama


def _build_qwen2(config: hf.Config, *, key: Key[Array, ""]) -> hf.Decoder:
    return build_windowed_decoder(config, key=key, bias=True)


def build_windowed_decoder(
    config: hf.Config, *, block: Any = hf.Block, key: Key[Array, ""], **options: Any
) -> hf.Decoder:
    """Build LLaMA's layers with these options of attention, and sliding windows from layer `max_window_layers` on."""
    norm = hf.make_rms_norm_factory(config)
    window = config["sliding_window"] if config["use_sliding_window"] else None
    numbers = range(config["num_hidden_layers"])
    default = hf.list_layer_types(window is not None and n >= config["max_window_layers"] for n in numbers)
    windows = hf.list_layer_windows(hf.read_layer_types(config, default), window)
    mixers = hf.make_windowed_attention_factories(config, windows, **options)
    ffn = hf.make_gated_mlp_factory(config)
    return hf.build_config_decoder(config, [(mixer, ffn) for mixer in mixers], norm, block=block, key=key)


DEFAULTS = {
    **hf.omit(llama.DEFAULTS, "attention_bias", "mlp_bias"),
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": hf.optional_count(32),
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": hf.optional_non_negative(4096),
    "max_window_layers": hf.Default(28, hf.integer()),
    "layer_types": hf.optional_words(),
}

QWEN2 = hf.Family(
    name="qwen2",
    architecture="Qwen2ForCausalLM",
    build=_build_qwen2,
    names=llama.map_llama_names,
    defaults=DEFAULTS,
    required_values={"use_mrope": (False,)},
    ignored_tensors=llama.LLAMA.ignored_tensors,
    describe=hf.describe_dense,
)

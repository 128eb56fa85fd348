"""SmolLM3 (Bakouch et al., "SmolLM3: smol, multilingual, long-context reasoner", 2025): LLaMA's layer, without RoPE in
every fourth layer (Yang et al., arXiv:2501.18795)."""

from jaxtyping import Array, Key

from zoo.models.hf import grammar as hf

from . import llama


def _build_smollm3(config: hf.Config, *, key: Key[Array, ""]) -> hf.Decoder:
    norm = hf.make_rms_norm_factory(config)
    bias = config["attention_bias"]
    rotary = hf.build_rotary(config)
    window = config["sliding_window"] if config["use_sliding_window"] else None
    turns = _list_rotary_layers(config)
    rotaries = [rotary if own else None for own in turns]
    default = hf.list_layer_types(window is not None and not own for own in turns)
    windows = hf.list_layer_windows(hf.read_layer_types(config, default), window)
    mixers = hf.make_layerwise_attention_factories(config, windows, rotaries, bias=bias, out_bias=bias)
    ffn = hf.make_gated_mlp_factory(config, bias=config["mlp_bias"])
    return hf.build_config_decoder(config, [(mixer, ffn) for mixer in mixers], norm, key=key)


def _list_rotary_layers(config: hf.Config) -> list[bool]:
    """Return True for each layer with RoPE: by `no_rope_layers`, which is 0 for a layer without, or all but each
    `no_rope_layer_interval`-th."""
    count = config["num_hidden_layers"]
    given = config["no_rope_layers"]
    if given is None:
        return [(number + 1) % config["no_rope_layer_interval"] != 0 for number in range(count)]
    if len(given) != count:
        raise hf.ConfigError(f"no_rope_layers should have a 1 or a 0 for each of the {count} layers")
    return [flag != 0 for flag in given]


SMOLLM3 = hf.Family(
    name="smollm3",
    architecture="SmolLM3ForCausalLM",
    build=_build_smollm3,
    names=llama.map_llama_names,
    defaults={
        **llama.DEFAULTS,
        "vocab_size": 128256,
        "hidden_size": 2048,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": hf.optional_count(4),
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_theta": 2000000.0},
        "use_sliding_window": False,
        "sliding_window": hf.optional_non_negative(),
        "layer_types": hf.optional_words(),
        "no_rope_layers": hf.optional_layer_numbers(),
        "no_rope_layer_interval": 4,
    },
    ignored_keys=frozenset({"max_window_layers"}),
    ignored_tensors=llama.LLAMA.ignored_tensors,
)

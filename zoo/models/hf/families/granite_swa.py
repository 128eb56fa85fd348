"""Granite with sliding windows (Granite team, "Granite Swash", 2026): Granite's layer and multipliers with attention
sinks; of four layers, three have a sliding window, and each layer may have a RoPE base of its own, or no RoPE."""

from jaxtyping import Array, Key

from zoo.models.hf import grammar as hf
from zoo.ops.rotary import Rotary

from . import cwm, granite, llama


def _build_granite_swa(config: hf.Config, *, key: Key[Array, ""]) -> hf.Decoder:
    return build_windowed_granite(config, hf.make_gated_mlp_factory(config, bias=config["mlp_bias"]), key=key)


def build_windowed_granite(config: hf.Config, ffn: hf.FeedForwardFactory, *, key: Key[Array, ""]) -> hf.Decoder:
    """Build Granite's layers with this feed-forward layer, sinks, and windows and RoPE by layer."""
    types = hf.read_layer_types(config, cwm.list_every_fourth_full(config))
    windows = hf.list_layer_windows(types, config["sliding_window"])
    rotaries = _list_rotaries(config)

    options = granite.read_attention_options(config)
    mixers = hf.make_layerwise_attention_factories(config, windows, rotaries, sinks=True, **options)
    return granite.build_granite_layers(config, ffn, mixers, key=key)


def _list_rotaries(config: hf.Config) -> list[Rotary | None]:
    """Return the RoPE of each layer: with its `layer_rope_theta`, or without RoPE where that is 0."""
    bases = config["layer_rope_theta"]
    if bases is None:
        return [hf.build_rotary(config)] * config["num_hidden_layers"]
    if len(bases) != config["num_hidden_layers"]:
        raise hf.ConfigError(f"layer_rope_theta should have a number for each of {config['num_hidden_layers']} layers")
    parameters = config["rope_parameters"]
    rotaries = {
        base: hf.build_rotary(hf.Config(config, rope_parameters={**parameters, "rope_theta": float(base)}))
        for base in bases
        if base
    }
    return [rotaries.get(base) for base in bases]


SINK_ATTENTION_NAMES: hf.NameMap = hf.prefixed("self_attn", "attention", {**llama.ATTENTION_NAMES, "sinks": "sinks"})


def _map_granite_swa_names(config: hf.Config) -> hf.NameMap:
    return llama.map_llama_layers(hf.prefixed("mlp", "gated_mlp", llama.GATED_MLP_NAMES), SINK_ATTENTION_NAMES)


WINDOW_DEFAULTS = {
    "sliding_window": hf.optional_non_negative(128),
    "layer_types": hf.optional_words(),
    "layer_rope_theta": hf.Default(None, hf.optional(hf.list_of(hf.NON_NEGATIVE_NUMBER))),
}

GRANITE_SWA = hf.Family(
    name="granite_swa",
    architecture="GraniteSWAForCausalLM",
    build=_build_granite_swa,
    names=_map_granite_swa_names,
    defaults={
        **hf.omit(granite.GRANITE.declared, "head_dim"),
        **WINDOW_DEFAULTS,
        "vocab_size": 100352,
        "hidden_size": 2560,
        "intermediate_size": 8192,
        "num_hidden_layers": 24,
        "num_attention_heads": 20,
        "num_key_value_heads": hf.optional_count(4),
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    },
    ignored_tensors=llama.LLAMA.ignored_tensors,
)

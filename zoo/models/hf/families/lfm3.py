"""LFM3 (Liquid AI, 2026): LFM2's short convolutions, full attention and attention with a sliding window, each with a
RoPE of its own, QK norm and a gate per head; norms before and after each sublayer."""

from functools import partial

from jaxtyping import Array, Key

from zoo.layers import Attention, GatedAttention
from zoo.models.hf import grammar as hf

from . import lfm2, llama, mixtral


def _build_lfm3(config: hf.Config, *, key: Key[Array, ""]) -> hf.Decoder:
    default = [_find_default_type(number) for number in range(config["num_hidden_layers"])]
    types = hf.read_layer_types(config, default)
    norm = hf.make_rms_norm_factory(config)
    if config["use_attention_gate"]:
        attention = partial(GatedAttention, per_head=True)
    else:
        attention = Attention
    windows = {"full_attention": None, "sliding_attention": config["sliding_window"]}
    if windows["sliding_attention"] is None and "sliding_attention" in types:
        raise hf.ConfigError("layer_types has sliding_attention, and no sliding_window says how wide")
    bias = config["attention_bias"]
    options = {"qk_norm": hf.make_head_norm_factory(config), "bias": bias, "out_bias": bias}
    mixers = {
        kind: hf.make_attention_factory(
            config, attention=attention, rotary=hf.build_rotary(config, layer_type=kind), window=window, **options
        )
        for kind, window in windows.items()
        if kind in types
    }
    ffn = hf.make_gated_mlp_factory(config)
    chosen = hf.pick_mixers(types, {"conv": lfm2.make_convolution_factory(config), **mixers})
    layers = [(mixer, ffn) for mixer in chosen]
    block = hf.make_sandwich_block(norm) if config["use_sandwich_norm"] else hf.Block
    return hf.build_config_decoder(config, layers, norm, block=block, key=key)


def _find_default_type(number: int) -> str:
    """Return the type of a layer of a config without `layer_types`: convolutions between full and sliding attention."""
    if number % 4 == 2:
        return "full_attention"
    return "sliding_attention" if number % 4 == 0 and number > 0 else "conv"


def _map_lfm3_layers(config: hf.Config, gate: str) -> hf.NameMap:
    """Return the name map, given the name of the gates of attention."""
    if config["use_attention_gate"]:
        attention = hf.prefixed("", "gated_attention", {**llama.ATTENTION_NAMES, gate: "gate"})
    else:
        attention = hf.prefixed("", "attention", llama.ATTENTION_NAMES)
    norms = {"post_operator_norm": "mixer_post_norm", "post_ffn_norm": "ffn_post_norm"}
    return lfm2.map_lfm2_layers(hf.prefixed("", "gated_mlp", mixtral.EXPERT_NAMES), attention, norms)


def _map_lfm3_names(config: hf.Config) -> hf.NameMap:
    return _map_lfm3_layers(config, "gate_proj")


def _map_lfm3_memory_names(config: hf.Config) -> hf.NameMap:
    return _map_lfm3_layers(config, "g_proj")


LFM3 = hf.Family(
    name="lfm3",
    architecture="Lfm3ForCausalLM",
    build=_build_lfm3,
    names=_map_lfm3_names,
    defaults={
        **lfm2.DEFAULTS,
        "vocab_size": 128000,
        "hidden_size": 2048,
        "intermediate_size": 7680,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": hf.optional_count(4),
        "head_dim": hf.optional_count(128),
        "conv_L_cache": 7,
        "sliding_window": hf.optional_non_negative(256),
        "attention_bias": False,
        "use_attention_gate": True,
        "use_sandwich_norm": True,
        "rope_parameters": {
            "sliding_attention": {"rope_theta": 10000.0},
            "full_attention": {"rope_theta": 1000000.0, "rope_type": "proportional", "partial_rotary_factor": 0.5},
        },
    },
    aliases={"norm_eps": "rms_norm_eps"},
    ignored_tensors=llama.LLAMA.ignored_tensors,
    memory_names=_map_lfm3_memory_names,
)

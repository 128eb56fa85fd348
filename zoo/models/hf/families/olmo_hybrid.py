"""OLMo Hybrid (OLMo team, 2026): of four layers three with the gated delta rule (arXiv:2412.06464), after their norms,
and the fourth with attention and QK norm over all heads, before its norms; betas up to 2 (arXiv:2411.12537)."""

from functools import partial
from typing import Any

from jaxtyping import Array, Key

from zoo.layers import AbstractNorm, GroupedGatedDeltaNet, IdentityNorm, RMSNorm
from zoo.models.hf import grammar as hf

from . import llama

_HEAD_NORM_EPSILON = 1e-5
"""Epsilon of the norm of each head's output, whatever the config says."""


def _build_olmo_hybrid(config: hf.Config, *, key: Key[Array, ""]) -> hf.Decoder:
    count = config["num_hidden_layers"]
    local = [number % 4 != 3 for number in range(count)]
    if all(local):
        local[-1] = False
    types = hf.read_layer_types(config, hf.list_layer_types(local, local="linear_attention"))
    rotary = None
    if config["rope_parameters"]["rope_theta"] is not None:
        rotary = hf.build_rotary(config)
    bias = config["attention_bias"]
    qk_norm = partial(RMSNorm, epsilon=config["rms_norm_eps"])
    attention = hf.make_attention_factory(config, bias=bias, out_bias=bias, norm_over_heads=qk_norm, rotary=rotary)
    mixers = hf.pick_mixers(types, {"linear_attention": _make_delta_factory(config), "full_attention": attention})
    ffn = hf.make_gated_mlp_factory(config)
    layers = [(mixer, ffn) for mixer in mixers]
    blocks = [_make_post_norm_block if kind == "full_attention" else hf.Block for kind in types]
    return hf.build_config_decoder(config, layers, hf.make_rms_norm_factory(config), block=blocks, key=key)


def _make_delta_factory(config: hf.Config) -> partial[GroupedGatedDeltaNet]:
    groups = config["linear_num_key_heads"] or config["num_attention_heads"]
    key_dim = config["linear_key_head_dim"] or int(0.75 * config["hidden_size"] / groups)
    return partial(
        GroupedGatedDeltaNet,
        config["hidden_size"],
        config["linear_num_value_heads"] or config["num_attention_heads"],
        groups=groups,
        key_dim=key_dim,
        value_dim=config["linear_value_head_dim"] or 2 * key_dim,
        conv_width=config["linear_conv_kernel_dim"],
        activation=hf.find_activation(config),
        negative_eigenvalues=config["linear_allow_neg_eigval"],
        epsilon=_HEAD_NORM_EPSILON,
        out_scale=hf.compute_out_scale(config),
    )


def _make_post_norm_block(mixer_norm: AbstractNorm, ffn_norm: AbstractNorm, **parts: Any) -> hf.SandwichBlock:
    """Make a block whose norms follow the sublayers. Their paths are not those of the norms of the other layers: files
    call a norm before an MLP in those what they call a norm after attention here."""
    return hf.SandwichBlock(
        mixer_norm=IdentityNorm(), mixer_post_norm=mixer_norm, ffn_norm=IdentityNorm(), ffn_post_norm=ffn_norm, **parts
    )


_DELTA_NAMES: hf.NameMap = {
    "q_proj": "query",
    "k_proj": "key",
    "v_proj": "value",
    "a_proj": "decay.step",
    "b_proj": "rate",
    "g_proj": "readout.gate",
    "dt_bias": "decay.bias",
    "A_log": "decay.A_log",
    "o_norm": "readout.norm",
    "o_proj": "readout.out",
}
_CONVOLUTIONS = ("query_convolution", "key_convolution", "value_convolution")


def _map_olmo_hybrid_layers(first_norm: str, second_norm: str, convolutions: hf.NameMap) -> hf.NameMap:
    """Return the name map, given the names of the norms: `first_norm` only of layers with the delta rule."""
    norms = {
        first_norm: "mixer_norm",
        **hf.either({second_norm: "ffn_norm"}, {second_norm: "mixer_post_norm"}),
        "post_feedforward_layernorm": "ffn_post_norm",
    }
    mixers = {
        **hf.prefixed("linear_attn", "grouped_gated_delta_net", {**_DELTA_NAMES, **convolutions}),
        **hf.prefixed("self_attn", "attention", llama.ATTENTION_NAMES),
    }
    return llama.map_llama_layers(hf.prefixed("mlp", "gated_mlp", llama.GATED_MLP_NAMES), mixers, norms)


def _map_olmo_hybrid_names(config: hf.Config) -> hf.NameMap:
    convolutions = {
        f"{letter}_conv1d": hf.fused(part, conv1d_filters=True)
        for letter, part in zip("qkv", _CONVOLUTIONS, strict=True)
    }
    return _map_olmo_hybrid_layers("attention_layer_norm", "feedforward_layer_norm", convolutions)


def _map_olmo_hybrid_memory_names(config: hf.Config) -> hf.NameMap:
    convolutions = {"conv1d": hf.fused(*_CONVOLUTIONS, conv1d_filters=True)}
    return _map_olmo_hybrid_layers("input_layernorm", "post_attention_layernorm", convolutions)


OLMO_HYBRID = hf.Family(
    name="olmo_hybrid",
    architecture="OlmoHybridForCausalLM",
    build=_build_olmo_hybrid,
    names=_map_olmo_hybrid_names,
    defaults={
        **hf.omit(llama.DEFAULTS, "mlp_bias"),
        "vocab_size": 100352,
        "hidden_size": 3840,
        "num_attention_heads": 30,
        "max_position_embeddings": 65536,
        "layer_types": hf.optional_words(),
        **dict.fromkeys(
            (
                *("linear_num_key_heads", "linear_num_value_heads"),
                *("linear_key_head_dim", "linear_value_head_dim"),
            ),
            hf.optional_count(),
        ),
        "linear_conv_kernel_dim": 4,
        "linear_allow_neg_eigval": True,
    },
    ignored_keys=frozenset(
        {"linear_a_log_min", "linear_a_log_max", "linear_dt_min", "linear_dt_max", "linear_dt_init_floor"}
    ),
    ignored_tensors=llama.LLAMA.ignored_tensors,
    may_lack_rope=True,
    memory_names=_map_olmo_hybrid_memory_names,
    older_endings={  # names in memory, which transformers reads, too
        ".input_layernorm.weight": ".attention_layer_norm.weight",
        ".post_attention_layernorm.weight": ".feedforward_layer_norm.weight",
    },
)

"""Zamba (Glorioso et al., arXiv:2405.16712): layers of Mamba with heads, some of which first call one Transformer layer
that they share. It reads the embedding beside the hidden states."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import equinox as eqx
import jax
from jaxtyping import Array, Key

from zoo.layers import AbstractMixer, Attention, Dropout, GatedMLP, Linear, RMSNorm
from zoo.models.hf import grammar as hf
from zoo.ops.rotary import Rotary
from zoo.parallel import Dim

from . import llama
from .mamba import COUNT_OR_AUTO
from .zamba_layers import LowRankUpdates, MultiHeadMamba, SharedTransformer, SharingBlock


def _build_zamba(config: hf.Config, *, key: Key[Array, ""]) -> hf.Decoder:
    inner = config["mamba_expand"] * config["hidden_size"]
    heads = config["n_mamba_heads"]
    if inner % heads:
        raise hf.ConfigError(
            f"mamba_expand * hidden_size = {inner} does not divide evenly over n_mamba_heads = {heads}"
        )
    rank = config["mamba_dt_rank"]
    if rank == "auto":
        rank = None
    mixer = partial(
        MultiHeadMamba,
        config["hidden_size"],
        heads,
        inner // heads,
        state_dim=config["mamba_d_state"],
        rank=rank,
        conv_width=config["mamba_d_conv"],
        bias=config["mamba_proj_bias"],
        conv_bias=config["mamba_conv_bias"],
        out_scale=config["num_hidden_layers"] ** -0.5,
    )
    return build_zamba_decoder(config, _list_layer_types(config), mixer, key=key)


def _list_layer_types(config: hf.Config) -> list[str]:
    period = config["attn_layer_period"]
    offset = config["attn_layer_offset"]
    hybrid = [False, False, True, *(i % period == offset for i in range(config["num_hidden_layers"] - 3))]
    return read_layer_types(config, ["hybrid" if chosen else "linear_attention" for chosen in hybrid])


def read_layer_types(config: hf.Config, default: Sequence[str]) -> list[str]:
    """Return the type of each layer: `layers_block_type`, in the words of transformers 5, or the default.

    **Raises** `ConfigError` for other words, and unless there is one for each layer.
    """
    given = default if config["layers_block_type"] is None else config["layers_block_type"]
    types = ["linear_attention" if kind == "mamba" else kind for kind in given]
    if unknown := [kind for kind in types if kind not in ("linear_attention", "hybrid")]:
        raise hf.ConfigError(f"layers_block_type has {unknown[0]!r}, and layers here are linear_attention or hybrid")
    if len(types) != config["num_hidden_layers"]:
        raise hf.ConfigError(
            f"layers_block_type names {len(types)} of num_hidden_layers = {config['num_hidden_layers']}"
        )
    return types


def build_zamba_decoder(
    config: hf.Config,
    types: Sequence[str],
    mixer: Callable[..., AbstractMixer],
    *,
    rotary: Rotary | None = None,
    mlp_bias: bool = False,
    blocks: int = 1,
    make_updates: Callable[..., LowRankUpdates] | None = None,
    key: Key[Array, ""],
) -> hf.Decoder:
    """Build a decoder of layers of `mixer`s. Those of type "hybrid" call `blocks` shared Transformer layers in turns.

    `make_updates` is a factory of the updates of one call, called with the shared layer and `key=`.
    """
    embed = config["hidden_size"]
    heads = config["num_attention_heads"]
    kv_heads = config["num_key_value_heads"] or heads
    head_dim = config.get("attention_head_dim") or 2 * embed // heads
    norm = hf.make_rms_norm_factory(config)
    attention = partial(
        Attention, 2 * embed, heads, kv_heads=kv_heads, head_dim=head_dim, rotary=rotary,
        scale=(head_dim / 2) ** -0.5, out_embed=embed,
    )  # fmt: skip
    width = config["intermediate_size"] or 4 * embed
    ffn = partial(GatedMLP, embed, width, activation=hf.find_activation(config), bias=mlp_bias)
    make_shared = partial(SharedTransformer, embed, attention, ffn, partial(RMSNorm, epsilon=config["rms_norm_eps"]))

    def make_block(number: int, key: Key[Array, ""]) -> SharingBlock:
        mixer_key, linear_key, updates_key = jax.random.split(key, 3)
        updates = None
        if make_updates is not None:
            updates = make_updates(eqx.filter_eval_shape(make_shared, key), key=updates_key)
        return SharingBlock(
            shared=hf.SharedModule(number),
            updates=updates,
            linear=Linear(embed, embed, in_=Dim("embed"), out=Dim("embed"), key=linear_key),
            layer=hf.MixerBlock(norm(), mixer(key=mixer_key), Dropout(0.0)),
        )

    callers = list_callers(types)
    blocks = min(blocks, len(callers))
    turns = [partial(make_block, number) for number in range(blocks)]
    layers: list[Any] = [(mixer, None)] * len(types)
    for call, layer in enumerate(callers):
        layers[layer] = turns[call % blocks]
    options = {"layer_inputs": lambda key: hf.EmbeddingInputs(), "shared": [make_shared] * blocks}
    return hf.build_config_decoder(config, layers, norm, key=key, **options)


def list_callers(types: Sequence[str]) -> list[int]:
    """Return the numbers of the layers that call a shared layer."""
    return [layer for layer, kind in enumerate(types) if kind == "hybrid"]


def map_callers(types: Sequence[str], word: str, blocks: int = 1) -> dict[str, str]:
    """Return the names of the shared layers in later layers that call one -> in the first. `word` is the last of the
    name."""
    names = [f"model.layers.{layer}.{word}" for layer in list_callers(types)]
    return {name: names[call % blocks] for call, name in enumerate(names) if call >= blocks}


def map_zamba_names(
    types: Sequence[str], mixer: hf.NameMap, shared: hf.NameMap, word: str, blocks: int = 1
) -> hf.NameMap:
    """Return a name map, given the names of a mixer's and of a shared layer's parameters. Files have a shared layer
    once, as `word` of the first layer that calls it."""
    block = {"input_layernorm": "mixer_norm", **hf.prefixed("mamba", "", mixer)}
    layer = {**block, **hf.prefixed("mamba_decoder", "layer", block), "linear": "linear"}
    shell = {"model.embed_tokens": "embedding", "model.final_layernorm": "norm", "lm_head": "head"}
    rows = {**shell, **hf.prefixed("model.layers.*", "layers.*", layer)}
    for number, caller in enumerate(list_callers(types)[:blocks]):
        rows |= hf.prefixed(f"model.layers.{caller}.{word}", f"shared.{number}", shared)
    return rows


def _map_zamba_names(config: hf.Config) -> hf.NameMap:
    heads = {
        "x_proj_weight": hf.fused("heads.*.dt_down.weight", "heads.*.B.weight", "heads.*.C.weight"),
        "dt_proj_weight": "heads.*.dt_up.weight",
        "dt_proj_bias": "heads.*.dt_bias",
        "A_log": "heads.*.A_log",
        "D": "heads.*.D",
    }
    mixer = {
        "in_proj": hf.fused("x", "gate", groups=config["mamba_expand"] * config["hidden_size"]),
        "conv1d": hf.fused("convolution", conv1d_filters=True),
        **heads,
        "out_proj": "out",
    }
    shared = {**SHARED_NAMES, **hf.prefixed("feed_forward", "gated_mlp", llama.GATED_MLP_NAMES)}
    return map_zamba_names(
        _list_layer_types(config), hf.prefixed("", "multi_head_mamba", mixer), shared, "shared_transf"
    )


def _map_zamba_callers(config: hf.Config) -> Mapping[str, str]:
    return map_callers(_list_layer_types(config), "shared_transf")


SHARED_NAMES: hf.NameMap = {
    "input_layernorm": "mixer_norm",
    "pre_ff_layernorm": "ffn_norm",
    **hf.prefixed("self_attn", "attention", llama.ATTENTION_NAMES),
}

DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 32000,
    "layers_block_type": hf.optional_words(),
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "hidden_act": "gelu",
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
"""Defaults of Zamba and Zamba 2."""
IGNORED_KEYS = frozenset(
    {
        "attention_hidden_size",  # twice hidden_size
        *("time_step_max", "time_step_floor"),  # initialization
        *("use_mamba_kernels", "num_logits_to_keep"),  # implementation
    }
)

ZAMBA = hf.Family(
    name="zamba",
    architecture="ZambaForCausalLM",
    build=_build_zamba,
    names=_map_zamba_names,
    defaults={
        **DEFAULTS,
        "hidden_size": 3712,
        "intermediate_size": 14848,
        "num_hidden_layers": 76,
        "num_attention_heads": 16,
        "num_key_value_heads": hf.optional_count(16),
        "attention_head_dim": hf.optional_count(),
        "attn_layer_period": 6,
        "attn_layer_offset": hf.non_negative(4),
        "n_mamba_heads": 2,
        "mamba_d_state": 16,
        "mamba_dt_rank": hf.Default("auto", COUNT_OR_AUTO),
        "mamba_conv_bias": True,
        "mamba_proj_bias": False,
    },
    required_values={"hidden_mamba_act": ("silu", "swish")},
    ignored_keys=IGNORED_KEYS
    | {
        "max_position_embeddings",  # training length, which no layer reads
        "time_step_min",  # initialization
        "use_associative_scan",  # implementation
    },
    callers=_map_zamba_callers,
)

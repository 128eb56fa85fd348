"""Granite 4 (Granite team, "Granite 4.0", 2025): Mamba-2 in most layers, and attention in a few, often without
positions; Granite's four multipliers; and an MLP for every token, with or without a mixture of experts."""

from typing import Any

from jaxtyping import Array, Key

from zoo.layers import Attention, GatedMLP, Mamba2, MixtureOfExperts, RMSNorm
from zoo.models.hf import grammar as hf

from . import bamba, granite, granitemoe, granitemoeshared, llama
from .mamba2 import write_dt_limits

_POSITIONS = hf.ValueKind("null, rope or nope", lambda value: value in (None, "rope", "nope"))


def _build_granitemoehybrid(config: hf.Config, *, key: Key[Array, ""]) -> hf.Decoder:
    types = hf.read_layer_types(config, ["linear_attention"] * config["num_hidden_layers"])
    if config["position_embedding_type"] == "rope":
        rotary = hf.build_rotary(config)
    else:
        rotary = None
    attention = granite.make_granite_attention_factory(config, rotary=rotary)
    mamba = bamba.make_mamba2_factory(config)
    # in the words of transformers 5 and of older files
    mixers = {"full_attention": attention, "attention": attention, "linear_attention": mamba, "mamba": mamba}
    ffn = granitemoeshared.make_shared_mixture(config)
    return granite.build_granite_layers(config, ffn, hf.pick_mixers(types, mixers), key=key)


def _map_granitemoehybrid_names(config: hf.Config) -> hf.NameMap:
    return _add_hybrid_names(config, granitemoe.map_granitemoe_names(config))


def _map_granitemoehybrid_memory_names(config: hf.Config) -> hf.NameMap:
    return _add_hybrid_names(config, granitemoe.map_granitemoe_memory_names(config))


def _add_hybrid_names(config: hf.Config, names: hf.NameMap) -> hf.NameMap:
    """Add the names of Mamba-2 and of the shared MLP."""
    if config["num_local_experts"]:
        ours = "mixture_of_experts.shared"
    else:
        ours = "gated_mlp"
    block = {**bamba.MAMBA2_NAMES, **hf.prefixed("shared_mlp", ours, granitemoeshared.SHARED_NAMES)}
    return {**names, **hf.prefixed("model.layers.*", "layers.*", block)}


def _describe_granitemoehybrid(model: Any) -> dict[str, Any]:
    """Return the config of a hybrid of Mamba-2 and attention, read off the first layer of each kind.

    **Raises** `ConfigError` for a model without Mamba-2, and for other classes of layers.
    """
    model, blocks = hf.eval_shape_blocks(model)
    for block in blocks:
        hf.check_type("block", block, hf.Block)
        if not isinstance(block.mixer, Attention):
            hf.check_type("mixer", block.mixer, Mamba2)
    first = blocks[0]
    hf.check_type("mixer_norm", first.mixer_norm, RMSNorm)
    mamba = next((block.mixer for block in blocks if isinstance(block.mixer, Mamba2)), None)
    attention = next((block.mixer for block in blocks if isinstance(block.mixer, Attention)), None)
    if mamba is None:
        raise hf.ConfigError("none of its layers is Mamba-2")
    kinds = {Mamba2: "linear_attention", Attention: "full_attention"}
    vocab, embed = model.embedding.table_shape
    return {
        "vocab_size": vocab,
        "hidden_size": embed,
        "num_hidden_layers": len(blocks),
        "layer_types": [kinds[type(block.mixer)] for block in blocks],
        "rms_norm_eps": first.mixer_norm.epsilon,
        "tie_word_embeddings": model.head is None,
        "embedding_multiplier": model.embedding.multiplier,
        "residual_multiplier": first.residual_multiplier,
        "logits_scaling": 1 / model.logits_multiplier,
        **_describe_mamba2(mamba, embed),
        **_describe_attention(attention),
        **_describe_feed_forward(first.ffn),
    }


def _describe_mamba2(mixer: Mamba2, embed: int) -> dict[str, Any]:
    heads = mixer.dt.out_size
    return {
        "mamba_n_heads": heads,
        "mamba_d_head": mixer.head_dim,
        "mamba_n_groups": mixer.B.out_size // mixer.state_dim,
        "mamba_d_state": mixer.state_dim,
        "mamba_d_conv": mixer.x_convolution.width,
        "mamba_expand": heads * mixer.head_dim // embed,
        "mamba_conv_bias": mixer.x_convolution.bias is not None,
        "mamba_proj_bias": hf.has_bias(mixer.out),
        "time_step_limit": write_dt_limits(mixer),
    }


def _describe_attention(mixer: Attention | None) -> dict[str, Any]:
    """Return the keys of attention; of a model without it, those of one head."""
    if mixer is None:
        return {"num_attention_heads": 1}
    config: dict[str, Any] = {
        "num_attention_heads": mixer.query.out_size // mixer.head_dim,
        "num_key_value_heads": mixer.key.out_size // mixer.head_dim,
        "head_dim": mixer.head_dim,
        "attention_bias": hf.has_bias(mixer.query),
        "attention_multiplier": mixer.head_dim**-0.5 if mixer.scale is None else mixer.scale,
    }
    if mixer.rotary is None:
        return config
    rope = hf.describe_rope_parameters(mixer.rotary, mixer.head_dim)
    return config | {"position_embedding_type": "rope", "rope_parameters": rope}


def _describe_feed_forward(ffn: Any) -> dict[str, Any]:
    """Return the keys of a gated MLP, or of a mixture of experts and its shared one.

    **Raises** `ConfigError` for a mixture without a shared expert.
    """
    if not isinstance(ffn, MixtureOfExperts):
        hf.check_type("ffn", ffn, GatedMLP)
        activation = hf.find_activation_name(ffn.activation)
        width = ffn.gate.out_size
        return {"hidden_act": activation, "num_local_experts": 0, "shared_intermediate_size": width}
    experts: Any = ffn.experts
    shared: Any = ffn.shared
    hf.check_type("experts", experts, GatedMLP)
    hf.check_type("shared expert", shared, GatedMLP)
    return {
        "hidden_act": hf.find_activation_name(experts.activation),
        "intermediate_size": experts.gate.out_size,
        "num_local_experts": ffn.router.scores.out_size,
        "num_experts_per_tok": ffn.router.top,
        "shared_intermediate_size": shared.gate.out_size,
    }


GRANITEMOEHYBRID = hf.Family(
    name="granitemoehybrid",
    architecture="GraniteMoeHybridForCausalLM",
    build=_build_granitemoehybrid,
    names=_map_granitemoehybrid_names,
    defaults={
        **granitemoe.DEFAULTS,
        **bamba.MAMBA2_DEFAULTS,
        "num_local_experts": hf.non_negative(8),
        "num_experts_per_tok": hf.non_negative(2),
        "shared_intermediate_size": 1024,
        "layer_types": hf.optional_words(),
        "position_embedding_type": hf.Default(None, _POSITIONS),
    },
    required_values={**bamba.REQUIRED_VALUES, "normalization_function": ("rmsnorm",)},
    ignored_keys=bamba.IGNORED_KEYS | {"init_method"},  # implementation, and initialization
    ignored_tensors=llama.LLAMA.ignored_tensors,
    memory_names=_map_granitemoehybrid_memory_names,
    describe=_describe_granitemoehybrid,
)

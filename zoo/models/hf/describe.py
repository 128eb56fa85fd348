"""Derive the config.json of a model built from scratch: keys of LLaMA-like families and mixtures of experts."""

from typing import Any

import equinox as eqx

from zoo.layers import AbstractLinear, Attention, BiasedRouter, GatedMLP, MixtureOfExperts, RMSNorm, SoftmaxRouter
from zoo.layers.moe.router import AbstractRouter
from zoo.models.decoder import Block, Decoder
from zoo.models.hf.builders import find_activation_name, list_layer_types
from zoo.models.hf.errors import ConfigError
from zoo.ops.rotary import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RopeScaling,
    Rotary,
    YarnScaling,
)


def describe_dense(model: Any) -> dict[str, Any]:
    """Return every config key of a dense LLaMA-like family, read off the first layer. The caller verifies the other
    layers by building a model from the result.

    **Raises** `ConfigError` for other classes of layers.
    """
    model, blocks = eval_shape_blocks(model)
    config = _describe_common(model, blocks)
    ffn = blocks[0].ffn
    check_type("ffn", ffn, GatedMLP)
    return config | {
        "intermediate_size": ffn.gate.out_size,
        "hidden_act": find_activation_name(ffn.activation),
        "mlp_bias": has_bias(ffn.gate),
    }


def describe_mixture(model: Any) -> dict[str, Any]:
    """Return every config key of a family with mixtures of experts, read off its first mixture and first dense layer.

    **Raises** `ConfigError` for a model without a mixture, and for other classes of layers.
    """
    model, blocks = eval_shape_blocks(model)
    config = _describe_common(model, blocks)
    mixer = blocks[0].mixer
    sparse = [isinstance(block, Block) and isinstance(block.ffn, MixtureOfExperts) for block in blocks]
    if not any(sparse):
        raise ConfigError("none of its layers is a mixture of experts")
    mixture = blocks[sparse.index(True)].ffn
    check_type("experts", mixture.experts, GatedMLP)
    dense = next((block.ffn for block, is_sparse in zip(blocks, sparse, strict=True) if not is_sparse), mixture.experts)
    check_type("ffn", dense, GatedMLP)
    router = mixture.router
    width = mixture.experts.gate.out_size
    shared = None
    num_shared = None
    if mixture.shared is not None:
        check_type("shared expert", mixture.shared, GatedMLP)
        shared = mixture.shared.gate.out_size
        num_shared = shared // width
    scale = mixer.head_dim**-0.5 if mixer.scale is None else mixer.scale
    return config | {
        "intermediate_size": dense.gate.out_size,
        "moe_intermediate_size": width,
        "hidden_act": find_activation_name(mixture.experts.activation),
        **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), router.scores.out_size),
        "num_experts_per_tok": router.top,
        **_describe_routing(router),
        "shared_expert_intermediate_size": shared,
        "n_shared_experts": num_shared,
        "mlp_only_layers": [number for number, is_sparse in enumerate(sparse) if not is_sparse],
        "decoder_sparse_step": 1,
        "first_k_dense_replace": sparse.index(True),
        "use_qk_norm": mixer.query_norm is not None,
        "clip_qkv": mixer.clip,
        "embedding_multiplier": model.embedding.multiplier,
        "residual_multiplier": blocks[0].residual_multiplier,
        "attention_multiplier": scale,
        "logits_scaling": 1 / model.logits_multiplier,
    }


def _describe_routing(router: AbstractRouter) -> dict[str, Any]:
    """Return the config keys of top-k routing. A `TopSoftmaxRouter` has no options."""
    if not isinstance(router, SoftmaxRouter | BiasedRouter):
        return {"norm_topk_prob": True, "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1}
    return {
        "norm_topk_prob": router.renormalize,
        "routed_scaling_factor": router.scale,
        "n_group": router.groups,
        "topk_group": router.kept_groups,
    }


def eval_shape_blocks(model: Any) -> tuple[Decoder, tuple[Any, ...]]:
    """Return a decoder and the block of each layer, as trees of shapes. **Raises** `ConfigError` for other models."""
    if not isinstance(model, Decoder):
        raise ConfigError(f"{type(model).__name__} is not a decoder")
    return eqx.filter_eval_shape(lambda model: (model, tuple(model.stack.iter_blocks())), model)


def check_type(name: str, part: Any, expected_type: type) -> None:
    """Check the class of a part. **Raises** `ConfigError` for another one."""
    if not isinstance(part, expected_type):
        raise ConfigError(f"its {name} is {type(part).__name__}, not {expected_type.__name__}")


def has_bias(linear: AbstractLinear) -> bool:
    """Return True if a linear layer has a bias."""
    return getattr(linear, "bias", None) is not None


def _describe_common(model: Decoder, blocks: tuple[Any, ...]) -> dict[str, Any]:
    """Return the config keys that do not depend on the feed-forward layers."""
    first = blocks[0]
    check_type("block", first, Block)
    check_type("mixer", first.mixer, Attention)
    check_type("mixer_norm", first.mixer_norm, RMSNorm)
    mixer = first.mixer
    if mixer.rotary is None:
        raise ConfigError("its attention does not turn queries and keys by their positions")
    vocab, embed = model.embedding.table_shape
    windows = [block.mixer.window if isinstance(block.mixer, Attention) else None for block in blocks]
    window = next((w for w in windows if w is not None), None)
    return {
        "vocab_size": vocab,
        "hidden_size": embed,
        "num_hidden_layers": len(blocks),
        "num_attention_heads": mixer.query.out_size // mixer.head_dim,
        "num_key_value_heads": mixer.key.out_size // mixer.head_dim,
        "head_dim": mixer.head_dim,
        "max_position_embeddings": getattr(mixer.rotary.scaling, "original_length", 2048),
        "rms_norm_eps": first.mixer_norm.epsilon,
        "tie_word_embeddings": model.head is None,
        "rope_parameters": describe_rope_parameters(mixer.rotary, mixer.head_dim),
        **dict.fromkeys(("attention_bias", "qkv_bias"), has_bias(mixer.query)),
        "sliding_window": window,
        "use_sliding_window": window is not None,
        "layer_types": list_layer_types(w is not None for w in windows),
    }


def describe_rope_parameters(rotary: Rotary, head_dim: int) -> dict[str, Any]:
    """Return the `rope_parameters` of rotary embeddings. **Raises** `ConfigError` for a scaling without a name."""
    rope_type, parameters = _describe_rope_scaling(rotary.scaling)
    if rotary.dim == head_dim:
        partial = {}
    else:
        partial = {"partial_rotary_factor": rotary.dim / head_dim}
    parameters = {key: x for key, x in parameters.items() if x is not None}
    lists = {key: list(x) for key, x in parameters.items() if isinstance(x, tuple)}
    return {"rope_type": rope_type, "rope_theta": rotary.base, **partial, **parameters, **lists}


def _describe_rope_scaling(scaling: RopeScaling | None) -> tuple[str, dict[str, Any]]:
    match scaling:
        case None:
            return "default", {}
        case LinearScaling():
            return "linear", {"factor": scaling.factor}
        case DynamicScaling():
            return "dynamic", {"factor": scaling.factor}
        case Llama3Scaling():
            slow = scaling.low_frequency_factor
            fast = scaling.high_frequency_factor
            parameters = {"factor": scaling.factor, "low_freq_factor": slow, "high_freq_factor": fast}
        case YarnScaling():
            names = ("factor", "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate")
            parameters = {name: getattr(scaling, name) for name in names}
        case LongRopeScaling():
            factors = {"short_factor": scaling.short_factors, "long_factor": scaling.long_factors}
            parameters = {**factors, "factor": scaling.factor, "attention_factor": scaling.attention_factor}
        case _:
            raise ConfigError(f"no config has a word for rotary embeddings scaled by {type(scaling).__name__}")
    return type(scaling).__name__.removesuffix("Scaling").lower(), {
        **parameters,
        "original_max_position_embeddings": scaling.original_length,
    }

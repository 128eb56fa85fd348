"""The config of a model that was made from scratch, in the words that the LLaMA line of families shares, mixtures of
experts included."""

from typing import Any

import equinox as eqx

from zoo.layers import Attention, GatedMLP, MixtureOfExperts, RMSNorm
from zoo.models.decoder import Block, Decoder
from zoo.models.hf.builders import find_activation_name
from zoo.models.hf.config import ConfigError
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
    """Every key that a dense family of this line may have, as the first layer shows it. That all layers, and all that
    no key speaks of, are as the family has them is for the caller to compare.

    **Raises** `ConfigError` for layers of another kind.
    """
    model, blocks = eval_shape_blocks(model)
    found, ffn = _describe_common(model, blocks), blocks[0].ffn
    check_type("ffn", ffn, GatedMLP)
    return found | {
        "intermediate_size": ffn.gate.out_size,
        "hidden_act": find_activation_name(ffn.activation),
        "mlp_bias": getattr(ffn.gate, "bias", None) is not None,
    }


def describe_mixture(model: Any) -> dict[str, Any]:
    """The same for families with mixtures of experts, as the first layer that has one shows it; and the width of the
    dense layers, where there are some.

    **Raises** `ConfigError` for a model without a mixture, and for layers of another kind.
    """
    model, blocks = eval_shape_blocks(model)
    found, mixer = _describe_common(model, blocks), blocks[0].mixer
    sparse = [isinstance(getattr(block, "ffn", None), MixtureOfExperts) for block in blocks]
    if not any(sparse):
        raise ConfigError("none of its layers is a mixture of experts")
    mixture = blocks[sparse.index(True)].ffn
    check_type("experts", mixture.experts, GatedMLP)
    dense = next((block.ffn for block, is_sparse in zip(blocks, sparse, strict=True) if not is_sparse), mixture.experts)
    check_type("ffn", dense, GatedMLP)
    router, width = mixture.router, mixture.experts.gate.out_size
    if mixture.shared is not None:
        check_type("shared expert", mixture.shared, GatedMLP)
    shared = None if mixture.shared is None else mixture.shared.gate.out_size
    return found | {
        "intermediate_size": dense.gate.out_size,
        "moe_intermediate_size": width,
        "hidden_act": find_activation_name(mixture.experts.activation),
        **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), router.scores.out_size),
        "num_experts_per_tok": router.top,
        "norm_topk_prob": getattr(router, "renormalize", True),
        "routed_scaling_factor": getattr(router, "scale", 1.0),
        "n_group": getattr(router, "groups", 1),
        "topk_group": getattr(router, "kept_groups", 1),
        "shared_expert_intermediate_size": shared,
        "n_shared_experts": None if shared is None else shared // width,
        "mlp_only_layers": [number for number, is_sparse in enumerate(sparse) if not is_sparse],
        "decoder_sparse_step": 1,
        "first_k_dense_replace": sparse.index(True),
        "use_qk_norm": mixer.query_norm is not None,
        "clip_qkv": mixer.clip,
        "embedding_multiplier": model.embedding.multiplier,
        "residual_multiplier": blocks[0].residual_multiplier,
        "attention_multiplier": mixer.head_dim**-0.5 if mixer.scale is None else mixer.scale,
        "logits_scaling": 1 / model.logits_multiplier,
    }


def eval_shape_blocks(model: Any) -> tuple[Decoder, tuple[Any, ...]]:
    """A model and its layers one by one, in shapes. **Raises** `ConfigError` for what is no decoder."""
    if not isinstance(model, Decoder):
        raise ConfigError(f"a {type(model).__name__} is no decoder")
    return eqx.filter_eval_shape(lambda model: (model, tuple(model.stack.iter_blocks())), model)


def check_type(name: str, part: Any, expected_type: type) -> None:
    """**Raises** `ConfigError` for a part of another kind."""
    if not isinstance(part, expected_type):
        raise ConfigError(f"its {name} is a {type(part).__name__}, not a {expected_type.__name__}")


def _describe_common(model: Decoder, blocks: tuple[Any, ...]) -> dict[str, Any]:
    """What does not depend on the feed-forward part."""
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
    scaling = mixer.rotary.scaling
    return {
        "vocab_size": vocab,
        "hidden_size": embed,
        "num_hidden_layers": len(blocks),
        "num_attention_heads": mixer.query.out_size // mixer.head_dim,
        "num_key_value_heads": mixer.key.out_size // mixer.head_dim,
        "head_dim": mixer.head_dim,
        "max_position_embeddings": getattr(scaling, "original_length", 2048),
        "rms_norm_eps": first.mixer_norm.epsilon,
        "tie_word_embeddings": model.head is None,
        "rope_parameters": _describe_rope_parameters(mixer.rotary, mixer.head_dim),
        **dict.fromkeys(("attention_bias", "qkv_bias"), getattr(mixer.query, "bias", None) is not None),
        "sliding_window": window,
        "use_sliding_window": window is not None,
        "layer_types": ["full_attention" if w is None else "sliding_attention" for w in windows],
    }


def _describe_rope_parameters(rotary: Rotary, head_dim: int) -> dict[str, Any]:
    kind, facts = _describe_rope_scaling(rotary.scaling)
    partial = {} if rotary.dim == head_dim else {"partial_rotary_factor": rotary.dim / head_dim}
    given = {key: list(x) if isinstance(x, tuple) else x for key, x in facts.items() if x is not None}
    return {"rope_type": kind, "rope_theta": rotary.base, **partial, **given}


def _describe_rope_scaling(scaling: RopeScaling | None) -> tuple[str, dict[str, Any]]:
    match scaling:
        case None:
            return "default", {}
        case LinearScaling():
            return "linear", {"factor": scaling.factor}
        case DynamicScaling():
            return "dynamic", {"factor": scaling.factor}
        case Llama3Scaling():
            slow, fast = scaling.low_frequency_factor, scaling.high_frequency_factor
            facts = {"factor": scaling.factor, "low_freq_factor": slow, "high_freq_factor": fast}
        case YarnScaling():
            names = ("factor", "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate")
            facts = {name: getattr(scaling, name) for name in names}
        case LongRopeScaling():
            sets = {"short_factor": scaling.short_factors, "long_factor": scaling.long_factors}
            facts = {**sets, "factor": scaling.factor, "attention_factor": scaling.attention_factor}
        case _:
            raise ConfigError(f"no config has a word for rotary embeddings scaled by {type(scaling).__name__}")
    return type(scaling).__name__.removesuffix("Scaling").lower(), {
        **facts,
        "original_max_position_embeddings": scaling.original_length,
    }

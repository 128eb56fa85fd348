"""The config of a model that was made from scratch, in the words that the LLaMA line of families shares."""

from typing import Any

import equinox as eqx

from zoo.layers import Attention, GatedMLP, RMSNorm
from zoo.models.blocks import Block
from zoo.models.config import ConfigError
from zoo.models.decoder import Decoder
from zoo.models.pieces import word_of
from zoo.ops.rotary import Dynamic, Linear, Llama3, LongRope, Rotary, Scaling, Yarn


def described(model: Any) -> dict[str, Any]:
    """Every key that a family of this line may have, as the first layer shows it. That all layers, and all that no key
    speaks of, are as the family has them is for the caller to compare.

    **Raises** `ConfigError` for layers of another kind.
    """
    if not isinstance(model, Decoder):
        raise ConfigError(f"a {type(model).__name__} is no decoder")
    shapes = eqx.filter_eval_shape(lambda model: (model, tuple(model.stack.one_by_one())), model)
    model, blocks = shapes
    first = blocks[0]
    kinds = {"block": Block, "mixer": Attention, "ffn": GatedMLP, "mixer_norm": RMSNorm}
    found = {"block": first, **{name: getattr(first, name, None) for name in ("mixer", "ffn", "mixer_norm")}}
    for name, kind in kinds.items():
        if not isinstance(found[name], kind):
            raise ConfigError(f"its {name} is a {type(found[name]).__name__}, not a {kind.__name__}")
    mixer, ffn = first.mixer, first.ffn
    if mixer.rotary is None:
        raise ConfigError("its attention does not turn queries and keys by their positions")
    vocab, embed = model.embedding.weight.shape
    windows = [block.mixer.window if isinstance(block.mixer, Attention) else None for block in blocks]
    window = next((w for w in windows if w is not None), None)
    scaling = mixer.rotary.scaling
    return {
        "vocab_size": vocab,
        "hidden_size": embed,
        "intermediate_size": ffn.gate.out_size,
        "num_hidden_layers": len(blocks),
        "num_attention_heads": mixer.query.out_size // mixer.head_dim,
        "num_key_value_heads": mixer.key.out_size // mixer.head_dim,
        "head_dim": mixer.head_dim,
        "hidden_act": word_of(ffn.activation),
        "max_position_embeddings": getattr(scaling, "original_length", 2048),
        "rms_norm_eps": first.mixer_norm.epsilon,
        "tie_word_embeddings": model.head is None,
        "rope_parameters": rope_parameters(mixer.rotary, mixer.head_dim),
        "attention_bias": getattr(mixer.query, "bias", None) is not None,
        "mlp_bias": getattr(ffn.gate, "bias", None) is not None,
        "sliding_window": window,
        "use_sliding_window": window is not None,
        "layer_types": ["full_attention" if w is None else "sliding_attention" for w in windows],
    }


def rope_parameters(rotary: Rotary, head_dim: int) -> dict[str, Any]:
    kind, facts = of_scaling(rotary.scaling)
    partial = {} if rotary.dim == head_dim else {"partial_rotary_factor": rotary.dim / head_dim}
    given = {key: list(x) if isinstance(x, tuple) else x for key, x in facts.items() if x is not None}
    return {"rope_type": kind, "rope_theta": rotary.base, **partial, **given}


def of_scaling(scaling: Scaling | None) -> tuple[str, dict[str, Any]]:
    match scaling:
        case None:
            return "default", {}
        case Linear():
            return "linear", {"factor": scaling.factor}
        case Dynamic():
            return "dynamic", {"factor": scaling.factor}
        case Llama3():
            slow, fast = scaling.low_frequency_factor, scaling.high_frequency_factor
            facts = {"factor": scaling.factor, "low_freq_factor": slow, "high_freq_factor": fast}
        case Yarn():
            names = ("factor", "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate")
            facts = {name: getattr(scaling, name) for name in names}
        case LongRope():
            sets = {"short_factor": scaling.short_factors, "long_factor": scaling.long_factors}
            facts = {**sets, "factor": scaling.factor, "attention_factor": scaling.attention_factor}
        case _:
            raise ConfigError(f"no config has a word for rotary embeddings scaled by {type(scaling).__name__}")
    return type(scaling).__name__.lower(), {**facts, "original_max_position_embeddings": scaling.original_length}

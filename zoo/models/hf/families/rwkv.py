"""RWKV-4 (Peng et al., arXiv:2305.13048): time mixing and channel mixing, both with token shift, and a LayerNorm after
the embedding."""

import functools
from collections.abc import Callable
from functools import partial

from jaxtyping import Array, Key

from zoo.layers import RWKV4, LayerNorm
from zoo.models.hf import grammar as hf

from .rwkv_layers import RWKVChannelMixing, TwoMixerBlock

_COMMON_MIXING_NAMES: hf.NameMap = {
    "key": "key",
    "receptance": "receptance",
    "value": "value",
    "time_mix_key": hf.TensorMapping(("key_mix",), leading_ones=2),
    "time_mix_receptance": hf.TensorMapping(("receptance_mix",), leading_ones=2),
}
_TIME_MIXING_NAMES: hf.NameMap = {
    **_COMMON_MIXING_NAMES,
    "output": "out",
    "time_mix_value": hf.TensorMapping(("value_mix",), leading_ones=2),
    "time_decay": "decay",
    "time_first": "bonus",
}


def _build_rwkv(config: hf.Config, *, key: Key[Array, ""]) -> hf.Decoder:
    norm = hf.make_layer_norm_factory(config)
    embed = config["hidden_size"]
    scale = hf.compute_out_scale(config)
    mixer = partial(RWKV4, embed, inner=config["attention_hidden_size"], out_scale=scale)
    ffn = partial(RWKVChannelMixing, embed, config["intermediate_size"] or 4 * embed, out_scale=scale)
    final_norm = partial(LayerNorm, embed, epsilon=1e-5)  # transformers ignores the config's epsilon here
    blocks = _list_blocks(config["num_hidden_layers"], config["rescale_every"])
    options = {"block": blocks, "embedding_norm": norm, "final_norm": final_norm}
    layers = [(mixer, ffn)] * config["num_hidden_layers"]
    return hf.build_config_decoder(config, layers, norm, hidden_states_skip_embedding=True, key=key, **options)


def _list_blocks(layers: int, every: int) -> list[Callable[..., hf.AbstractBlock]]:
    """Return a factory of the block of each layer: after every so many layers the residual stream is halved, as
    transformers does in evaluation; 0 for never."""
    make = functools.cache(lambda scale, shrink: partial(TwoMixerBlock, residual_multiplier=scale, shrink=shrink))
    every = every or layers + 1
    return [make(0.5 ** (n // every), 0.5 if (n + 1) % every == 0 else 1.0) for n in range(layers)]


def _map_rwkv_names(config: hf.Config) -> hf.NameMap:
    block = {
        "ln1": "mixer_norm",
        "ln2": "ffn_norm",
        **hf.prefixed("attention", "rwkv4", _TIME_MIXING_NAMES),
        **hf.prefixed("feed_forward", "rwkv_channel_mixing", _COMMON_MIXING_NAMES),
    }
    shell = {"embeddings": "embedding", "blocks.0.pre_ln": "embedding_norm", "ln_out": "norm"}
    return {**hf.prefixed("rwkv", "", {**shell, **hf.prefixed("blocks.*", "layers.*", block)}), "head": "head"}


RWKV = hf.Family(
    name="rwkv",
    architecture="RwkvForCausalLM",
    build=_build_rwkv,
    names=_map_rwkv_names,
    defaults={
        "vocab_size": 50277,
        "hidden_size": 4096,
        "attention_hidden_size": hf.optional_count(),
        "intermediate_size": hf.optional_count(),
        "num_hidden_layers": 32,
        "layer_norm_eps": 1e-5,
        "rescale_every": hf.non_negative(6),
        "tie_word_embeddings": False,
    },
    aliases={"layer_norm_epsilon": "layer_norm_eps"},
    required_values={"layer_norm_eps": (None,)},  # transformers does not read this key
    ignored_keys=frozenset(
        {"context_length", "max_position_embeddings"}  # limit of one CUDA kernel, not of the recurrence
    ),
    head="head",
    embedding="rwkv.embeddings",
)

"""Granite, dense (Granite team, "Granite 3.0 Language Models", 2024): LLaMA's layer, and four multipliers: of
embeddings, residuals, attention scores and 1 / logits."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from jaxtyping import Array, Key

from zoo.layers import Attention
from zoo.models.hf import grammar as hf

from . import llama


def _build_granite(config: hf.Config, *, key: Key[Array, ""]) -> hf.Decoder:
    return build_granite_layers(config, hf.make_gated_mlp_factory(config, bias=config["mlp_bias"]), key=key)


def build_granite_layers(
    config: hf.Config,
    ffn: hf.FeedForwardFactory,
    mixers: Sequence[hf.MixerFactory] | None = None,
    *,
    key: Key[Array, ""],
) -> hf.Decoder:
    """Build Granite's layers with this feed-forward layer, and its multipliers. `mixers` has the mixer of each layer,
    attention by default."""
    norm = hf.make_rms_norm_factory(config)
    if config["logits_scaling"] == 0:
        raise hf.ConfigError("logits_scaling = 0: logits are divided by it")
    block: Callable[..., Any] = partial(hf.Block, residual_multiplier=config["residual_multiplier"])
    multipliers = {"multiplier": config["embedding_multiplier"], "logits_multiplier": 1 / config["logits_scaling"]}
    attention: Sequence[hf.MixerFactory] = [make_granite_attention_factory(config)] * config["num_hidden_layers"]
    layers = [(mixer, ffn) for mixer in mixers or attention]
    return hf.build_config_decoder(config, layers, norm, block=block, key=key, **multipliers)


def make_granite_attention_factory(config: hf.Config, **options: Any) -> Callable[..., Attention]:
    """Return a factory of attention with Granite's multiplier of scores, and these options."""
    return hf.make_attention_factory(config, **read_attention_options(config), **options)


def read_attention_options(config: hf.Config) -> dict[str, Any]:
    """Return the options of attention that Granite has: biases, and the multiplier of scores."""
    bias = config["attention_bias"]
    scale = config["attention_multiplier"]
    if scale == hf.read_head_sizes(config)[2] ** -0.5:
        scale = None
    return {"bias": bias, "out_bias": bias, "scale": scale}


MULTIPLIERS = {
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "attention_multiplier": 1.0,
    "logits_scaling": 1.0,
}

GRANITE = hf.Family(
    name="granite",
    architecture="GraniteForCausalLM",
    build=_build_granite,
    names=llama.map_llama_names,
    defaults={**llama.DEFAULTS, **MULTIPLIERS},
    ignored_tensors=llama.LLAMA.ignored_tensors,
)

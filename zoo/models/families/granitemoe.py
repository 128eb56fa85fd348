"""Granite's mixture of experts (Granite team, "Granite 3.0 Language Models", 2024): LLaMA's attention, a softmax over
the experts chosen, and four multipliers: of embeddings, of residuals, of scores and, as a divisor, of logits."""

from functools import partial

from jaxtyping import Array, Key

from zoo.layers import TopSoftmaxRouter
from zoo.models.assemble import layer
from zoo.models.blocks import Block
from zoo.models.config import ConfigError
from zoo.models.decoder import Decoder
from zoo.models.facts import Config, Family, Table, fused, under
from zoo.models.pieces import attention, decoder, heads, mixture, rms_norm

from . import llama
from .describe import described_mixture


def build(config: Config, *, key: Key[Array, ""]) -> Decoder:
    norm, bias, scale = rms_norm(config), config["attention_bias"], config["attention_multiplier"]
    if config["logits_scaling"] == 0:
        raise ConfigError("logits_scaling = 0: logits are divided by it")
    mixer = attention(config, bias=bias, out_bias=bias, scale=None if scale == heads(config)[2] ** -0.5 else scale)
    experts = mixture(config, TopSoftmaxRouter, config["num_local_experts"])
    block = partial(Block, residual_multiplier=config["residual_multiplier"])
    kinds = [layer(block, norm=norm, mixer=mixer, ffn=experts)] * config["num_hidden_layers"]
    multipliers = {"multiplier": config["embedding_multiplier"], "logits_multiplier": 1 / config["logits_scaling"]}
    return decoder(config, kinds, norm, key=key, **multipliers)


def names(config: Config) -> Table:
    fusion = fused("experts.gate", "experts.up")  # of all experts in one
    mixture = {"router.layer": "router.scores", "input_linear": fusion, "output_linear": "experts.down"}
    return llama.named(under("block_sparse_moe", "mixture_of_experts", mixture))


def live_names(config: Config) -> Table:
    mixture = {"router": "router.scores", **under("experts", "experts.*", llama.TOGETHER)}
    return llama.named(under("block_sparse_moe", "mixture_of_experts", mixture))


GRANITEMOE = Family(
    name="granitemoe",
    architecture="GraniteMoeForCausalLM",
    build=build,
    names=names,
    defaults={
        **{key: value for key, value in llama.DEFAULTS.items() if key != "mlp_bias"},
        "embedding_multiplier": 1.0,
        "residual_multiplier": 1.0,
        "attention_multiplier": 1.0,
        "logits_scaling": 1.0,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    ignored=llama.LLAMA.ignored,
    live_names=live_names,
    describe=described_mixture,
)

"""Mixtral (Jiang et al., arXiv:2401.04088): Mistral's layer, its feed-forward part a mixture of experts whose weights
add up to one."""

from jaxtyping import Array, Key

from zoo.layers import SoftmaxRouter
from zoo.models.assemble import layer
from zoo.models.blocks import Block
from zoo.models.decoder import Decoder
from zoo.models.facts import Config, Family, Table, under
from zoo.models.pieces import attention, decoder, mixture, rms_norm

from . import llama, mistral
from .describe import described_mixture

EXPERT: Table = {"w1": "gate", "w3": "up", "w2": "down"}


def build(config: Config, *, key: Key[Array, ""]) -> Decoder:
    norm, mixer = rms_norm(config), attention(config, window=config["sliding_window"])
    block = layer(Block, norm=norm, mixer=mixer, ffn=mixture(config, SoftmaxRouter, config["num_experts"]))
    return decoder(config, [block] * config["num_hidden_layers"], norm, key=key)


def names(config: Config) -> Table:
    mixture = {"gate": "router.scores", **under("experts.*", "experts.*", EXPERT)}
    return llama.named(under("block_sparse_moe", "mixture_of_experts", mixture))


def live_names(config: Config) -> Table:
    mixture = {"gate": "router.scores", **under("experts", "experts.*", llama.TOGETHER)}
    return llama.named(under("mlp", "mixture_of_experts", mixture))


MIXTRAL = Family(
    name="mixtral",
    architecture="MixtralForCausalLM",
    build=build,
    names=names,
    defaults={
        **mistral.DEFAULTS,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_theta": 1000000.0},
        "sliding_window": None,
        "num_experts": 8,
        "num_experts_per_tok": 2,
    },
    aliases={"num_local_experts": "num_experts"},
    only=mistral.MISTRAL.only,
    ignored=llama.LLAMA.ignored,
    live_names=live_names,
    describe=described_mixture,
)

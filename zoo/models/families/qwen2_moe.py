"""Qwen1.5-MoE and Qwen2's mixture of experts (Yang et al., arXiv:2407.10671, section 2.2.2): many narrow experts, and a
wide one that every token uses, multiplied by a gate of its own; dense layers between where a config asks for them."""

from functools import partial

from jaxtyping import Array, Key

from zoo.layers import SoftmaxRouter
from zoo.models.config import ConfigError
from zoo.models.decoder import Decoder
from zoo.models.facts import Config, Family, Table, under
from zoo.models.pieces import layer_types, mixture, sparse_decoder, windows

from . import llama, qwen2


def build(config: Config, *, key: Key[Array, ""]) -> Decoder:
    window, upper = config["sliding_window"] if config["use_sliding_window"] else None, config["max_window_layers"]
    local = lambda number: window is not None and number < upper and number % 2 == 0
    usual = ["sliding_attention" if local(n) else "full_attention" for n in range(config["num_hidden_layers"])]
    experts = mixture(
        config,
        partial(SoftmaxRouter, renormalise=config["norm_topk_prob"]),
        config["num_experts"],
        width=config["moe_intermediate_size"],
        shared=config["shared_expert_intermediate_size"],
        gate=True,
    )
    seen = windows(layer_types(config, usual), window)
    return sparse_decoder(config, sparse(config), experts, windows=seen, bias=config["qkv_bias"], key=key)


def sparse(config: Config) -> list[bool]:
    """Which layers are mixtures: every `decoder_sparse_step`-th, without those of `mlp_only_layers`.

    **Raises** `ConfigError` where these are no list of numbers.
    """
    dense, step = config["mlp_only_layers"], config["decoder_sparse_step"]
    if dense is not None and not (isinstance(dense, list) and all(type(number) is int for number in dense)):
        raise ConfigError(f"mlp_only_layers = {dense!r} should be a list of the numbers of layers")
    return [n not in (dense or ()) and (n + 1) % step == 0 for n in range(config["num_hidden_layers"])]


MIXTURE: Table = {
    "gate": "router.scores",
    "shared_expert_gate": "shared_gate",
    **under("shared_expert", "shared", llama.GATED),
}


def names(config: Config) -> Table:
    return named({**MIXTURE, **under("experts.*", "experts.*", llama.GATED)})


def live_names(config: Config) -> Table:
    return named({**MIXTURE, **under("experts", "experts.*", llama.TOGETHER)})


def named(mixture: Table) -> Table:
    """Of dense layers and of mixtures, both called `mlp`."""
    return llama.named({**under("mlp", "gated_mlp", llama.GATED), **under("mlp", "mixture_of_experts", mixture)})


DEFAULTS = {
    **qwen2.DEFAULTS,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "moe_intermediate_size": 1408,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "norm_topk_prob": False,
    "decoder_sparse_step": 1,
    "mlp_only_layers": None,
}

QWEN2_MOE = Family(
    name="qwen2_moe",
    architecture="Qwen2MoeForCausalLM",
    build=build,
    names=names,
    defaults={**DEFAULTS, "shared_expert_intermediate_size": 5632, "qkv_bias": True},
    only=qwen2.QWEN2.only,
    ignored=llama.LLAMA.ignored,
    live_names=live_names,
)

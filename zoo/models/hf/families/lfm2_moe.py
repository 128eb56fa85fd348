"""LFM2's mixture of experts (Liquid AI, arXiv:2511.23404): LFM2's layers with experts after dense layers, routed by
sigmoid scores and a selection bias."""

from functools import partial

from jaxtyping import Array, Key

from zoo.layers import BiasedRouter, SigmoidRouter
from zoo.models.decoder import Decoder
from zoo.models.hf.builders import (
    build_config_decoder,
    make_gated_mlp_factory,
    make_mixture_factory,
    make_rms_norm_factory,
)
from zoo.models.hf.kinds import Default, non_negative
from zoo.models.hf.spec import Config, Family, NameMap, prefixed
from zoo.models.hf.values import POSITIVE_NUMBER

from . import lfm2, llama, mixtral


def _build_lfm2_moe(config: Config, *, key: Key[Array, ""]) -> Decoder:
    dense = make_gated_mlp_factory(config)
    scale = config["routed_scaling_factor"]
    router_class = BiasedRouter if config["use_expert_bias"] else SigmoidRouter
    router = partial(router_class, renormalize=config["norm_topk_prob"], scale=scale, smallest=1e-6)
    sparse = make_mixture_factory(config, router, config["num_experts"], width=config["moe_intermediate_size"])
    mixers = lfm2.list_lfm2_mixers(config, ["full_attention"] * config["num_hidden_layers"])
    layers = [(mixer, dense if n < config["num_dense_layers"] else sparse) for n, mixer in enumerate(mixers)]
    return build_config_decoder(config, layers, make_rms_norm_factory(config), key=key)


def _map_lfm2_moe_layers(experts: NameMap) -> NameMap:
    mixture = {"gate": "router.scores", "expert_bias": "router.selection_bias", **experts}
    dense = prefixed("", "gated_mlp", mixtral.EXPERT_NAMES)
    return lfm2.map_lfm2_layers({**dense, **prefixed("", "mixture_of_experts", mixture)})


def _map_lfm2_moe_names(config: Config) -> NameMap:
    return _map_lfm2_moe_layers(prefixed("experts.*", "experts.*", mixtral.EXPERT_NAMES))


def _map_lfm2_moe_memory_names(config: Config) -> NameMap:
    return _map_lfm2_moe_layers(prefixed("experts", "experts.*", llama.FUSED_EXPERT_NAMES))


LFM2_MOE = Family(
    name="lfm2_moe",
    architecture="Lfm2MoeForCausalLM",
    build=_build_lfm2_moe,
    names=_map_lfm2_moe_names,
    defaults={
        **lfm2.DEFAULTS,
        "hidden_size": 2048,
        "intermediate_size": 7168,
        "moe_intermediate_size": 1792,
        "num_dense_layers": non_negative(2),
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "norm_topk_prob": True,
        "use_expert_bias": True,
        "routed_scaling_factor": Default(1.0, POSITIVE_NUMBER),
    },
    aliases=lfm2.ALIASES,
    ignored_tensors=llama.LLAMA.ignored_tensors,
    memory_names=_map_lfm2_moe_memory_names,
)

"""LFM2's mixture of experts (Liquid AI, arXiv:2511.23404): LFM2's layers with experts after dense layers, routed by
sigmoid scores and a selection bias."""

from functools import partial

from jaxtyping import Array, Key

from zoo.layers import BiasedRouter, SigmoidRouter
from zoo.models.hf import grammar as hf

from . import lfm2, llama, mixtral


def _build_lfm2_moe(config: hf.Config, *, key: Key[Array, ""]) -> hf.Decoder:
    dense = hf.make_gated_mlp_factory(config)
    scale = config["routed_scaling_factor"]
    router_class = BiasedRouter if config["use_expert_bias"] else SigmoidRouter
    router = partial(router_class, renormalize=config["norm_topk_prob"], scale=scale, smallest=1e-6)
    sparse = hf.make_mixture_factory(config, router, config["num_experts"], width=config["moe_intermediate_size"])
    mixers = lfm2.list_lfm2_mixers(config, ["full_attention"] * config["num_hidden_layers"])
    layers = [(mixer, dense if n < config["num_dense_layers"] else sparse) for n, mixer in enumerate(mixers)]
    return hf.build_config_decoder(config, layers, hf.make_rms_norm_factory(config), key=key)


def _map_lfm2_moe_layers(experts: hf.NameMap) -> hf.NameMap:
    mixture = {"gate": "router.scores", "expert_bias": "router.selection_bias", **experts}
    dense = hf.prefixed("", "gated_mlp", mixtral.EXPERT_NAMES)
    return lfm2.map_lfm2_layers({**dense, **hf.prefixed("", "mixture_of_experts", mixture)})


def _map_lfm2_moe_names(config: hf.Config) -> hf.NameMap:
    return _map_lfm2_moe_layers(hf.prefixed("experts.*", "experts.*", mixtral.EXPERT_NAMES))


def _map_lfm2_moe_memory_names(config: hf.Config) -> hf.NameMap:
    return _map_lfm2_moe_layers(hf.prefixed("experts", "experts.*", llama.FUSED_EXPERT_NAMES))


LFM2_MOE = hf.Family(
    name="lfm2_moe",
    architecture="Lfm2MoeForCausalLM",
    build=_build_lfm2_moe,
    names=_map_lfm2_moe_names,
    defaults={
        **lfm2.DEFAULTS,
        "hidden_size": 2048,
        "intermediate_size": 7168,
        "moe_intermediate_size": 1792,
        "num_dense_layers": hf.non_negative(2),
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "norm_topk_prob": True,
        "use_expert_bias": True,
        "routed_scaling_factor": hf.Default(1.0, hf.POSITIVE_NUMBER),
    },
    aliases=lfm2.ALIASES,
    ignored_tensors=llama.LLAMA.ignored_tensors,
    memory_names=_map_lfm2_moe_memory_names,
)

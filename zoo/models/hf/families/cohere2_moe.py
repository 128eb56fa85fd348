"""Command A+ (Cohere, 2026): Command A's parallel layer with a mixture of experts, after dense layers if there are any;
routed experts are averaged with a shared one, or added to it."""

from functools import partial
from typing import Any

from jaxtyping import Array, Key

from zoo.layers import MixtureOfExperts, SigmoidRouter, TopSoftmaxRouter
from zoo.models.hf import grammar as hf

from . import cohere, dots1, llama


def _build_cohere2_moe(config: hf.Config, *, key: Key[Array, ""]) -> hf.Decoder:
    bias = config["attention_bias"]
    is_sparse = dots1.mark_dots1_moe_layers(config)
    windows = hf.list_layer_windows(hf.read_layer_types(config, _list_default_types(config)), config["sliding_window"])
    turns_dense = config["prefix_dense_sliding_window_pattern"] == 1
    turned = [
        window is not None or (turns_dense and not sparse) for window, sparse in zip(windows, is_sparse, strict=True)
    ]
    rotary = hf.build_rotary(config, interleaved=True)
    rotaries = [rotary if turns else None for turns in turned]
    mixers = hf.make_layerwise_attention_factories(config, windows, rotaries, bias=bias, out_bias=bias)
    dense = hf.make_gated_mlp_factory(config, width=config["prefix_dense_intermediate_size"])
    experts = _make_experts_factory(config)
    layers = [(mixer, experts if sparse else dense) for mixer, sparse in zip(mixers, is_sparse, strict=True)]
    if config["rms_norm_eps"] is None:
        norm: Any = hf.make_layer_norm_factory(config, bias=False)
    else:
        norm = hf.make_rms_norm_factory(config)
    scale = config["logit_scale"]
    return hf.build_config_decoder(config, layers, norm, block=hf.make_one_norm_block, logits_multiplier=scale, key=key)


def _list_default_types(config: hf.Config) -> list[str]:
    """Return the default types of layers: of a pattern n every n-th layer attends to all tokens. Dense layers have a
    pattern of their own."""
    dense = config["first_k_dense_replace"]
    counts = {
        "prefix_dense_sliding_window_pattern": dense,
        "sliding_window_pattern": config["num_hidden_layers"] - dense,
    }
    return hf.list_layer_types((n + 1) % config[key] for key, count in counts.items() for n in range(count))


def _make_experts_factory(config: hf.Config) -> hf.FeedForwardFactory:
    """Return a factory of the mixture of experts. **Raises** `ConfigError` for another routing or combination."""
    routers = {
        "softmax": TopSoftmaxRouter,
        "sigmoid": partial(SigmoidRouter, renormalize=config["norm_topk_prob"]),
    }
    multipliers = {"average": 0.5, "sum": 1.0}
    routing = config["expert_selection_fn"]
    if routing not in routers:
        raise hf.ConfigError(f"expert_selection_fn = {routing!r} should be {' or '.join(routers)}")
    combination = config["shared_expert_combination_strategy"]
    if combination not in multipliers:
        raise hf.ConfigError(
            f"shared_expert_combination_strategy = {combination!r} should be {' or '.join(multipliers)}"
        )
    options: dict[str, Any] = {}
    if config["num_shared_experts"]:
        options["shared"] = config["num_shared_experts"] * config["intermediate_size"]
        options["mixture"] = partial(MixtureOfExperts, multiplier=multipliers[combination])
    return hf.make_mixture_factory(config, routers[routing], config["num_experts"], **options)


def _map_cohere2_moe_layers(experts: hf.NameMap) -> hf.NameMap:
    mixture = {"gate": "router.scores", **hf.prefixed("shared_experts", "shared", llama.GATED_MLP_NAMES), **experts}
    feed_forward = {
        **hf.prefixed("mlp", "gated_mlp", llama.GATED_MLP_NAMES),
        **hf.prefixed("mlp", "mixture_of_experts", mixture),
    }
    return llama.map_llama_layers(feed_forward, norms={"input_layernorm": "mixer_norm"})


def _map_cohere2_moe_names(config: hf.Config) -> hf.NameMap:
    return _map_cohere2_moe_layers(hf.prefixed("experts.*", "experts.*", llama.GATED_MLP_NAMES))


def _map_cohere2_moe_memory_names(config: hf.Config) -> hf.NameMap:
    return _map_cohere2_moe_layers(hf.prefixed("experts", "experts.*", llama.FUSED_EXPERT_NAMES))


COHERE2_MOE = hf.Family(
    name="cohere2_moe",
    architecture="Cohere2MoeForCausalLM",
    build=_build_cohere2_moe,
    names=_map_cohere2_moe_names,
    defaults={
        **cohere.DEFAULTS,
        "head_dim": hf.optional_count(128),
        "rms_norm_eps": hf.Default(None, hf.optional(hf.NON_NEGATIVE_NUMBER)),
        "rope_parameters": {"rope_theta": 10000.0},
        "sliding_window": hf.optional_non_negative(4096),
        "sliding_window_pattern": 4,
        "prefix_dense_sliding_window_pattern": 1,
        "prefix_dense_intermediate_size": hf.optional_count(),
        "layer_types": hf.optional_words(),
        "mlp_layer_types": hf.optional_words(),
        "first_k_dense_replace": hf.non_negative(0),
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "num_shared_experts": hf.non_negative(0),
        "shared_expert_combination_strategy": "average",
        "expert_selection_fn": "softmax",
        "norm_topk_prob": True,
    },
    ignored_tensors=llama.LLAMA.ignored_tensors,
    memory_names=_map_cohere2_moe_memory_names,
)

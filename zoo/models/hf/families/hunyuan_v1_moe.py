"""Hunyuan's mixtures of experts (Tencent, "Hunyuan-A13B", 2025): the dense models' attention, with experts routed by
renormalized softmax scores and a shared expert."""

from jaxtyping import Array, Key

from zoo.layers import SoftmaxRouter
from zoo.models.hf import grammar as hf

from . import hunyuan_v1_dense, llama


def _build_hunyuan_v1_moe(config: hf.Config, *, key: Key[Array, ""]) -> hf.Decoder:
    tops = config["moe_topk"]
    count = config["num_hidden_layers"]
    width = config["intermediate_size"]
    if not isinstance(tops, list | tuple):
        tops = [tops] * count
    if len(tops) != count:
        raise hf.ConfigError(f"moe_topk has {len(tops)} entries, for {count} layers")
    mixtures = {}
    for top in dict.fromkeys(tops):
        own = hf.Config(config, num_experts_per_tok=top)
        mixtures[top] = hf.make_mixture_factory(own, SoftmaxRouter, config["num_experts"], shared=width)
    mixer = hunyuan_v1_dense.make_hunyuan_mixer(config)
    layers = [(mixer, mixtures[top]) for top in tops]
    return hf.build_config_decoder(config, layers, hf.make_rms_norm_factory(config), key=key)


def _map_hunyuan_v1_moe_layers(experts: hf.NameMap) -> hf.NameMap:
    mixture = {"gate.wg": "router.scores", **hf.prefixed("shared_mlp", "shared", llama.GATED_MLP_NAMES), **experts}
    return hunyuan_v1_dense.map_hunyuan_layers(hf.prefixed("mlp", "mixture_of_experts", mixture))


HUNYUAN_V1_MOE = hf.Family(
    name="hunyuan_v1_moe",
    architecture="HunYuanMoEV1ForCausalLM",
    build=_build_hunyuan_v1_moe,
    names=lambda config: _map_hunyuan_v1_moe_layers(hf.prefixed("experts.*", "experts.*", llama.GATED_MLP_NAMES)),
    defaults={**hunyuan_v1_dense.DEFAULTS, "num_experts": 1, "moe_topk": hf.Default(1, hf.COUNT_PER_LAYER)},
    aliases={"num_experts_per_tok": "moe_topk", "num_local_experts": "num_experts"},
    required_values={
        **hunyuan_v1_dense.REQUIRED_VALUES,
        "norm_topk_prob": (True,),
        "moe_layer_num_skipped": (0,),
        **dict.fromkeys(("group_limited_greedy", "moe_drop_tokens", "moe_random_routing_dropped_token"), (False,)),
    },
    # the shapes of the tensors tell the widths of experts
    ignored_keys=hunyuan_v1_dense.IGNORED_KEYS | {"moe_intermediate_size", "num_shared_expert"},
    ignored_tensors=llama.LLAMA.ignored_tensors,
    memory_names=lambda config: _map_hunyuan_v1_moe_layers(
        hf.prefixed("experts", "experts.*", llama.FUSED_EXPERT_NAMES)
    ),
    rope_keys=hunyuan_v1_dense.ROPE_KEYS,
)

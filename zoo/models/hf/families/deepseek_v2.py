"""DeepSeek-V2 (arXiv:2405.04434): multi-head latent attention; a few dense layers, then mixtures of fine-grained
experts with shared experts, which are one wide expert here."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from jaxtyping import Array, Key

from zoo.layers import AbstractFeedForward, SoftmaxRouter
from zoo.layers.moe.router import AbstractRouter
from zoo.models.hf import grammar as hf

from . import dots1, llama


def _build_deepseek_v2(config: hf.Config, *, key: Key[Array, ""]) -> hf.Decoder:
    if config["num_experts_per_tok"] is None:
        raise hf.ConfigError("num_experts_per_tok has to be given: the family has no usual value for it")
    config = hf.Config(config, **_read_expert_groups(config))
    groups = {"groups": config["n_group"], "kept_groups": config["topk_group"]}
    router = partial(SoftmaxRouter, renormalize=False, scale=config["routed_scaling_factor"], **groups)
    mixers = [hf.make_latent_attention_factory(config, interleaved=True)] * config["num_hidden_layers"]
    return build_latent_decoder(config, router, mixers=mixers, mlp_bias=config["mlp_bias"], key=key)


def _read_expert_groups(config: hf.Config) -> dict[str, int]:
    """Return `n_group` and `topk_group`; 1 for "greedy", which ignores them.

    **Raises** `ConfigError` for another `topk_method`, and if it needs them and they are missing.
    """
    method = config["topk_method"]
    groups = {key: config[key] for key in ("n_group", "topk_group")}
    if method == "greedy":
        return dict.fromkeys(groups, 1)
    if method != "group_limited_greedy":
        raise hf.ConfigError(f"topk_method = {method!r}, and 'greedy' and 'group_limited_greedy' are computed here")
    if missing := [key for key, value in groups.items() if value is None]:
        raise hf.ConfigError(f"topk_method = {method!r} needs {' and '.join(missing)}")
    return groups


def build_latent_decoder(
    config: hf.Config,
    router: Callable[..., AbstractRouter],
    *,
    mixers: Sequence[hf.MixerFactory],
    mlp_bias: bool = False,
    expert: Callable[..., AbstractFeedForward] | None = None,
    key: Key[Array, ""],
    **options: Any,
) -> hf.Decoder:
    """Build a decoder with latent attention, by one factory for each layer: dense layers first, then mixtures of
    experts with this router, of gated MLPs unless a factory of an `expert` is given. `options` are passed to
    `build_decoder`."""
    norm = hf.make_rms_norm_factory(config)
    dense = hf.make_gated_mlp_factory(config, bias=mlp_bias)
    width = config["moe_intermediate_size"]
    shared = hf.make_gated_mlp_factory(config, width=config["n_shared_experts"] * width, bias=mlp_bias)
    mixture = hf.make_mixture_factory(config, router, config["n_routed_experts"], width=width, expert=expert)
    sparse = partial(mixture, shared=shared)
    kinds = zip(mixers, dots1.mark_dots1_moe_layers(config), strict=True)
    layers = [(mixer, sparse if is_sparse else dense) for mixer, is_sparse in kinds]
    return hf.build_config_decoder(config, layers, norm, key=key, **options)


def map_deepseek_v2_names(config: hf.Config) -> hf.NameMap:
    """Return the name map of files, with one tensor per expert."""
    return map_latent_layers(FILE_EXPERT_NAMES, hf.prefixed("self_attn", "latent_attention", map_latent_names(config)))


def map_deepseek_v2_memory_names(config: hf.Config) -> hf.NameMap:
    """Return the name map in memory, with all experts of a layer in one tensor."""
    return map_latent_layers(
        MEMORY_EXPERT_NAMES, hf.prefixed("self_attn", "latent_attention", map_latent_names(config))
    )


FILE_EXPERT_NAMES = hf.prefixed("experts.*", "experts.*", llama.GATED_MLP_NAMES)
MEMORY_EXPERT_NAMES = hf.prefixed("experts", "experts.*", llama.FUSED_EXPERT_NAMES)


def map_latent_names(config: hf.Config) -> hf.NameMap:
    """Return the name map of the projections of latent attention."""
    return {
        "q_proj": "query",
        "q_a_proj": "query_down",
        "q_a_layernorm": "query_norm",
        "q_b_proj": "query_up",
        "kv_a_proj_with_mqa": hf.fused("latent", "rotary_key"),
        "kv_a_layernorm": "latent_norm",
        "kv_b_proj": hf.fused("key_up", "value_up", groups=config["num_attention_heads"]),
        "o_proj": "out",
    }


def map_latent_layers(
    experts: hf.NameMap, attention: hf.NameMap, norms: hf.NameMap = llama.PRE_NORM_NAMES
) -> hf.NameMap:
    """Return the name map of a model, from the name maps of the experts and of the attention of a layer, and of its
    norms if they are others."""
    mixture = hf.prefixed("mlp", "mixture_of_experts", {**dots1.MIXTURE_NAMES, **experts})
    feed_forward = {**hf.prefixed("mlp", "gated_mlp", llama.GATED_MLP_NAMES), **mixture}
    return llama.map_llama_layers(feed_forward, attention, norms)


DEFAULTS = {
    **hf.omit(dots1.DEFAULTS, "norm_topk_prob"),
    "kv_lora_rank": 512,
    "q_lora_rank": hf.optional_count(1536),
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
IGNORED_KEYS = frozenset({"aux_loss_alpha", "seq_aux", "ep_size", "qk_head_dim"})
"""Keys of files on the hub that change no result: training, expert parallelism, and the sum of two other keys."""

DEEPSEEK_V2 = hf.Family(
    name="deepseek_v2",
    architecture="DeepseekV2ForCausalLM",
    build=_build_deepseek_v2,
    names=map_deepseek_v2_names,
    defaults={
        **DEFAULTS,
        "vocab_size": 102400,
        "intermediate_size": 11008,
        "mlp_bias": False,
        "moe_intermediate_size": 1407,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": hf.optional_count(),
        "topk_method": "greedy",
        "n_group": hf.optional_count(),
        "topk_group": hf.optional_count(),
    },
    aliases={"num_experts": "n_routed_experts"},
    required_values={"moe_layer_freq": (1,), "scoring_func": ("softmax",)},
    ignored_keys=IGNORED_KEYS | {"norm_topk_prob"},  # transformers does not renormalize, whatever it says
    ignored_tensors=llama.LLAMA.ignored_tensors,
    memory_names=map_deepseek_v2_memory_names,
)

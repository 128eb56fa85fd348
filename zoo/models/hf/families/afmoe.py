"""AFMoE (Arcee AI, "Trinity", 2025): gated attention with QK norm, of four layers three with a sliding window and RoPE
and the fourth with neither; norms before and after each sublayer; a mixture of experts routed by sigmoid scores and a
selection bias, after dense layers."""

from jaxtyping import Array, Key

from zoo.layers import GatedAttention
from zoo.models.hf import grammar as hf

from . import llama


def _build_afmoe(config: hf.Config, *, key: Key[Array, ""]) -> hf.Decoder:
    width = config["moe_intermediate_size"]
    norm = hf.make_rms_norm_factory(config)
    bias = config["attention_bias"]
    default = hf.list_patterned_types(hf.Config(config, sliding_window_pattern=config["global_attn_every_n_layers"]))
    types = hf.read_layer_types(config, default)
    rotary = hf.build_rotary(config)
    windows = hf.list_layer_windows(types, config["sliding_window"])
    rotaries = [rotary if kind == "sliding_attention" else None for kind in types]
    options = {"qk_norm": hf.make_head_norm_factory(config), "bias": bias, "out_bias": bias}
    mixers = hf.make_layerwise_attention_factories(config, windows, rotaries, attention=GatedAttention, **options)
    router = hf.make_biased_router_factory(hf.Config(config, n_group=1, topk_group=1, norm_topk_prob=True))
    shared = config["num_shared_experts"] * width
    sparse = hf.make_mixture_factory(config, router, config["num_experts"], width=width, shared=shared)
    dense = hf.make_gated_mlp_factory(config)
    layers = [(mixer, dense if n < config["num_dense_layers"] else sparse) for n, mixer in enumerate(mixers)]
    multiplier = config["hidden_size"] ** 0.5 if config["mup_enabled"] else 1.0
    block = hf.make_sandwich_block(norm)
    return hf.build_config_decoder(config, layers, norm, block=block, multiplier=multiplier, key=key)


def _map_afmoe_layers(experts: hf.NameMap) -> hf.NameMap:
    norms = {
        "input_layernorm": "mixer_norm",
        "post_attention_layernorm": "mixer_post_norm",
        "pre_mlp_layernorm": "ffn_norm",
        "post_mlp_layernorm": "ffn_post_norm",
    }
    attention = hf.prefixed("self_attn", "gated_attention", {**llama.ATTENTION_NAMES, "gate_proj": "gate"})
    mixture = {
        "router.gate": "router.scores",
        "expert_bias": "router.selection_bias",
        **hf.prefixed("shared_experts", "shared", llama.GATED_MLP_NAMES),
        **experts,
    }
    feed_forward = {
        **hf.prefixed("mlp", "gated_mlp", llama.GATED_MLP_NAMES),
        **hf.prefixed("mlp", "mixture_of_experts", mixture),
    }
    return llama.map_llama_layers(feed_forward, attention, norms)


def _map_afmoe_names(config: hf.Config) -> hf.NameMap:
    return _map_afmoe_layers(hf.prefixed("experts.*", "experts.*", llama.GATED_MLP_NAMES))


def _map_afmoe_memory_names(config: hf.Config) -> hf.NameMap:
    return _map_afmoe_layers(hf.prefixed("experts", "experts.*", llama.FUSED_EXPERT_NAMES))


AFMOE = hf.Family(
    name="afmoe",
    architecture="AfmoeForCausalLM",
    build=_build_afmoe,
    names=_map_afmoe_names,
    defaults={
        **hf.omit(llama.DEFAULTS, "mlp_bias"),
        "vocab_size": 200192,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_attention_heads": 16,
        "head_dim": hf.optional_count(128),
        "max_position_embeddings": 16384,
        "rms_norm_eps": 1e-5,
        "sliding_window": hf.optional_non_negative(1024),
        "global_attn_every_n_layers": 4,
        "layer_types": hf.optional_words(),
        "num_dense_layers": hf.non_negative(1),
        "moe_intermediate_size": 1408,
        "num_experts": 64,
        "num_experts_per_tok": 6,
        "num_shared_experts": 2,
        "routed_scaling_factor": hf.Default(1.0, hf.POSITIVE_NUMBER),
        "mup_enabled": False,
    },
    aliases={"route_scale": "routed_scaling_factor"},
    ignored_tensors=llama.LLAMA.ignored_tensors,
    memory_names=_map_afmoe_memory_names,
)

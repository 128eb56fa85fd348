"""Ling 3 (Ant Group, 2026): Kimi Delta Attention with bounded decays (arXiv:2510.26692) in most layers, and at the end
of each group of layers latent attention with RoPE and a gate per head; a mixture of experts after dense layers, routed
as DeepSeek-V3's. Modules of multi-token prediction are not read."""

from functools import partial

from jaxtyping import Array, Key

from zoo.layers import KimiDeltaAttention
from zoo.models.hf import grammar as hf

from . import deepseek_v2, deepseek_v3, dots1, kimi_linear, llama, qwen2_moe


def _build_bailing_hybrid(config: hf.Config, *, key: Key[Array, ""]) -> hf.Decoder:
    delta = partial(
        KimiDeltaAttention,
        config["hidden_size"],
        config["linear_num_heads"] or config["num_attention_heads"],
        key_dim=config["linear_head_dim"] or config["head_dim"],
        conv_width=config["linear_conv_kernel_dim"],
        rank="full",
        lower_bound=config["kda_lower_bound"] if config["kda_safe_gate"] else None,
        epsilon=config["rms_norm_eps"],
        out_scale=hf.compute_out_scale(config),
    )
    attention = hf.make_latent_attention_factory(hf.Config(config, head_dim=None), interleaved=True, gate=True)
    size = config["layer_group_size"]
    count = config["num_hidden_layers"]
    default = hf.list_layer_types(((n + 1) % size for n in range(count)), local="linear_attention")
    types = hf.read_layer_types(config, default)
    mixers = hf.pick_mixers(types, {"linear_attention": delta, "full_attention": attention})
    return deepseek_v2.build_latent_decoder(config, hf.make_biased_router_factory(config), mixers=mixers, key=key)


_DELTA_NAMES: hf.NameMap = {
    **kimi_linear.PROJECTION_NAMES,
    "g_proj": "readout.gate",
    "o_norm": "readout.norm",
}
_DECAY_NAMES: hf.NameMap = {"f_proj": "decay.step", "dt_bias": "decay.bias", "A_log": "decay.A_log"}


def _map_mixers(config: hf.Config, out: str, delta: hf.NameMap) -> hf.NameMap:
    """Return the name map of both mixers, given the name of their output projections, and further names of the delta
    rule."""
    latent = {name: ours for name, ours in deepseek_v2.map_latent_names(config).items() if name != "o_proj"}
    attention = hf.prefixed("", "latent_attention", {**latent, "g_proj": "gate", out: "out"})
    recurrent = hf.prefixed("", "kimi_delta_attention", {**_DELTA_NAMES, **delta, out: "readout.out"})
    return hf.either(attention, recurrent)


def _map_bailing_names(config: hf.Config) -> hf.NameMap:
    mixture = {
        "gate": "router.scores",
        "gate.expert_bias": "router.selection_bias",
        **hf.prefixed("shared_experts", "shared", llama.GATED_MLP_NAMES),
        **deepseek_v2.FILE_EXPERT_NAMES,
    }
    mixers = _map_mixers(config, "dense", {**_DECAY_NAMES, **kimi_linear.CONVOLUTION_NAMES})
    block = {
        **llama.PRE_NORM_NAMES,
        **hf.prefixed("attention", "", mixers),
        **qwen2_moe.name_qwen2_moe_feed_forward(mixture),
    }
    shell = {"model.word_embeddings": "embedding", "model.norm": "norm", "lm_head": "head"}
    return {**shell, **hf.prefixed("model.layers.*", "layers.*", block)}


def _map_bailing_memory_names(config: hf.Config) -> hf.NameMap:
    mixture = {**dots1.MIXTURE_NAMES, **deepseek_v2.MEMORY_EXPERT_NAMES}
    delta = {**hf.prefixed("forget_gate", "", _DECAY_NAMES), **kimi_linear.FUSED_CONVOLUTION_NAMES}
    mixers = hf.prefixed("self_attn", "", _map_mixers(config, "o_proj", delta))
    return llama.map_llama_layers(qwen2_moe.name_qwen2_moe_feed_forward(mixture), mixers)


BAILING_HYBRID = hf.Family(
    name="bailing_hybrid",
    architecture="BailingHybridForCausalLM",
    build=_build_bailing_hybrid,
    names=_map_bailing_names,
    defaults={
        **hf.omit(kimi_linear.DEFAULTS, "linear_attn_config"),
        "vocab_size": 157184,
        "hidden_size": 2560,
        "intermediate_size": 6144,
        "num_hidden_layers": 42,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 6000000.0},
        "head_dim": hf.optional_count(128),
        "linear_head_dim": hf.optional_count(),
        "linear_num_heads": hf.optional_count(),
        "layer_group_size": 6,
        "kda_safe_gate": True,
        "kda_lower_bound": hf.Default(
            -5.0, hf.ValueKind("a number below 0", lambda value: hf.NUMBER.fits(value) and value < 0)
        ),
        "first_k_dense_replace": hf.non_negative(2),
        "moe_intermediate_size": 768,
        "n_routed_experts": 512,
        "n_group": 8,
        "topk_group": 4,
        "routed_scaling_factor": hf.Default(2.5, hf.POSITIVE_NUMBER),
    },
    aliases={
        **kimi_linear.KIMI_LINEAR.aliases,
        "model_max_length": "max_position_embeddings",
        "short_conv_kernel_size": "linear_conv_kernel_dim",
    },
    required_values={"hidden_act": ("silu",)},
    ignored_keys=frozenset({"qk_head_dim", "num_nextn_predict_layers", "num_mtp_layers", "mtp_loss_scaling_factor"}),
    ignored_tensors=llama.LLAMA.ignored_tensors,
    memory_names=_map_bailing_memory_names,
    find_ignored_tensors=deepseek_v3.find_mtp_tensors,
    embedding="model.word_embeddings",
)

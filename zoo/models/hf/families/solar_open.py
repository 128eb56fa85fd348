"""Solar Open (Upstage, arXiv:2601.07022): LLaMA's attention, and DeepSeek-V3's mixture of experts in every layer."""

from jaxtyping import Array, Key

from zoo.models.hf import grammar as hf

from . import deepseek_v3, dots1, llama


def _build_solar_open(config: hf.Config, *, key: Key[Array, ""]) -> hf.Decoder:
    width = config["moe_intermediate_size"]
    shared = config["n_shared_experts"] * width
    config = hf.Config(config, intermediate_size=width)  # of dense layers, and there are none
    router = hf.make_biased_router_factory(config)
    experts = hf.make_mixture_factory(config, router, config["n_routed_experts"], width=width, shared=shared)
    sparse = [True] * config["num_hidden_layers"]
    return hf.build_moe_decoder(config, sparse, experts, bias=config["attention_bias"], key=key)


SOLAR_OPEN = hf.Family(
    name="solar_open",
    architecture="SolarOpenForCausalLM",
    build=_build_solar_open,
    names=dots1.map_dots1_names,
    defaults={
        **hf.omit(llama.DEFAULTS, "mlp_bias", "intermediate_size"),
        "vocab_size": 196608,
        "num_hidden_layers": 48,
        "num_attention_heads": 64,
        "num_key_value_heads": hf.optional_count(8),
        "head_dim": hf.optional_count(128),
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_theta": 1000000.0},
        "moe_intermediate_size": 1280,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": hf.Default(1.0, hf.POSITIVE_NUMBER),
    },
    aliases={"num_local_experts": "n_routed_experts"},
    required_values={"first_k_dense_replace": (0,), "use_qk_norm": (False,)},
    ignored_keys=frozenset({"intermediate_size", "num_nextn_predict_layers"}),
    ignored_tensors=llama.LLAMA.ignored_tensors,
    find_ignored_tensors=deepseek_v3.find_mtp_tensors,
    memory_names=dots1.map_dots1_memory_names,
)

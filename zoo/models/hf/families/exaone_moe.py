"""K-EXAONE (LG AI Research, arXiv:2601.01739): EXAONE 4.0's attention in pre-norm layers, with DeepSeek-V3's mixture of
experts after a dense layer. Multi-token prediction modules (MTP) are not read."""

from jaxtyping import Array, Key

from zoo.models.hf import grammar as hf

from . import dots1, exaone4, llama, qwen2_moe


def _build_exaone_moe(config: hf.Config, *, key: Key[Array, ""]) -> hf.Decoder:
    width = config["moe_intermediate_size"]
    norm = hf.make_rms_norm_factory(config)
    router = hf.make_biased_router_factory(config)
    shared = config["num_shared_experts"] * width
    sparse = hf.make_mixture_factory(config, router, config["num_experts"], width=width, shared=shared)
    dense = hf.make_gated_mlp_factory(config)
    mixers = exaone4.make_exaone4_mixers(config)
    ffns = [sparse if is_sparse else dense for is_sparse in dots1.mark_dots1_moe_layers(config)]
    return hf.build_config_decoder(config, list(zip(mixers, ffns, strict=True)), norm, key=key)


def _map_exaone_moe_names(config: hf.Config) -> hf.NameMap:
    mixture = {
        **{key: value for key, value in dots1.MIXTURE_NAMES.items() if not key.startswith("gate.e_score")},
        "e_score_correction_bias": "router.selection_bias",
        **hf.prefixed("experts.*", "experts.*", llama.GATED_MLP_NAMES),
    }
    return qwen2_moe.map_qwen2_moe_layers(mixture)


EXAONE_MOE = hf.Family(
    name="exaone_moe",
    architecture="ExaoneMoeForCausalLM",
    build=_build_exaone_moe,
    names=_map_exaone_moe_names,
    defaults={
        **exaone4.DEFAULTS,
        "mlp_layer_types": hf.optional_words(),
        "first_k_dense_replace": hf.non_negative(1),
        "moe_intermediate_size": 1024,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "num_shared_experts": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": hf.Default(2.5, hf.POSITIVE_NUMBER),
        "n_group": 1,
        "topk_group": 1,
    },
    ignored_keys=frozenset({"num_nextn_predict_layers"}),
    ignored_tensors=llama.LLAMA.ignored_tensors,
    other_modules=(r"^mtp\.",),
    memory_names=dots1.map_dots1_memory_names,
)

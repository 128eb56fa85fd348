"""K-EXAONE (LG AI Research, arXiv:2601.01739): EXAONE 4.0's attention in pre-norm layers, with DeepSeek-V3's mixture of
experts after a dense layer. Multi-token prediction modules (MTP) are not read."""

from jaxtyping import Array, Key

from zoo.models.decoder import Decoder
from zoo.models.hf.builders import (
    build_config_decoder,
    make_biased_router_factory,
    make_gated_mlp_factory,
    make_mixture_factory,
    make_rms_norm_factory,
)
from zoo.models.hf.kinds import Default, non_negative, optional_words
from zoo.models.hf.spec import Config, Family, NameMap, prefixed
from zoo.models.hf.values import POSITIVE_NUMBER

from . import dots1, exaone4, llama, qwen2_moe


def _build_exaone_moe(config: Config, *, key: Key[Array, ""]) -> Decoder:
    width = config["moe_intermediate_size"]
    norm = make_rms_norm_factory(config)
    router = make_biased_router_factory(config)
    shared = config["num_shared_experts"] * width
    sparse = make_mixture_factory(config, router, config["num_experts"], width=width, shared=shared)
    dense = make_gated_mlp_factory(config)
    mixers = exaone4.make_exaone4_mixers(config)
    ffns = [sparse if is_sparse else dense for is_sparse in dots1.mark_dots1_moe_layers(config)]
    return build_config_decoder(config, list(zip(mixers, ffns, strict=True)), norm, key=key)


def _map_exaone_moe_names(config: Config) -> NameMap:
    mixture = {
        **{key: value for key, value in dots1.MIXTURE_NAMES.items() if not key.startswith("gate.e_score")},
        "e_score_correction_bias": "router.selection_bias",
        **prefixed("experts.*", "experts.*", llama.GATED_MLP_NAMES),
    }
    return qwen2_moe.map_qwen2_moe_layers(mixture)


EXAONE_MOE = Family(
    name="exaone_moe",
    architecture="ExaoneMoeForCausalLM",
    build=_build_exaone_moe,
    names=_map_exaone_moe_names,
    defaults={
        **exaone4.DEFAULTS,
        "mlp_layer_types": optional_words(),
        "first_k_dense_replace": non_negative(1),
        "moe_intermediate_size": 1024,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "num_shared_experts": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": Default(2.5, POSITIVE_NUMBER),
        "n_group": 1,
        "topk_group": 1,
    },
    ignored_keys=frozenset({"num_nextn_predict_layers"}),
    ignored_tensors=llama.LLAMA.ignored_tensors,
    other_modules=(r"^mtp\.",),
    memory_names=dots1.map_dots1_memory_names,
)

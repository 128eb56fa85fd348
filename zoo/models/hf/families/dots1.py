"""dots.llm1 (Huo et al., arXiv:2506.05767): Qwen3's attention with DeepSeek-V3's mixture of experts, routed by sigmoid
scores and a selection bias."""

from jaxtyping import Array, Key

from zoo.models.hf import grammar as hf

from . import llama, qwen2_moe


def _build_dots1(config: hf.Config, *, key: Key[Array, ""]) -> hf.Decoder:
    layers = config["num_hidden_layers"]
    bias = config["attention_bias"]
    window = config["sliding_window"]
    for required in ("n_routed_experts", "n_shared_experts", "num_experts_per_tok"):
        if config[required] is None:
            raise hf.ConfigError(f"{required} has to be given: the family has no usual value for it")
    default = hf.list_layer_types(window is not None and n >= config["max_window_layers"] for n in range(layers))
    experts = hf.make_mixture_factory(
        config,
        hf.make_biased_router_factory(config),
        config["n_routed_experts"],
        width=config["moe_intermediate_size"],
        shared=config["n_shared_experts"] * config["moe_intermediate_size"],
    )
    options = {"qk_norm": hf.make_head_norm_factory(config), "bias": bias, "out_bias": bias}
    windows = hf.list_layer_windows(hf.read_layer_types(config, default), window)
    return hf.build_moe_decoder(config, mark_dots1_moe_layers(config), experts, windows=windows, key=key, **options)


def mark_dots1_moe_layers(config: hf.Config) -> list[bool]:
    """Return True per layer that is a mixture of experts: as `mlp_layer_types` says, or those from
    `first_k_dense_replace` on."""
    if (types := config.get("mlp_layer_types")) is not None:
        if len(types) != config["num_hidden_layers"] or not set(types) <= {"dense", "sparse"}:
            raise hf.ConfigError(
                f"mlp_layer_types should say dense or sparse for all {config['num_hidden_layers']} layers"
            )
        return [kind == "sparse" for kind in types]
    return [number >= config["first_k_dense_replace"] for number in range(config["num_hidden_layers"])]


MIXTURE_NAMES: hf.NameMap = {
    "gate": "router.scores",
    "gate.e_score_correction_bias": "router.selection_bias",
    **hf.prefixed("shared_experts", "shared", llama.GATED_MLP_NAMES),
}


def map_dots1_names(config: hf.Config) -> hf.NameMap:
    """Return the name map of files, with one tensor per expert."""
    return qwen2_moe.map_qwen2_moe_layers(
        {**MIXTURE_NAMES, **hf.prefixed("experts.*", "experts.*", llama.GATED_MLP_NAMES)}
    )


def map_dots1_memory_names(config: hf.Config) -> hf.NameMap:
    """Return the name map in memory, with all experts of a layer in one tensor."""
    return qwen2_moe.map_qwen2_moe_layers(
        {**MIXTURE_NAMES, **hf.prefixed("experts", "experts.*", llama.FUSED_EXPERT_NAMES)}
    )


DEFAULTS = {
    **hf.omit(llama.DEFAULTS, "mlp_bias"),
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": False,
    "routed_scaling_factor": hf.Default(1.0, hf.POSITIVE_NUMBER),
    "first_k_dense_replace": hf.non_negative(0),
}

DOTS1 = hf.Family(
    name="dots1",
    architecture="Dots1ForCausalLM",
    build=_build_dots1,
    names=map_dots1_names,
    defaults={
        **DEFAULTS,
        "vocab_size": 152064,
        "hidden_size": 4608,
        "num_hidden_layers": 62,
        "num_key_value_heads": hf.optional_count(32),
        "n_routed_experts": hf.optional_count(),
        "n_shared_experts": hf.optional_count(),
        "num_experts_per_tok": hf.optional_count(),
        "sliding_window": hf.optional_non_negative(4096),
        "max_window_layers": hf.Default(62, hf.integer()),
        "layer_types": hf.optional_words(),
    },
    aliases={"num_local_experts": "n_routed_experts"},
    required_values={"moe_layer_freq": (1,)},
    ignored_keys=frozenset({"scoring_func", "topk_method"}),  # transformers implements one of each, whatever they say
    ignored_tensors=llama.LLAMA.ignored_tensors,
    memory_names=map_dots1_memory_names,
    describe=hf.describe_mixture,
)

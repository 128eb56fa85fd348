"""dots.llm1 (Huo et al., arXiv:2506.05767): Qwen3's attention with DeepSeek-V3's mixture of experts, whose router
chooses by sigmoid scores and a bias that no gradient moves."""

from jaxtyping import Array, Key

from zoo.models.config import ConfigError
from zoo.models.decoder import Decoder
from zoo.models.facts import Config, Family, Table, under
from zoo.models.pieces import biased_router, head_norm, layer_types, mixture, sparse_decoder, windows

from . import llama, qwen2_moe
from .describe import described_mixture


def build(config: Config, *, key: Key[Array, ""]) -> Decoder:
    layers, bias, window = config["num_hidden_layers"], config["attention_bias"], config["sliding_window"]
    for needed in ("n_routed_experts", "n_shared_experts", "num_experts_per_tok"):
        if config[needed] is None:
            raise ConfigError(f"{needed} has to be given: the family has no usual value for it")
    local = lambda number: window is not None and number >= config["max_window_layers"]
    usual = ["sliding_attention" if local(number) else "full_attention" for number in range(layers)]
    experts = mixture(
        config,
        biased_router(config),
        config["n_routed_experts"],
        width=config["moe_intermediate_size"],
        shared=config["n_shared_experts"] * config["moe_intermediate_size"],
    )
    options = {"qk_norm": head_norm(config), "bias": bias, "out_bias": bias}
    seen = windows(layer_types(config, usual), window)
    return sparse_decoder(config, sparse(config), experts, windows=seen, key=key, **options)


def sparse(config: Config) -> list[bool]:
    """Which layers are mixtures: all from number `first_k_dense_replace` on."""
    return [number >= config["first_k_dense_replace"] for number in range(config["num_hidden_layers"])]


MIXTURE: Table = {
    "gate": "router.scores",
    "gate.e_score_correction_bias": "router.selection_bias",
    **under("shared_experts", "shared", llama.GATED),
}


def names(config: Config) -> Table:
    return qwen2_moe.named({**MIXTURE, **under("experts.*", "experts.*", llama.GATED)})


def live_names(config: Config) -> Table:
    return qwen2_moe.named({**MIXTURE, **under("experts", "experts.*", llama.TOGETHER)})


DEFAULTS = {
    **{key: value for key, value in llama.DEFAULTS.items() if key != "mlp_bias"},
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "first_k_dense_replace": 0,
}

DOTS1 = Family(
    name="dots1",
    architecture="Dots1ForCausalLM",
    build=build,
    names=names,
    defaults={
        **DEFAULTS,
        "vocab_size": 152064,
        "hidden_size": 4608,
        "num_hidden_layers": 62,
        "num_key_value_heads": 32,
        "n_routed_experts": None,
        "n_shared_experts": None,
        "num_experts_per_tok": None,
        "sliding_window": 4096,
        "max_window_layers": 62,
        "layer_types": None,
    },
    aliases={"num_local_experts": "n_routed_experts"},
    only={"moe_layer_freq": (1,)},
    inert=frozenset({"scoring_func", "topk_method"}),  # there is one of each, whatever they say
    ignored=llama.LLAMA.ignored,
    live_names=live_names,
    describe=described_mixture,
)

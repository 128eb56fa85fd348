"""ERNIE 4.5's mixture of experts (Baidu, "ERNIE 4.5 Technical Report", 2025): LLaMA's layer with an interleaved
rotation, a router that chooses by softmax scores and a bias, and experts that every token uses."""

from functools import partial

from jaxtyping import Array, Key

from zoo.layers import BiasedRouter
from zoo.models.config import ConfigError
from zoo.models.decoder import Decoder
from zoo.models.facts import Config, Family, Row, Table, under
from zoo.models.pieces import mixture, rotary, sparse_decoder

from . import llama, qwen2_moe

SMALLEST = 1e-12
"""What the sum of a token's weights is at least, before they are divided by it."""


def build(config: Config, *, key: Key[Array, ""]) -> Decoder:
    width, shared = config["moe_intermediate_size"], config["moe_num_shared_experts"]
    experts = mixture(
        config,
        partial(BiasedRouter, score="softmax", smallest=SMALLEST),
        config["num_experts"],
        width=width,
        shared=shared * width if shared else None,
    )
    return sparse_decoder(config, sparse(config), experts, rotary=rotary(config, interleaved=True), key=key)


def sparse(config: Config) -> list[bool]:
    """Which layers are mixtures: every `moe_layer_interval`-th from `moe_layer_start_index` to `moe_layer_end_index`,
    that one included; -1 is the last."""
    layers, step = config["num_hidden_layers"], config["moe_layer_interval"]
    first, last = config["moe_layer_start_index"], config["moe_layer_end_index"]
    if not -1 <= last <= layers:
        raise ConfigError(f"moe_layer_end_index = {last} should be the number of a layer, or -1 for the last")
    last = layers - 1 if last == -1 else last
    return [(number + 1) % step == 0 and first <= number <= last for number in range(layers)]


def mixture_names(bias: str) -> Table:
    return {
        "gate": "router.scores",
        bias: Row(("router.selection_bias",), ones=1),
        **under("shared_experts", "shared", llama.GATED),
    }


def names(config: Config) -> Table:
    mixture = mixture_names("moe_statics.e_score_correction_bias")
    return qwen2_moe.named({**mixture, **under("experts.*", "experts.*", llama.GATED)})


def live_names(config: Config) -> Table:
    mixture = mixture_names("gate.moe_statics.e_score_correction_bias")
    return qwen2_moe.named({**mixture, **under("experts", "experts.*", llama.TOGETHER)})


ERNIE4_5_MOE = Family(
    name="ernie4_5_moe",
    architecture="Ernie4_5_MoeForCausalLM",
    build=build,
    names=names,
    defaults={
        **{key: value for key, value in llama.DEFAULTS.items() if key not in ("attention_bias", "mlp_bias")},
        "vocab_size": 103424,
        "hidden_size": 2560,
        "intermediate_size": 12288,
        "num_hidden_layers": 28,
        "num_attention_heads": 20,
        "num_key_value_heads": 4,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_theta": 500000.0},
        "moe_intermediate_size": 1536,
        "num_experts": 64,
        "num_experts_per_tok": 6,
        "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": -1,
        "moe_layer_interval": 1,
    },
    aliases={"moe_num_experts": "num_experts", "moe_k": "num_experts_per_tok"},
    only={"use_bias": (False,), "moe_norm_min": (SMALLEST,), "moe_gate": ("topk",), "moe_use_aux_free": (True,)},
    inert=frozenset({"moe_capacity", "num_nextn_predict_layers"}),
    ignored=(*llama.LLAMA.ignored, r"^model\.mtp_"),
    live_names=live_names,
)

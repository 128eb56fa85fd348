"""OLMoE (Muennighoff et al., arXiv:2409.02060): many narrow experts, norms over all heads' queries and keys together,
and values of all three clipped where a config asks for it."""

from functools import partial

from jaxtyping import Array, Key

from zoo.layers import RMSNorm, SoftmaxRouter
from zoo.models.config import ConfigError, plain
from zoo.models.decoder import Decoder
from zoo.models.facts import Config, Family
from zoo.models.pieces import mixture, sparse_decoder

from . import llama, qwen2_moe


def build(config: Config, *, key: Key[Array, ""]) -> Decoder:
    bias, clip = config["attention_bias"], config["clip_qkv"]
    if clip is not None and not plain(clip):
        raise ConfigError(f"clip_qkv = {clip!r} should be a number above 0")
    experts = mixture(config, partial(SoftmaxRouter, renormalise=config["norm_topk_prob"]), config["num_experts"])
    norm = partial(RMSNorm, epsilon=config["rms_norm_eps"])
    options = {"whole_norm": norm, "clip": clip, "bias": bias, "out_bias": bias}
    return sparse_decoder(config, [True] * config["num_hidden_layers"], experts, key=key, **options)


OTHERS = ("head_dim", "mlp_bias")

OLMOE = Family(
    name="olmoe",
    architecture="OlmoeForCausalLM",
    build=build,
    names=qwen2_moe.names,
    defaults={
        **{key: value for key, value in llama.DEFAULTS.items() if key not in OTHERS},
        "vocab_size": 50304,
        "hidden_size": 2048,
        "intermediate_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
        "clip_qkv": None,
    },
    aliases={"num_local_experts": "num_experts"},
    only={"sliding_window": (None,)},
    ignored=llama.LLAMA.ignored,
    live_names=qwen2_moe.live_names,
)

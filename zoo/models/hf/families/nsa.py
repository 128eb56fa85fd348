"""Native sparse attention (NSA; Yuan et al., arXiv:2502.11089) as flash-linear-attention stores it: blocks compressed
to their means, and the first, own and previous block always selected."""

from collections.abc import Callable
from typing import Any

from zoo.layers import NativeSparseAttention
from zoo.models.hf import grammar as hf

from . import gated_deltanet, llama


def _make_nsa_factory(config: hf.Config) -> Callable[..., NativeSparseAttention]:
    if config["block_counts"] < 3:
        raise hf.ConfigError(f"block_counts = {config['block_counts']} should be at least 3, the blocks always chosen")
    return gated_deltanet.make_fla_attention_factory(
        gated_deltanet.name_heads(config),
        attention=NativeSparseAttention,
        block=config["block_size"],
        top=config["block_counts"],
        window=config["window_size"],
        average=True,
        keep_ends=True,
    )


def _describe_nsa(mixer: NativeSparseAttention) -> dict[str, Any]:
    blocks = {"block_size": mixer.block, "block_counts": mixer.top, "window_size": mixer.window}
    return gated_deltanet.describe_heads(mixer.attention) | blocks


NSA = gated_deltanet.make_fla_family(
    "nsa",
    "NSAForCausalLM",
    NativeSparseAttention,
    factory=_make_nsa_factory,
    names=lambda config: {**hf.prefixed("", "attention", llama.ATTENTION_NAMES), "g_proj": "gate"},
    describe=_describe_nsa,
    defaults={
        **gated_deltanet.ATTENTION_DEFAULTS,
        "num_heads": 64,
        "num_kv_heads": hf.optional_count(4),
        "head_dim": 32,
        "block_size": 64,
        "block_counts": 16,
        "window_size": 512,
        "rope_theta": hf.Default(10000.0, hf.POSITIVE_NUMBER),
    },
    ignored={"elementwise_affine"},  # no layer reads it
)

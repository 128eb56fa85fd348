"""Mixture of block attention (MoBA; Lu et al., arXiv:2502.13189) as flash-linear-attention stores it: each head has a
norm. fla's cached decoding attends to all blocks, and ours to the chosen ones."""

from collections.abc import Callable
from functools import partial
from typing import Any

from zoo.layers import MixtureOfBlockAttention, RMSNorm
from zoo.models.hf import grammar as hf
from zoo.parallel import Dim

from . import gated_deltanet, llama


def _make_moba_factory(config: hf.Config) -> Callable[..., MixtureOfBlockAttention]:
    sizes = gated_deltanet.name_heads(config)
    heads, kv_heads, head_dim = hf.read_head_sizes(sizes)
    if kv_heads != heads:
        raise hf.ConfigError(f"num_kv_heads = {kv_heads}: fla's kernels have a key for each of num_heads = {heads}")
    qk_norm = partial(RMSNorm, head_dim, features=Dim("head_dim"), epsilon=1e-5)
    return gated_deltanet.make_fla_attention_factory(
        sizes,
        attention=MixtureOfBlockAttention,
        qk_norm=qk_norm if config["qk_norm"] else None,
        block=config["moba_chunk_size"],
        top=config["moba_topk"],
        norm=partial(RMSNorm, epsilon=1e-6),
    )


def _describe_moba(mixer: MixtureOfBlockAttention) -> dict[str, Any]:
    blocks = {"moba_chunk_size": mixer.block, "moba_topk": mixer.top}
    return gated_deltanet.describe_heads(mixer.attention) | blocks


MOBA = gated_deltanet.make_fla_family(
    "moba",
    "MoBAForCausalLM",
    MixtureOfBlockAttention,
    factory=_make_moba_factory,
    names=lambda config: {**hf.prefixed("", "attention", llama.ATTENTION_NAMES), "o_norm": "norm"},
    describe=_describe_moba,
    defaults={
        **gated_deltanet.ATTENTION_DEFAULTS,
        "qk_norm": False,
        "rope_theta": hf.Default(10000.0, hf.POSITIVE_NUMBER),
        "moba_chunk_size": 256,
        "moba_topk": 4,
    },
    required={"window_size": (None,), "use_output_gate": (False,)},  # fla has the window in its cache only
    ignored={"elementwise_affine", "use_flash_moba"},  # no layer reads the first, and the second is a kernel
)

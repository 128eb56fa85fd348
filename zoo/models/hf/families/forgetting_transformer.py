"""FoX, the Forgetting Transformer (Lin et al., arXiv:2503.02130), as flash-linear-attention stores it: a forget gate
for each query head, and no RoPE."""

from collections.abc import Callable

from zoo.layers import ForgettingAttention
from zoo.layers.recurrent.common import HeadNorm
from zoo.models.hf import grammar as hf
from zoo.parallel import Dim

from . import gated_deltanet, llama


def _make_forgetting_transformer_factory(config: hf.Config) -> Callable[..., ForgettingAttention]:
    return hf.make_attention_factory(
        gated_deltanet.name_heads(config),
        attention=ForgettingAttention,
        rotary=None,
        norm_over_heads=_make_group_norm if config["qk_norm"] else None,
        bias=config["qkv_bias"],
        gate=config["use_output_gate"],
        gate_per_head=True,
    )


def _make_group_norm(size: int, *, features: Dim) -> HeadNorm:
    """Make the norm of queries or keys, with fla's epsilon, whatever the config says."""
    return HeadNorm(size // features.unit, features.unit, epsilon=1e-5, unit=features.name)


FORGETTING_TRANSFORMER = gated_deltanet.make_fla_family(
    "forgetting_transformer",
    "ForgettingTransformerForCausalLM",
    ForgettingAttention,
    factory=_make_forgetting_transformer_factory,
    names=lambda config: {**llama.ATTENTION_NAMES, "f_proj": "forget", "g_proj": "gate"},
    describe=lambda mixer: gated_deltanet.describe_heads(mixer) | {"use_output_gate": mixer.gate is not None},
    defaults={**gated_deltanet.ATTENTION_DEFAULTS, "qk_norm": False, "use_output_gate": False},
    required={"window_size": (None,)},  # fla has it in the cache only
    ignored={"elementwise_affine"},  # no layer reads it
)

"""Models: the decoder, its loss and scores, presets from scratch, and families of Hugging Face checkpoints."""

from typing import Any

from zoo.layers.token_info import batch_token_info, count_positions, pack_positions, token_info

from .blocks import AddNormBlock, LayerScaleBlock, MixerBlock, ParallelBlock
from .build import build_decoder
from .configure import configure, set_implementations
from .decoder import AbstractStack, Block, Decoder, Hidden, UnrolledStack
from .encoders import (
    ClassificationHead,
    Encoder,
    EncoderFeatures,
    FeatureHead,
    ImageEncoder,
    MaskedLMHead,
    RelativeHidden,
    TokenClassificationHead,
    build_encoder,
    build_image_encoder,
    classification_loss,
)
from .hf.spec import Family, TensorMapping, fused, prefixed
from .load_balancing import balance_loss, count_active_parameters, router_z_loss, tokens_per_expert, update_expert_bias
from .loop import Loop
from .loss import cross_entropy, cross_entropy_and_routing, token_losses
from .observe import find_first_nonfinite, observe, tabulate_observations, unobserve
from .parameter_paths import ParameterPath, list_parameter_paths
from .presets.hybrid import Hybrid
from .presets.mamba import Mamba, Mamba2
from .presets.modernbert import ModernBERT
from .presets.moe import MixtureOfExperts
from .presets.published import list_presets, preset
from .presets.recurrent import (
    GLA,
    HGRN2,
    RWKV6,
    RWKV7,
    XLSTM,
    DeltaNet,
    GatedDeltaNet,
    GatedDeltaProduct,
    Griffin,
    KimiLinear,
    LightningTransformer,
    LinearTransformer,
    RetNet,
)
from .presets.transformer import Transformer
from .presets.vision_transformer import VisionTransformer
from .scoring import hidden_states, score
from .segment import Segment, find_patterns
from .stack import Stack, describe_loop, split_ends, swap_stack
from .text_embeddings import embed

__all__ = [
    "GLA",
    "HGRN2",
    "RWKV6",
    "RWKV7",
    "XLSTM",
    "AbstractStack",
    "AddNormBlock",
    "Block",
    "ClassificationHead",
    "Decoder",
    "DeltaNet",
    "Encoder",
    "EncoderFeatures",
    "Family",
    "FeatureHead",
    "GatedDeltaNet",
    "GatedDeltaProduct",
    "Griffin",
    "Hidden",
    "Hybrid",
    "ImageEncoder",
    "KimiLinear",
    "LayerScaleBlock",
    "LightningTransformer",
    "LinearTransformer",
    "Loop",
    "Mamba",
    "Mamba2",
    "MaskedLMHead",
    "MixerBlock",
    "MixtureOfExperts",
    "ModernBERT",
    "ParallelBlock",
    "ParameterPath",
    "RelativeHidden",
    "RetNet",
    "Segment",
    "Stack",
    "TensorMapping",
    "TokenClassificationHead",
    "Transformer",
    "UnrolledStack",
    "VisionTransformer",
    "balance_loss",
    "batch_token_info",
    "build_decoder",
    "build_encoder",
    "build_image_encoder",
    "classification_loss",
    "configure",
    "count_active_parameters",
    "count_positions",
    "cross_entropy",
    "cross_entropy_and_routing",
    "describe_loop",
    "embed",
    "find_first_nonfinite",
    "find_patterns",
    "fused",
    "hidden_states",
    "list_parameter_paths",
    "list_presets",
    "observe",
    "pack_positions",
    "prefixed",
    "preset",
    "router_z_loss",
    "score",
    "set_implementations",
    "split_ends",
    "swap_stack",
    "tabulate_observations",
    "token_info",
    "token_losses",
    "tokens_per_expert",
    "unobserve",
    "update_expert_bias",
]

_MOVED = dict.fromkeys(("set_loop", "set_routing"), "zoo.configure")


def __getattr__(name: str) -> Any:
    if name in _MOVED:
        # Not an AttributeError: `from zoo.models import name` would drop its words.
        raise ImportError(f"zoo.models.{name} has moved to {_MOVED[name]}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

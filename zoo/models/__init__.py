"""Models: the decoder, its loss and scores, presets from scratch, and families of Hugging Face checkpoints."""

from functools import partial
from typing import TYPE_CHECKING

from zoo.layers.token_info import count_positions, pack_positions, token_info

from .blocks import AddNormBlock, FeedForwardBlock, LayerScaleBlock, MixerBlock, ParallelBlock
from .build import build_decoder
from .configure import configure, set_implementations
from .decoder import Block, Decoder, Hidden
from .encoders.classification import classification_loss
from .encoders.heads import ClassificationHead, FeatureHead, MaskedLMHead, TokenClassificationHead
from .encoders.image import ImageEncoder, build_image_encoder
from .encoders.text import Encoder, build_encoder
from .hf.spec import Family, TensorMapping, fused, prefixed
from .hyper_connections import HyperConnectionBlock
from .indexer_loss import attend_densely, indexer_loss
from .load_balancing import balance_loss, count_active_parameters, router_z_loss, tokens_per_expert, update_expert_bias
from .log_probs import log_probs
from .loss import cross_entropy, cross_entropy_and_routing, token_losses
from .observe import find_first_nonfinite, observe, tabulate_observations, unobserve
from .parameter_access import get, replace
from .parameter_paths import list_parameter_paths
from .presets.hybrid import Hybrid
from .presets.looped import Looped
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
    Mamba3,
    RetNet,
)
from .presets.transformer import Transformer
from .presets.vision_transformer import VisionTransformer
from .restack import keep_layers, replace_mixers, split_ends
from .scoring import hidden_states, score
from .second_derivatives import twice_differentiable
from .sequence_score import SequenceScore
from .stack import Stack, describe_loop, swap_stack
from .text_embeddings import embed
from .torch_habits import explain_missing_name

__all__ = [
    "GLA",
    "HGRN2",
    "RWKV6",
    "RWKV7",
    "XLSTM",
    "AddNormBlock",
    "Block",
    "ClassificationHead",
    "Decoder",
    "DeltaNet",
    "Encoder",
    "Family",
    "FeatureHead",
    "FeedForwardBlock",
    "GatedDeltaNet",
    "GatedDeltaProduct",
    "Griffin",
    "Hidden",
    "Hybrid",
    "HyperConnectionBlock",
    "ImageEncoder",
    "KimiLinear",
    "LayerScaleBlock",
    "LightningTransformer",
    "LinearTransformer",
    "Looped",
    "Mamba",
    "Mamba2",
    "Mamba3",
    "MaskedLMHead",
    "MixerBlock",
    "MixtureOfExperts",
    "ModernBERT",
    "ParallelBlock",
    "RetNet",
    "SequenceScore",
    "Stack",
    "TensorMapping",
    "TokenClassificationHead",
    "Transformer",
    "VisionTransformer",
    "attend_densely",
    "balance_loss",
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
    "fused",
    "get",
    "hidden_states",
    "indexer_loss",
    "keep_layers",
    "list_parameter_paths",
    "list_presets",
    "log_probs",
    "observe",
    "pack_positions",
    "prefixed",
    "preset",
    "replace",
    "replace_mixers",
    "router_z_loss",
    "score",
    "set_implementations",
    "split_ends",
    "swap_stack",
    "tabulate_observations",
    "token_info",
    "token_losses",
    "tokens_per_expert",
    "twice_differentiable",
    "unobserve",
    "update_expert_bias",
]

if not TYPE_CHECKING:  # for a type checker every name would be an attribute
    __getattr__ = partial(explain_missing_name, __name__)

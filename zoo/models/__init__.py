"""Models: the decoder, its loss and scores, presets from scratch, and families of Hugging Face checkpoints."""

from functools import partial
from typing import TYPE_CHECKING

from zoo.layers.token_info import count_positions, pack_positions

from .build import build_decoder
from .decoder import Block, Decoder, Hidden
from .encoder_decoder import EncoderDecoder
from .encoders.classification import classification_loss
from .encoders.image import ImageEncoder, build_image_encoder
from .encoders.text import Encoder, build_encoder
from .encoders.towers import TwoTowers, contrastive_loss
from .image_text import ImageText
from .indexer_loss import indexer_loss
from .load_balancing import balance_loss, count_active_parameters, router_z_loss, tokens_per_expert, update_expert_bias
from .loss import cross_entropy_and_routing, token_losses
from .observe import find_first_nonfinite, observe, tabulate_observations, unobserve
from .parameter_access import get, replace
from .parameter_paths import list_parameter_paths
from .predictors import add_predictors, repeat_predictor
from .presets.clip import CLIP
from .presets.encoder_decoder import EncoderDecoderTransformer
from .presets.hybrid import Hybrid
from .presets.llava import LLaVA
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
from .sequence_score import SequenceScore
from .stack import Stack
from .torch_habits import explain_missing_name

__all__ = [
    "CLIP",
    "GLA",
    "HGRN2",
    "RWKV6",
    "RWKV7",
    "XLSTM",
    "Block",
    "Decoder",
    "DeltaNet",
    "Encoder",
    "EncoderDecoder",
    "EncoderDecoderTransformer",
    "GatedDeltaNet",
    "GatedDeltaProduct",
    "Griffin",
    "Hidden",
    "Hybrid",
    "ImageEncoder",
    "ImageText",
    "KimiLinear",
    "LLaVA",
    "LightningTransformer",
    "LinearTransformer",
    "Looped",
    "Mamba",
    "Mamba2",
    "Mamba3",
    "MixtureOfExperts",
    "ModernBERT",
    "RetNet",
    "SequenceScore",
    "Stack",
    "Transformer",
    "TwoTowers",
    "VisionTransformer",
    "add_predictors",
    "balance_loss",
    "build_decoder",
    "build_encoder",
    "build_image_encoder",
    "classification_loss",
    "contrastive_loss",
    "count_active_parameters",
    "count_positions",
    "cross_entropy_and_routing",
    "find_first_nonfinite",
    "get",
    "indexer_loss",
    "keep_layers",
    "list_parameter_paths",
    "list_presets",
    "observe",
    "pack_positions",
    "preset",
    "repeat_predictor",
    "replace",
    "replace_mixers",
    "router_z_loss",
    "split_ends",
    "tabulate_observations",
    "token_losses",
    "tokens_per_expert",
    "unobserve",
    "update_expert_bias",
]

if not TYPE_CHECKING:  # for a type checker every name would be an attribute
    __getattr__ = partial(explain_missing_name, __name__)

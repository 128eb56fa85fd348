"""Modules with parameters. Each is written once, and computes its share on any mesh."""

from .abstract import AbstractFeedForward, AbstractLinear, AbstractMixer, AbstractNorm
from .attention import Attention
from .cache import KeyValueCache
from .dropout import Dropout
from .embedding import Embedding, PositionEmbedding
from .info import Info, positions_of
from .linear import Linear
from .mlp import MLP, GatedMLP
from .norm import LayerNorm, RMSNorm

__all__ = [
    "MLP",
    "AbstractFeedForward",
    "AbstractLinear",
    "AbstractMixer",
    "AbstractNorm",
    "Attention",
    "Dropout",
    "Embedding",
    "GatedMLP",
    "Info",
    "KeyValueCache",
    "LayerNorm",
    "Linear",
    "PositionEmbedding",
    "RMSNorm",
    "positions_of",
]

"""Modules with parameters. Each is written once, and computes its share on any mesh."""

from .abstract import AbstractFeedForward, AbstractLinear, AbstractMixer, AbstractNorm
from .attention import Attention
from .cache import KeyValueCache, LatentCache
from .dropout import Dropout
from .embedding import Embedding, PositionEmbedding
from .info import Info, positions_of
from .latent_attention import LatentAttention
from .linear import Linear
from .mlp import MLP, ClampedGatedMLP, GatedMLP
from .moe import MixtureOfExperts
from .norm import LayerNorm, RMSNorm
from .packed import PackedLinear
from .router import AbstractRouter, BiasedRouter, SoftmaxRouter, TopSoftmaxRouter
from .routing import Routing

__all__ = [
    "MLP",
    "AbstractFeedForward",
    "AbstractLinear",
    "AbstractMixer",
    "AbstractNorm",
    "AbstractRouter",
    "Attention",
    "BiasedRouter",
    "ClampedGatedMLP",
    "Dropout",
    "Embedding",
    "GatedMLP",
    "Info",
    "KeyValueCache",
    "LatentAttention",
    "LatentCache",
    "LayerNorm",
    "Linear",
    "MixtureOfExperts",
    "PackedLinear",
    "PositionEmbedding",
    "RMSNorm",
    "Routing",
    "SoftmaxRouter",
    "TopSoftmaxRouter",
    "positions_of",
]

"""Layers of encoders: the embedding of images, attention in both directions, and pooling of tokens."""

from .bidirectional_attention import BidirectionalAttention
from .patches import ImageEmbedding, PatchEmbedding, PatchPositions
from .pooling import AbstractPooler, AttentionPooler, ClassTokenPooler, DensePooler

__all__ = [
    "AbstractPooler",
    "AttentionPooler",
    "BidirectionalAttention",
    "ClassTokenPooler",
    "DensePooler",
    "ImageEmbedding",
    "PatchEmbedding",
    "PatchPositions",
]

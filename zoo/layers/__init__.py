"""Modules with parameters. Each is written once, and computes its share on any mesh."""

from .abstract import AbstractFeedForward, AbstractLinear, AbstractMixer, AbstractNorm
from .attention import Attention
from .cache import KeyValueCache, LatentCache
from .convolution import ShortConvolution, Window
from .course import Course
from .delta_net import DeltaNet, GatedDeltaNet, GatedDeltaProduct, KimiDeltaAttention
from .dropout import Dropout
from .embedding import AbstractEmbedding, Embedding, PositionEmbedding
from .gated_norm import GatedGroupNorm
from .heads import HeadNorm, LowRank, Memory
from .hgrn2 import HGRN2
from .info import Info, positions_of
from .latent_attention import LatentAttention
from .linear import Linear
from .linear_attention import GatedLinearAttention, Lightning, LinearAttention, Retention
from .mamba import Mamba, MambaState
from .mamba2 import Mamba2
from .mlp import MLP, ClampedGatedMLP, GatedMLP
from .mlstm import MLSTM
from .moe import MixtureOfExperts
from .norm import LayerNorm, RMSNorm
from .packed import AbstractPackedLinear, PackedLinear
from .quantised import Int8Linear, NF4Linear
from .rg_lru import RGLRU
from .router import AbstractRouter, BiasedRouter, SoftmaxRouter, TopSoftmaxRouter
from .routing import Routing
from .rwkv import RWKV6, RWKV7
from .rwkv4 import RWKV4, RWKV4ChannelMixing, RWKV4State

__all__ = [
    "HGRN2",
    "MLP",
    "MLSTM",
    "RGLRU",
    "RWKV4",
    "RWKV6",
    "RWKV7",
    "AbstractEmbedding",
    "AbstractFeedForward",
    "AbstractLinear",
    "AbstractMixer",
    "AbstractNorm",
    "AbstractPackedLinear",
    "AbstractRouter",
    "Attention",
    "BiasedRouter",
    "ClampedGatedMLP",
    "Course",
    "DeltaNet",
    "Dropout",
    "Embedding",
    "GatedDeltaNet",
    "GatedDeltaProduct",
    "GatedGroupNorm",
    "GatedLinearAttention",
    "GatedMLP",
    "HeadNorm",
    "Info",
    "Int8Linear",
    "KeyValueCache",
    "KimiDeltaAttention",
    "LatentAttention",
    "LatentCache",
    "LayerNorm",
    "Lightning",
    "Linear",
    "LinearAttention",
    "LowRank",
    "Mamba",
    "Mamba2",
    "MambaState",
    "Memory",
    "MixtureOfExperts",
    "NF4Linear",
    "PackedLinear",
    "PositionEmbedding",
    "RMSNorm",
    "RWKV4ChannelMixing",
    "RWKV4State",
    "Retention",
    "Routing",
    "ShortConvolution",
    "SoftmaxRouter",
    "TopSoftmaxRouter",
    "Window",
    "positions_of",
]

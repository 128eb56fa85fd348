"""Layers: Equinox modules with parameters, which run unchanged on one device and sharded over any mesh."""

from .abstract import AbstractFeedForward, AbstractLinear, AbstractMixer, AbstractNorm
from .attention.alibi import AlibiAttention, compute_alibi_slopes
from .attention.attention import Attention
from .attention.base import AbstractGroupedAttention
from .attention.cross_layer import CrossLayerAttention, SharedKeyValues
from .attention.gated import GatedAttention
from .attention.latent import LatentAttention
from .attention.post_rotary import PostRotaryAttention
from .attention.sparse_latent import LightningIndexer, SparseLatentAttention
from .convolution import ConvState, ShortConvolution
from .dropout import Dropout
from .embedding import AbstractEmbedding, Embedding, PositionEmbedding, TokenTypeEmbedding
from .encoders import (
    AbstractPooler,
    AttentionPooler,
    BidirectionalAttention,
    ClassTokenPooler,
    DensePooler,
    ImageEmbedding,
    PatchEmbedding,
    PatchPositions,
)
from .kv_cache import IndexedLatentCache, KeyValueCache, LatentCache
from .linear import Linear
from .mlp import MLP, GatedMLP
from .moe.mixture import AbstractMixture, MixtureOfExperts
from .moe.router import (
    AbstractRouter,
    BiasedRouter,
    SoftmaxRouter,
    TopSoftmaxRouter,
)
from .moe.routing import Routing, RoutingSums
from .norm import IdentityNorm, LayerNorm, PerHeadLayerNorm, RMSNorm
from .quantized.fp8 import AmaxHistory, FP8Linear
from .quantized.groups import AbstractGroupLinear, GroupQuantizedLinear, NestedNF4Linear
from .quantized.linear import Int8Linear, MXFP4Linear, NF4Linear
from .quantized.packed import AbstractPackedLinear
from .query_scale import QueryScale
from .recurrent.base import AbstractRecurrence
from .recurrent.common import HeadNorm, LowRank, RecurrentState
from .recurrent.context import RecurrenceContext
from .recurrent.delta_net import DeltaNet, GatedDeltaNet, GatedDeltaProduct, KimiDeltaAttention
from .recurrent.gated_convolution import GatedConvolution
from .recurrent.gated_norm import GatedGroupNorm
from .recurrent.grouped_delta_net import GroupedGatedDeltaNet
from .recurrent.hgrn2 import HGRN2
from .recurrent.linear_attention import GatedLinearAttention, Lightning, LinearAttention, Retention
from .recurrent.mamba import Mamba, MambaState
from .recurrent.mamba2 import Mamba2
from .recurrent.mlstm import MLSTM
from .recurrent.rg_lru import RGLRU
from .recurrent.rwkv4 import RWKV4, RWKV4State
from .recurrent.rwkv6 import RWKV6
from .recurrent.rwkv7 import RWKV7
from .token_info import TokenInfo, token_positions

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
    "AbstractGroupLinear",
    "AbstractGroupedAttention",
    "AbstractLinear",
    "AbstractMixer",
    "AbstractMixture",
    "AbstractNorm",
    "AbstractPackedLinear",
    "AbstractPooler",
    "AbstractRecurrence",
    "AbstractRouter",
    "AlibiAttention",
    "AmaxHistory",
    "Attention",
    "AttentionPooler",
    "BiasedRouter",
    "BidirectionalAttention",
    "ClassTokenPooler",
    "ConvState",
    "CrossLayerAttention",
    "DeltaNet",
    "DensePooler",
    "Dropout",
    "Embedding",
    "FP8Linear",
    "GatedAttention",
    "GatedConvolution",
    "GatedDeltaNet",
    "GatedDeltaProduct",
    "GatedGroupNorm",
    "GatedLinearAttention",
    "GatedMLP",
    "GroupQuantizedLinear",
    "GroupedGatedDeltaNet",
    "HeadNorm",
    "IdentityNorm",
    "ImageEmbedding",
    "IndexedLatentCache",
    "Int8Linear",
    "KeyValueCache",
    "KimiDeltaAttention",
    "LatentAttention",
    "LatentCache",
    "LayerNorm",
    "Lightning",
    "LightningIndexer",
    "Linear",
    "LinearAttention",
    "LowRank",
    "MXFP4Linear",
    "Mamba",
    "Mamba2",
    "MambaState",
    "MixtureOfExperts",
    "NF4Linear",
    "NestedNF4Linear",
    "PatchEmbedding",
    "PatchPositions",
    "PerHeadLayerNorm",
    "PositionEmbedding",
    "PostRotaryAttention",
    "QueryScale",
    "RMSNorm",
    "RWKV4State",
    "RecurrenceContext",
    "RecurrentState",
    "Retention",
    "Routing",
    "RoutingSums",
    "SharedKeyValues",
    "ShortConvolution",
    "SoftmaxRouter",
    "SparseLatentAttention",
    "TokenInfo",
    "TokenTypeEmbedding",
    "TopSoftmaxRouter",
    "compute_alibi_slopes",
    "token_positions",
]

"""Layers: Equinox modules with parameters, which run unchanged on one device and sharded over any mesh."""

from .abstract import AbstractFeedForward, AbstractLinear, AbstractMixer, AbstractNorm
from .attention.alibi import AlibiAttention
from .attention.attention import Attention
from .attention.block_compression import BlockIndexer
from .attention.compressed import CompressedAttention
from .attention.differential import DifferentialAttention
from .attention.forgetting import ForgettingAttention
from .attention.gated import GatedAttention
from .attention.indexed import IndexedAttention, MeanKeyIndexer
from .attention.latent import LatentAttention
from .attention.mixture_of_blocks import MixtureOfBlockAttention
from .attention.native_sparse import NativeSparseAttention
from .attention.post_rotary import PostRotaryAttention
from .attention.sparse_latent import LightningIndexer, SparseLatentAttention
from .convolution import ShortConvolution
from .dropout import Dropout
from .embedding import Embedding, PositionEmbedding
from .linear import Linear
from .mlp import MLP, GatedMLP
from .moe.mixture import MixtureOfExperts
from .moe.router import BiasedRouter, HashRouter, SigmoidRouter, SoftmaxRouter, TopSoftmaxRouter
from .norm import IdentityNorm, LayerNorm, RMSNorm
from .recurrent.base import AbstractRecurrence
from .recurrent.decoupled_delta import Comba, GatedDeltaNet2
from .recurrent.delta_net import DeltaNet, GatedDeltaNet, GatedDeltaProduct, KimiDeltaAttention
from .recurrent.double_gated_convolution import DoubleGatedConvolution
from .recurrent.gated_convolution import GatedConvolution
from .recurrent.grouped_delta_net import GroupedGatedDeltaNet
from .recurrent.hgrn2 import HGRN2
from .recurrent.linear_attention import GatedLinearAttention, Lightning, LinearAttention, Retention
from .recurrent.mamba import Mamba
from .recurrent.mamba2 import Mamba2
from .recurrent.mamba3 import Mamba3
from .recurrent.mesa_net import MesaNet
from .recurrent.mlstm import MLSTM
from .recurrent.rg_lru import RGLRU
from .recurrent.rwkv4 import RWKV4
from .recurrent.rwkv6 import RWKV6
from .recurrent.rwkv7 import RWKV7
from .token_info import TokenInfo

__all__ = [
    "HGRN2",
    "MLP",
    "MLSTM",
    "RGLRU",
    "RWKV4",
    "RWKV6",
    "RWKV7",
    "AbstractFeedForward",
    "AbstractLinear",
    "AbstractMixer",
    "AbstractNorm",
    "AbstractRecurrence",
    "AlibiAttention",
    "Attention",
    "BiasedRouter",
    "BlockIndexer",
    "Comba",
    "CompressedAttention",
    "DeltaNet",
    "DifferentialAttention",
    "DoubleGatedConvolution",
    "Dropout",
    "Embedding",
    "ForgettingAttention",
    "GatedAttention",
    "GatedConvolution",
    "GatedDeltaNet",
    "GatedDeltaNet2",
    "GatedDeltaProduct",
    "GatedLinearAttention",
    "GatedMLP",
    "GroupedGatedDeltaNet",
    "HashRouter",
    "IdentityNorm",
    "IndexedAttention",
    "KimiDeltaAttention",
    "LatentAttention",
    "LayerNorm",
    "Lightning",
    "LightningIndexer",
    "Linear",
    "LinearAttention",
    "Mamba",
    "Mamba2",
    "Mamba3",
    "MeanKeyIndexer",
    "MesaNet",
    "MixtureOfBlockAttention",
    "MixtureOfExperts",
    "NativeSparseAttention",
    "PositionEmbedding",
    "PostRotaryAttention",
    "RMSNorm",
    "Retention",
    "ShortConvolution",
    "SigmoidRouter",
    "SoftmaxRouter",
    "SparseLatentAttention",
    "TokenInfo",
    "TopSoftmaxRouter",
]

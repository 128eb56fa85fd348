"""Whole models: the skeleton they share, and one small function or file a family."""

from .assemble import assemble, kinds_of, layer
from .balance import balance_loss, count_active, rebalance, router_z_loss, visits
from .blocks import Block, MixerBlock, ParallelBlock, Stream, TwoMixerBlock
from .decoder import Decoder, describe, describe_batch, pack_positions
from .facts import Family, Row, fused, under
from .hybrid import Hybrid
from .loss import cross_entropy, cross_entropy_and_routing, token_losses
from .mamba import Mamba, Mamba2
from .moe import MixtureOfExperts
from .names import Place, places
from .probe import hidden_states, score
from .published import preset, presets
from .recurrent import (
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
from .stack import AbstractStack, Segment, Stack, Unstacked, cut, swap_stack
from .transformer import Transformer

__all__ = [
    "GLA",
    "HGRN2",
    "RWKV6",
    "RWKV7",
    "XLSTM",
    "AbstractStack",
    "Block",
    "Decoder",
    "DeltaNet",
    "Family",
    "GatedDeltaNet",
    "GatedDeltaProduct",
    "Griffin",
    "Hybrid",
    "KimiLinear",
    "LightningTransformer",
    "LinearTransformer",
    "Mamba",
    "Mamba2",
    "MixerBlock",
    "MixtureOfExperts",
    "ParallelBlock",
    "Place",
    "RetNet",
    "Row",
    "Segment",
    "Stack",
    "Stream",
    "Transformer",
    "TwoMixerBlock",
    "Unstacked",
    "assemble",
    "balance_loss",
    "count_active",
    "cross_entropy",
    "cross_entropy_and_routing",
    "cut",
    "describe",
    "describe_batch",
    "fused",
    "hidden_states",
    "kinds_of",
    "layer",
    "pack_positions",
    "places",
    "preset",
    "presets",
    "rebalance",
    "router_z_loss",
    "score",
    "swap_stack",
    "token_losses",
    "under",
    "visits",
]

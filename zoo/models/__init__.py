"""Whole models: the skeleton they share, and one small function or file a family."""

from .assemble import assemble, kinds_of, layer
from .blocks import Block, ParallelBlock, Stream
from .decoder import Decoder, describe, describe_batch, pack_positions
from .facts import Family, Row, fused, under
from .loss import cross_entropy, token_losses
from .names import Place, places
from .probe import hidden_states, score
from .published import preset, presets
from .stack import AbstractStack, Segment, Stack, Unstacked, cut, swap_stack
from .transformer import Transformer

__all__ = [
    "AbstractStack",
    "Block",
    "Decoder",
    "Family",
    "ParallelBlock",
    "Place",
    "Row",
    "Segment",
    "Stack",
    "Stream",
    "Transformer",
    "Unstacked",
    "assemble",
    "cross_entropy",
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
    "score",
    "swap_stack",
    "token_losses",
    "under",
]

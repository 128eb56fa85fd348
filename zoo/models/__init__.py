"""Whole models: the skeleton they share, and one small function or file a family."""

from .blocks import Block, Stream
from .decoder import Decoder, describe, describe_batch, pack_positions
from .loss import cross_entropy, token_losses
from .stack import AbstractStack, Segment, Stack, Unstacked, cut, swap_stack
from .transformer import Transformer

__all__ = [
    "AbstractStack",
    "Block",
    "Decoder",
    "Segment",
    "Stack",
    "Stream",
    "Transformer",
    "Unstacked",
    "cross_entropy",
    "cut",
    "describe",
    "describe_batch",
    "pack_positions",
    "swap_stack",
    "token_losses",
]

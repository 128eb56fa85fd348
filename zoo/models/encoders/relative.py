"""Table of relative positions, which the encoder hands from layer to layer."""

from collections.abc import Callable

from jaxtyping import Array, Float, Key

from zoo.layers import AbstractNorm
from zoo.layers.linear import truncated_normal
from zoo.parallel import Module

from ..decoder import Hidden

RelativeTable = Float[Array, "distances embed"]


class RelativeHidden(Hidden):
    """Hidden states with the vectors of relative positions, which layers read but do not change."""

    table: RelativeTable | None = None


class RelativeEmbedding(Module):
    """Embedding of relative positions, one table for all layers: norm(weight), of 2 `span` distances (He et al.,
    arXiv:2006.03654, section 3.1). The norm is optional."""

    weight: RelativeTable
    norm: AbstractNorm | None

    def __init__(
        self,
        span: int,
        embed: int,
        *,
        norm: Callable[[], AbstractNorm] | None = None,
        scale: float = 1.0,
        key: Key[Array, ""],
    ):
        """`norm`: factory of the norm."""
        self.weight = truncated_normal(key, (2 * span, embed), scale)
        self.norm = None if norm is None else norm()

    def __call__(self) -> RelativeTable:
        """Return the vectors of all distances."""
        return self.weight if self.norm is None else self.norm(self.weight)

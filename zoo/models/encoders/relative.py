"""Table of relative positions, which the encoder hands from layer to layer, and the layers that read it."""

import abc
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Key

from zoo.layers import AbstractFeedForward, AbstractMixer, AbstractNorm, Dropout, TokenInfo
from zoo.layers.abstract import run_feed_forward
from zoo.layers.linear import truncated_normal
from zoo.parallel import Module, named_by_class
from zoo.parallel.tokens import run_on_all_tokens
from zoo.shapes import HiddenStates, ResidualStream

from ..decoder import AbstractMixerBlock, Hidden

RelativeTable = Float[Array, "distances features"]
"""A row for each distance, or for each bucket of distances."""


class RelativeHidden(Hidden):
    """Hidden states with the table of relative positions, which layers read but do not change."""

    constant_fields = ("table",)

    table: RelativeTable | None = None


class AbstractRelativeEmbedding(Module):
    """Table of relative positions, one for all layers."""

    @abc.abstractmethod
    def __call__(self) -> RelativeTable:
        """Return the rows of all distances."""


class RelativeEmbedding(AbstractRelativeEmbedding):
    """Embedding of relative positions: norm(weight), of 2 `span` distances (He et al., arXiv:2006.03654, section 3.1).
    The norm is optional."""

    weight: Float[Array, "distances embed"]
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

    def __call__(self) -> Float[Array, "distances embed"]:
        return self.weight if self.norm is None else self.norm(self.weight)


class AbstractRelativeMixer(AbstractMixer):
    """Attention in both directions that reads the table of relative positions: `mix(x, info, table) -> (y, None)`."""

    @abc.abstractmethod
    def mix(self, x: HiddenStates, info: TokenInfo, table: RelativeTable) -> tuple[ResidualStream, None]:
        """Return the output for hidden states `x`, given the table of all distances, and None: there is no state."""

    def __call__(self, x: HiddenStates, info: TokenInfo, state: None = None) -> tuple[ResidualStream, None]:
        """**Raises** `ValueError`: the layer reads the table of distances, too, which `mix` takes."""
        raise ValueError(f"{type(self).__name__} reads a table of distances: run it in a RelativeBlock")

    def init_state(self, batch: int, length: int, dtype: Any = jnp.float32) -> Any:
        """**Raises** `NotImplementedError`: a token attends to later ones, so none can be decoded before them."""
        raise NotImplementedError("attention in both directions has no KV cache: a token attends to those after it")


class RelativeBlock(AbstractMixerBlock):
    """norm(x + mixer(x, table)), then norm(x + ffn(x)): `AddNormBlock` with attention that reads the table
    of relative positions (DeBERTa; He et al., arXiv:2006.03654)."""

    mixer_norm: AbstractNorm
    mixer: AbstractRelativeMixer = named_by_class()
    ffn_norm: AbstractNorm
    ffn: AbstractFeedForward = named_by_class()
    dropout: Dropout

    def __call__(self, hidden: Hidden, info: TokenInfo, state: Any = None) -> tuple[Hidden, Any]:
        """**Raises** `ValueError` for hidden states without a table: a layer on its own."""
        table = hidden.table if isinstance(hidden, RelativeHidden) else None
        if table is None:
            raise ValueError(
                "this layer reads a table of relative positions, and the hidden states have none: run the layers in "
                "their zoo.models.Encoder, on a mesh with pipe=1"
            )
        mixed, _ = run_on_all_tokens(lambda x: self.mixer.mix(x, info, table), hidden.x)
        mixed = checkpoint_name(mixed, "mixer_output")
        hidden = hidden.add_residual(self.dropout(mixed, info, site=0)).normalize(self.mixer_norm)
        fed, routing = run_feed_forward(self.ffn, hidden.x)
        fed = checkpoint_name(fed, "ffn_output")
        return hidden.add_residual(self.dropout(fed, info, site=1), routing).normalize(self.ffn_norm), state

"""One layer of a stack: what is mixed, what is fed forward, and how both meet the residual stream."""

import abc
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from zoo.layers import AbstractFeedForward, AbstractMixer, AbstractNorm, Dropout, Info
from zoo.parallel import Module, either


class Stream(Module):
    """What flows through a stack, row first: the activations, and a number a row that layers may add to the loss."""

    x: Float[Array, "batch seq embed"]
    auxiliary: Float[Array, "batch"]

    @classmethod
    def of(cls, x: Float[Array, "batch seq embed"]) -> "Stream":
        """A stream that starts here; its auxiliary loss varies over the mesh as its rows do."""
        return cls(x, jnp.zeros_like(x[:, 0, 0], jnp.float32))

    def plus(self, residual: Float[Array, "batch seq embed"]) -> "Stream":
        return type(self)(self.x + residual, self.auxiliary)


class AbstractBlock(Module):
    """One layer: `(stream, info, state) -> (stream, state)`."""

    @abc.abstractmethod
    def __call__(self, stream: Stream, info: Info, state: Any = None) -> tuple[Stream, Any]:
        """The stream after this layer; and the layer's state after these tokens, where one came."""

    @abc.abstractmethod
    def init_state(self, batch: int, length: int, dtype: Any = jnp.float32) -> Any:
        """What the layer remembers before the first of up to `length` tokens."""


class Block(AbstractBlock):
    """x + mixer(norm(x)), then x + ffn(norm(x)): the pre-norm layer (Xiong et al., arXiv:2002.04745, figure 1b).

    Any mixer `(x, info, state) -> (y, state)` and any `ffn` `x -> y`. Another wiring of residuals is another block.
    """

    mixer_norm: AbstractNorm
    mixer: AbstractMixer = either()
    ffn_norm: AbstractNorm
    ffn: AbstractFeedForward = either()
    dropout: Dropout

    def init_state(self, batch: int, length: int, dtype: Any = jnp.float32) -> Any:
        return self.mixer.init_state(batch, length, dtype)

    def __call__(self, stream: Stream, info: Info, state: Any = None) -> tuple[Stream, Any]:
        mixed, state = self.mixer(self.mixer_norm(stream.x), info, state)
        stream = stream.plus(self.dropout(mixed, info, site=0))
        fed = self.ffn(self.ffn_norm(stream.x))
        return stream.plus(self.dropout(fed, info, site=1)), state


class ParallelBlock(AbstractBlock):
    """x + mixer(norm(x)) + ffn(norm'(x)): both halves read the same stream (GPT-J; GPT-NeoX, arXiv:2204.06745,
    section 2.1). Without an `ffn_norm` of its own the second half reads what the first does (PaLM, arXiv:2204.02311,
    section 2)."""

    mixer_norm: AbstractNorm
    mixer: AbstractMixer = either()
    ffn_norm: AbstractNorm | None
    ffn: AbstractFeedForward = either()
    dropout: Dropout

    def init_state(self, batch: int, length: int, dtype: Any = jnp.float32) -> Any:
        return self.mixer.init_state(batch, length, dtype)

    def __call__(self, stream: Stream, info: Info, state: Any = None) -> tuple[Stream, Any]:
        read = self.mixer_norm(stream.x)
        mixed, state = self.mixer(read, info, state)
        fed = self.ffn(read if self.ffn_norm is None else self.ffn_norm(stream.x))
        return stream.plus(self.dropout(mixed, info, site=0) + self.dropout(fed, info, site=1)), state

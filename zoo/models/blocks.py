"""One layer of a stack: what is mixed, what is fed forward, and how both meet the residual stream."""

import abc
from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float

from zoo.layers import AbstractFeedForward, AbstractMixer, AbstractNorm, Dropout, Routing, TokenInfo
from zoo.parallel import Module, named_by_class


class Hidden(Module):
    """What flows through a stack, row first: the activations, and what the routers on the way decided."""

    x: Float[Array, "batch seq embed"]
    routing: tuple[Routing, ...] = ()
    """One for each layer so far that has a router, first to last."""

    def add_residual(self, residual: Float[Array, "batch seq embed"], routing: tuple[Routing, ...] = ()) -> "Hidden":
        return type(self)(self.x + residual, self.routing + routing)


class AbstractBlock(Module):
    """One layer: `(stream, info, state) -> (stream, state)`."""

    @abc.abstractmethod
    def __call__(self, hidden: Hidden, info: TokenInfo, state: Any = None) -> tuple[Hidden, Any]:
        """The stream after this layer; and the layer's state after these tokens, where one came."""

    @abc.abstractmethod
    def init_state(self, batch: int, length: int, dtype: Any = jnp.float32) -> Any:
        """What the layer remembers before the first of up to `length` tokens."""


class Block(AbstractBlock):
    """x + mixer(norm(x)), then x + ffn(norm(x)): the pre-norm layer (Xiong et al., arXiv:2002.04745, figure 1b).

    Any mixer `(x, info, state) -> (y, state)` and any `ffn` `x -> y`; what a router in it decides goes into the stream.
    Both are multiplied by `residual_multiplier` before they are added. Another wiring of residuals is another block.
    """

    mixer_norm: AbstractNorm
    mixer: AbstractMixer = named_by_class()
    ffn_norm: AbstractNorm
    ffn: AbstractFeedForward = named_by_class()
    dropout: Dropout

    residual_multiplier: float = eqx.field(static=True, default=1.0)

    def init_state(self, batch: int, length: int, dtype: Any = jnp.float32) -> Any:
        return self.mixer.init_state(batch, length, dtype)

    def __call__(self, hidden: Hidden, info: TokenInfo, state: Any = None) -> tuple[Hidden, Any]:
        mixed, state = self.mixer(self.mixer_norm(hidden.x), info, state)
        hidden = hidden.add_residual(self.scale_residual(self.dropout(mixed, info, site=0)))
        fed, routing = self.ffn.routed(self.ffn_norm(hidden.x))
        return hidden.add_residual(self.scale_residual(self.dropout(fed, info, site=1)), routing), state

    def scale_residual(self, x: Float[Array, "batch seq embed"]) -> Float[Array, "batch seq embed"]:
        return x if self.residual_multiplier == 1 else self.residual_multiplier * x


class MixerBlock(AbstractBlock):
    """x + mixer(norm(x)), and nothing else: Mamba's layer, whose mixer widens the stream itself (arXiv:2312.00752,
    section 3.4)."""

    mixer_norm: AbstractNorm
    mixer: AbstractMixer = named_by_class()
    dropout: Dropout

    residual_multiplier: float = eqx.field(static=True, default=1.0)

    def init_state(self, batch: int, length: int, dtype: Any = jnp.float32) -> Any:
        return self.mixer.init_state(batch, length, dtype)

    def __call__(self, hidden: Hidden, info: TokenInfo, state: Any = None) -> tuple[Hidden, Any]:
        mixed, state = self.mixer(self.mixer_norm(hidden.x), info, state)
        mixed = self.dropout(mixed, info, site=0)
        return hidden.add_residual(mixed if self.residual_multiplier == 1 else self.residual_multiplier * mixed), state


class TwoMixerBlock(AbstractBlock):
    """x + mixer(norm(x)), then x + ffn(norm(x)) with an `ffn` that looks back too, and is a mixer: RWKV's layer
    (arXiv:2305.13048, figure 2). The layer's state is that of both."""

    mixer_norm: AbstractNorm
    mixer: AbstractMixer = named_by_class()
    ffn_norm: AbstractNorm
    ffn: AbstractMixer = named_by_class()
    dropout: Dropout

    def init_state(self, batch: int, length: int, dtype: Any = jnp.float32) -> tuple[Any, Any]:
        return self.mixer.init_state(batch, length, dtype), self.ffn.init_state(batch, length, dtype)

    def __call__(self, hidden: Hidden, info: TokenInfo, state: Any = None) -> tuple[Hidden, Any]:
        before, before_ffn = (None, None) if state is None else state
        mixed, after = self.mixer(self.mixer_norm(hidden.x), info, before)
        hidden = hidden.add_residual(self.dropout(mixed, info, site=0))
        fed, after_ffn = self.ffn(self.ffn_norm(hidden.x), info, before_ffn)
        return hidden.add_residual(self.dropout(fed, info, site=1)), None if state is None else (after, after_ffn)


class ParallelBlock(AbstractBlock):
    """x + mixer(norm(x)) + ffn(norm'(x)): both halves read the same stream (GPT-J; GPT-NeoX, arXiv:2204.06745,
    section 2.1). Without an `ffn_norm` of its own the second half reads what the first does (PaLM, arXiv:2204.02311,
    section 2)."""

    mixer_norm: AbstractNorm
    mixer: AbstractMixer = named_by_class()
    ffn_norm: AbstractNorm | None
    ffn: AbstractFeedForward = named_by_class()
    dropout: Dropout

    def init_state(self, batch: int, length: int, dtype: Any = jnp.float32) -> Any:
        return self.mixer.init_state(batch, length, dtype)

    def __call__(self, hidden: Hidden, info: TokenInfo, state: Any = None) -> tuple[Hidden, Any]:
        read = self.mixer_norm(hidden.x)
        mixed, state = self.mixer(read, info, state)
        fed, routing = self.ffn.routed(read if self.ffn_norm is None else self.ffn_norm(hidden.x))
        return hidden.add_residual(self.dropout(mixed, info, site=0) + self.dropout(fed, info, site=1), routing), state

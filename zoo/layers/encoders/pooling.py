"""Pooling of tokens to one vector per row: of an image, or of a text."""

import abc
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from zoo.ops.attention import ATTENTION, AttentionMask, attention
from zoo.parallel import Dim, Module, implementation_option
from zoo.shapes import HiddenStates, PaddingMask, Tokens

from ..abstract import AbstractLinear, AbstractNorm
from ..linear import Linear, resolve_head_dim, truncated_normal

PooledTokens = Float[Array, "batch embed"]


class AbstractPooler(Module):
    """Pooling of the tokens of each row, after the final norm: `(x, mask) -> pooled`. Padding is left out where the
    `mask` is False; without a mask there is none."""

    @abc.abstractmethod
    def __call__(self, x: HiddenStates, mask: PaddingMask | None = None) -> Float[Array, "batch _"]:
        """Return one vector per row."""


def take_first_token(x: HiddenStates, mask: PaddingMask | None = None) -> PooledTokens:
    """Return the first token that is not padding: the class token."""
    if mask is None:
        return x[:, 0]
    return jnp.take_along_axis(x, jnp.argmax(mask, axis=1)[:, None, None], axis=1)[:, 0]


class ClassTokenPooler(AbstractPooler):
    """The class token, which is the first, and the norm of it if there is one (CLIP normalizes no other token)."""

    norm: AbstractNorm | None = None

    def __call__(self, x: HiddenStates, mask: PaddingMask | None = None) -> PooledTokens:
        pooled = take_first_token(x, mask)
        if self.norm is None:
            return pooled
        return self.norm(pooled)


class EndTokenPooler(AbstractPooler):
    """The end token, the last that a causal encoder of texts reads (CLIP, Radford et al., arXiv:2103.00020, section
    2.4)."""

    end: int | None = eqx.field(static=True)
    """Its id; None for the highest id of each row."""

    def find_end(self, tokens: Tokens, mask: PaddingMask | None = None) -> PaddingMask:
        """Return True at the end tokens of each row, of which the first counts. Without any it is the first token."""
        real = tokens if mask is None else jnp.where(mask, tokens, -1)
        end = real.max(1, keepdims=True) if self.end is None else self.end
        return real == end

    def __call__(self, x: HiddenStates, mask: PaddingMask | None = None) -> PooledTokens:
        """`mask`: True where `find_end` is."""
        return take_first_token(x, mask)


class DensePooler(AbstractPooler):
    """activation(W x + b) of the class token, as in BERT and ViT."""

    linear: AbstractLinear

    activation: Callable = eqx.field(static=True)

    def __init__(self, embed: int, size: int, *, activation: Callable = jnp.tanh, key: Key[Array, ""]):
        """`size`: of the result."""
        self.linear = Linear(embed, size, in_=Dim("embed"), bias=True, key=key)
        self.activation = activation

    def __call__(self, x: HiddenStates, mask: PaddingMask | None = None) -> Float[Array, "batch _"]:
        return self.activation(self.linear(take_first_token(x, mask)))


class AttentionPooler(AbstractPooler):
    """Multihead attention pooling (Zhai et al., arXiv:2106.04560; Lee et al., arXiv:1810.00825): a learned `probe`
    attends to all tokens.

        y = W_out softmax(W_query probe (W_key x)ᵀ / sqrt(head_dim)) W_value x
        pooled = y + W_down activation(W_up norm(y))

    Heads are sharded over `tensor`.
    """

    probe: Float[Array, "embed"]
    query: AbstractLinear
    key: AbstractLinear
    value: AbstractLinear
    out: AbstractLinear
    norm: AbstractNorm
    up: AbstractLinear
    down: AbstractLinear

    head_dim: int = eqx.field(static=True)
    activation: Callable = eqx.field(static=True)
    implementation: str | Callable = implementation_option(ATTENTION)

    def __init__(
        self,
        embed: int,
        heads: int,
        mlp: int,
        *,
        norm: Callable[[], AbstractNorm],
        activation: Callable = jax.nn.gelu,
        implementation: str | Callable = "auto",
        key: Key[Array, ""],
    ):
        """**Raises** `ValueError` if heads does not divide embed."""
        probe_key, query_key, key_key, value_key, out_key, up_key, down_key = jax.random.split(key, 7)
        self.head_dim = resolve_head_dim(embed, heads, None)
        self.implementation = implementation
        self.norm = norm()
        self.activation = activation
        inner = {"in_": Dim("embed"), "out": Dim("heads", self.head_dim), "bias": True}
        self.probe = truncated_normal(probe_key, (embed,), embed**-0.5)
        self.query = Linear(embed, embed, **inner, key=query_key)
        self.key = Linear(embed, embed, **inner, key=key_key)
        self.value = Linear(embed, embed, **inner, key=value_key)
        self.out = Linear(embed, embed, in_=inner["out"], out=inner["in_"], bias=True, key=out_key)
        self.up = Linear(embed, mlp, in_=Dim("embed"), out=Dim("mlp"), bias=True, key=up_key)
        self.down = Linear(mlp, embed, in_=Dim("mlp"), out=Dim("embed"), bias=True, key=down_key)

    def __call__(self, x: HiddenStates, mask: PaddingMask | None = None) -> PooledTokens:
        probe = jnp.broadcast_to(self.probe, (x.shape[0], 1, self.probe.shape[0]))
        split_heads = lambda y: y.reshape(*y.shape[:2], -1, self.head_dim)
        query, key, value = map(split_heads, (self.query(probe), self.key(x), self.value(x)))
        segments: dict[str, Any] = {}
        if mask is not None:
            segments = {"query_segments": jnp.ones((x.shape[0], 1), int), "key_segments": mask.astype(int)}
        attention_mask = AttentionMask(causal=False, **segments)
        pooled = attention(query, key, value, attention_mask, implementation=self.implementation)
        pooled = self.out(pooled.reshape(x.shape[0], -1))
        return pooled + self.down(self.activation(self.up(self.norm(pooled))))

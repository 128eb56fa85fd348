"""Gated residual streams: a layer reads several streams by gates of each feature, and adds to them without mixing them
(Qwen4-Exp; Qwen team, 2026); and layers whose streams receive embeddings of n-grams.

`make_gated_connections` returns the parts of a model for `build_decoder`, as `make_hyper_connections` does, whose
block, `HyperConnectionBlock`, these layers have.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from zoo.layers import AbstractLinear, AbstractNorm, Linear, TokenInfo
from zoo.layers.abstract import run_mixer
from zoo.layers.ngram import NGramMemory
from zoo.layers.norm import StreamNorm
from zoo.parallel import Dim, all_gather

from .decoder import Hidden
from .hyper_connections import (
    AbstractStreamConnection,
    HyperConnectionBlock,
    HyperConnectionInputs,
    SideBySide,
    check_streams,
    split_streams,
)
from .layer_inputs import TokenHidden


class GatedConnection(AbstractStreamConnection):
    """Gates of one sublayer on n streams X (Qwen4-Exp; Qwen team, 2026), a norm of each stream among them:

        Z = norm(X),    input = mean over streams of sigmoid(W_up silu(W_down Z / n)) Z
        X = X + 2 sigmoid(W_inject Z / n) ⊗ output

    Streams are not mixed with one another but in the input. Without `inject`, the input is the sum before the head.
    """

    norm: StreamNorm
    down: AbstractLinear
    up: AbstractLinear
    inject: AbstractLinear | None

    streams: int = eqx.field(static=True)

    def __init__(
        self,
        embed: int,
        streams: int,
        rank: int,
        norm: Callable[[], StreamNorm],
        *,
        injects: bool = True,
        key: Key[Array, ""],
    ):
        """- `rank`: of the gates of the input. `norm`: factory of the norm of the streams.
        - `injects`: write the streams, too.

        **Raises** `ValueError` unless there is a stream.
        """
        check_streams(streams)
        down_key, up_key, inject_key = jax.random.split(key, 3)
        embed_dim, latent = Dim("embed"), Dim("latent")
        self.norm = norm()
        self.down = Linear(streams * embed, rank, in_=embed_dim, out=latent, key=down_key)
        self.up = Linear(rank, streams * embed, in_=latent, out=embed_dim, key=up_key)
        self.inject = Linear(streams * embed, streams, in_=embed_dim, key=inject_key) if injects else None
        self.streams = streams

    def read(self, x: SideBySide) -> tuple[Float[Array, "*rows embed"], Float[Array, "*rows streams"] | None]:
        normed = self.norm(x)
        gates = jax.nn.sigmoid(self.up(jax.nn.silu(self.down(normed) / self.streams)))
        read = split_streams(gates * normed, self.streams).mean(-2)
        if self.inject is None:
            return read, None
        return read, 2 * jax.nn.sigmoid(self.inject(normed) / self.streams)

    def write(
        self, x: SideBySide, output: Float[Array, "*rows embed"], weights: Float[Array, "*rows streams"]
    ) -> SideBySide:
        return x + (weights[..., None] * output[..., None, :]).reshape(x.shape)


class GatedStreamNorm(AbstractNorm):
    """The input of the head, as a `GatedConnection` reads it from n streams."""

    connection: GatedConnection

    def __call__(self, x: SideBySide) -> Float[Array, "*rows embed"]:
        return self.connection.read(x)[0]


class NGramBlock(HyperConnectionBlock):
    """A `HyperConnectionBlock` whose streams first receive the embeddings of n-grams: X = X + memory(X, tokens)."""

    memory: NGramMemory

    def init_state(self, batch: int, length: int, dtype: Any = jnp.float32) -> tuple[Any, Any]:
        """Return the empty states of the memory and of the mixer."""
        return self.memory.init_state(batch, length, dtype), self.mixer.init_state(batch, length, dtype)

    def __call__(self, hidden: Hidden, info: TokenInfo, state: Any = None) -> tuple[Hidden, Any]:
        """**Raises** `TypeError` for hidden states without the ids of the tokens."""
        if not isinstance(hidden, TokenHidden) or hidden.tokens is None:
            raise TypeError("NGramBlock reads the ids of tokens: build its decoder with keeps_tokens=True")
        memory_state, mixer_state = (None, None) if state is None else state
        tokens = hidden.tokens
        if state is not None:
            tokens = all_gather(tokens, "seq", axis=1)
        memory = eqx.tree_at(lambda x: x.tokens, self.memory, tokens, is_leaf=lambda x: x is None)
        remembered, memory_state = run_mixer(memory, hidden.x, info, memory_state)
        hidden, mixer_state = super().__call__(hidden.add_residual(remembered), info, mixer_state)
        return hidden, None if state is None else (memory_state, mixer_state)


def make_gated_connections(
    embed: int,
    streams: int,
    rank: int,
    *,
    epsilon: float = 1e-6,
    offset: float = 0.0,
    keeps_tokens: bool = False,
    key: Key[Array, ""],
) -> dict[str, Any]:
    """Return the arguments of `build_decoder` that wire its layers with a `GatedConnection` for each sublayer. These
    have the norms, and layers have no other: `norm=IdentityNorm`.

    - `rank`: of the gates of a sublayer's input.
    - `epsilon`, `offset`: of the norms, as in `zoo.layers.RMSNorm`.
    - `keeps_tokens`: hand the ids of the tokens on to every layer, for an `NGramBlock`.

    **Raises** `ValueError` unless there is a stream.
    """
    check_streams(streams)
    norm = partial(StreamNorm, embed, streams, epsilon=epsilon, offset=offset)
    connection = partial(GatedConnection, embed, streams, rank, norm)
    return {
        "block": HyperConnectionBlock,
        "parts": {"mixer_connection": connection, "ffn_connection": connection},
        "layer_inputs": lambda key: HyperConnectionInputs(streams, keeps_tokens),
        "final_norm": lambda: GatedStreamNorm(connection(injects=False, key=key)),
    }


def make_ngram_block(memory: Callable[..., NGramMemory], key: Key[Array, ""], **parts: Any) -> NGramBlock:
    """Make the block of a layer with a memory of n-grams. `memory` is its factory, called with `key=`, and `parts` are
    what `build_decoder` makes: a factory for its `block`, with `functools.partial`."""
    return NGramBlock(memory=memory(key=key), **parts)

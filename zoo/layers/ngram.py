"""Memory of n-grams: embeddings that are looked up by the last tokens of a text, and added to the residual stream."""

import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from zoo.ops.convolution import lag_inputs
from zoo.ops.ngram import hash_ngrams, list_primes, make_multipliers
from zoo.parallel import Dim, Module, num_shards, reduce, stacked
from zoo.parallel.collectives import shard_offset
from zoo.shapes import HiddenStates, ResidualStream, Tokens

from .abstract import AbstractLinear, AbstractMixer, AbstractNorm
from .convolution import ConvState, ShortConvolution, extend_inputs, extend_segment_ids
from .linear import Linear, truncated_normal
from .norm import StreamNorm
from .recurrent.context import RecurrenceContext
from .token_info import TokenInfo

_LEAST_GATE = 1e-6
_MOST_TOKENS = 2**24
"""Ids below this number are exact in float32."""


class NGramState(Module):
    """The last tokens of each text, oldest first, as whole numbers: a cast does not round them."""

    tokens: Int[Array, "batch history"]


class NGramTable(Module):
    """Rows of a table of n-grams."""

    weight: Float[Array, "grams features"]

    def __init__(self, rows: int, size: int, *, scale: float, key: Key[Array, ""]):
        """Initialize as `zoo.layers.Embedding` does."""
        self.weight = truncated_normal(key, (rows, size), scale)


class NGramEmbedding(Module):
    """Embedding of the bigrams, trigrams and so on that end in a token, each looked up by `heads` hashes
    (`zoo.ops.ngram`; Cheng et al., arXiv:2601.07372, section 2.2):

        e_t = concatenation over n and hashes of table[hash(x_t, ..., x_{t-n+1})]

    Hashes have different primes as sizes, from `size` on, and rows of their own in one table. The table may be cut into
    `parts` with equal numbers of rows, as in files; rows of a part are sharded over `tensor`. An n-gram does not reach
    over a `boundary`, the end of a text, or out of its segment: tokens before these count as boundaries.
    """

    tables: NGramTable = stacked("parts")

    order: int = eqx.field(static=True)
    """Tokens of the longest n-grams."""
    boundary: int = eqx.field(static=True)
    multipliers: tuple[int, ...] = eqx.field(static=True)
    sizes: tuple[tuple[int, ...], ...] = eqx.field(static=True)
    """Sizes of the hashes of bigrams, of trigrams and so on."""

    def __init__(
        self,
        vocab: int,
        embed: int,
        *,
        order: int = 3,
        heads: int = 8,
        size: int,
        boundary: int,
        seed: int = 0,
        number: int = 0,
        parts: int = 1,
        multiple: int = 1,
        key: Key[Array, ""],
    ):
        """- `embed`: features of all hashes together.
        - `size`: least size of a hash.
        - `seed`, `number`: the hashes follow from both. Two tables of a model have different numbers.
        - `multiple`: the table has a multiple of so many rows.

        **Raises** `ValueError` for sizes that do not fit together, and for ids from 2^24 on.
        """
        count = (order - 1) * heads
        if order < 2 or heads < 1 or embed % count:
            raise ValueError(f"{embed} features do not divide evenly over {heads} hashes of n-grams up to {order}")
        if not 0 <= boundary < vocab < _MOST_TOKENS:
            raise ValueError(f"boundary {boundary} is an id below vocab={vocab}, which is below {_MOST_TOKENS}")
        primes = list_primes(size, count * (number + 1))[count * number :]
        rows = -(-sum(primes) // multiple) * multiple
        if rows >= 2**31:
            raise ValueError(f"{rows} rows are more than an int32 counts")
        if parts < 1 or rows % parts:
            raise ValueError(f"{rows} rows do not divide evenly over {parts} parts")
        make = eqx.filter_vmap(lambda key: NGramTable(rows // parts, embed // count, scale=embed**-0.5, key=key))
        self.tables = make(jax.random.split(key, parts))
        self.order = order
        self.boundary = boundary
        self.multipliers = make_multipliers(vocab, order, seed, number)
        self.sizes = tuple(tuple(primes[first : first + heads]) for first in range(0, count, heads))

    def init_state(self, batch: int) -> NGramState:
        """Return the state before the first token: boundaries."""
        return NGramState(jnp.full((batch, self.order - 1), self.boundary, jnp.int32))

    def __call__(
        self, tokens: Tokens, context: RecurrenceContext, state: NGramState | None = None
    ) -> tuple[Float[Array, "batch seq _"], NGramState | None]:
        """Return the embeddings, and the updated state unless `state` is None."""
        distance = self._measure_distance(tokens)
        history = None if state is None else ConvState(self._measure_distance(state.tokens), Dim("features"))
        inputs = extend_inputs(distance, self.order - 1, context, history)
        segment_ids = extend_segment_ids(self.order - 1, context)
        grams = [distance]
        for lag in range(1, self.order):
            earlier = lag_inputs(inputs, lag, tokens.shape[1], segment_ids)
            grams.append(earlier if lag == 1 else jnp.where(grams[-1] == 0, 0, earlier))
        ids = self._find_ids(jnp.concatenate(grams, axis=-1))
        embedded = self._look_up(hash_ngrams(ids, self.multipliers, self.sizes))
        if state is None:
            return embedded, None
        return embedded, NGramState(self._find_ids(inputs[:, 1 - self.order :, 0]))

    def _measure_distance(self, tokens: Int[Array, "batch _"]) -> Float[Array, "batch _ 1"]:
        """Return ids as features whose 0 is a boundary, as what precedes a text."""
        return (tokens - self.boundary).astype(jnp.float32)[..., None]

    def _find_ids(self, distance: Float[Array, "batch _ *order"]) -> Int[Array, "batch _ *order"]:
        return distance.astype(jnp.int32) + self.boundary

    def _look_up(self, hashes: Int[Array, "batch seq heads"]) -> Float[Array, "batch seq _"]:
        sizes = [size for sizes in self.sizes for size in sizes]
        ids = hashes + jnp.array([sum(sizes[:number]) for number in range(len(sizes))])
        table = self.tables.weight
        local = table.shape[1]
        part, row = jnp.divmod(ids, local * num_shards(table, "grams"))
        row = row - shard_offset(table, "grams", local)
        is_local = (row >= 0) & (row < local)
        rows = jnp.where(is_local[..., None], table[part, jnp.where(is_local, row, 0)], 0)
        return reduce(rows, over="grams").reshape(*ids.shape[:2], -1)


class NGramMemory(AbstractMixer):
    """Embeddings e of n-grams, added to each residual stream s by its gate (Engram; Cheng et al., arXiv:2601.07372,
    section 2.3):

        g_s = q_s . k_s / sqrt(embed),    q = norm(x),    k = norm(W_key e)
        y_s = v_s + silu(conv(norm(v)))_s,    v_s = sigmoid(sign(g_s) sqrt(max(|g_s|, 1e-6))) W_value e

    The convolution is depthwise and causal, over `conv_width` tokens at a distance of `order`, and begins with zeros:
    its taps lie beyond the n-grams.

    A block that knows the ids of the tokens gives them to the layer: `zoo.models.gated_connections.NGramBlock`.
    """

    shards_sequence = True

    embedding: NGramEmbedding
    key: AbstractLinear
    value: AbstractLinear
    query_norm: AbstractNorm
    key_norm: AbstractNorm
    conv_norm: AbstractNorm
    convolution: ShortConvolution
    tokens: Int[Array, "batch seq"] | None
    """Ids of the tokens, in a block that runs; else None."""

    streams: int = eqx.field(static=True)

    def __init__(
        self,
        embed: int,
        vocab: int,
        *,
        size: int,
        boundary: int,
        streams: int = 1,
        memory: int | None = None,
        conv_width: int = 4,
        order: int = 3,
        epsilon: float = 1e-6,
        offset: float = 0.0,
        key: Key[Array, ""],
        **options: Any,
    ):
        """- `memory`: features of the embedding of n-grams, `embed` by default.
        - `epsilon`, `offset`: of the norms.

        `size`, `boundary`, `order` and other options are of `NGramEmbedding`. **Raises** `ValueError` as it does.
        """
        table_key, key_key, value_key, conv_key = jax.random.split(key, 4)
        memory = embed if memory is None else memory
        self.embedding = NGramEmbedding(
            vocab, memory, order=order, size=size, boundary=boundary, **options, key=table_key
        )
        into, features = Dim("latent"), Dim("features")
        self.key = Linear(memory, streams * embed, in_=into, out=Dim("embed"), key=key_key)
        self.value = Linear(memory, embed, in_=into, out=Dim("embed"), key=value_key)
        norms = {"epsilon": epsilon, "offset": offset}
        self.query_norm, self.key_norm, self.conv_norm = (StreamNorm(embed, streams, **norms) for _ in range(3))
        convolution = ShortConvolution(streams * embed, conv_width, dilation=order, features=features, key=conv_key)
        self.convolution = eqx.tree_at(lambda x: x.weight, convolution, replace_fn=jnp.zeros_like)
        self.tokens = None
        self.streams = streams

    def init_state(self, batch: int, length: int, dtype: Any = jnp.float32) -> tuple[NGramState, ConvState]:
        """Return the last tokens and the last inputs of the convolution."""
        return self.embedding.init_state(batch), self.convolution.init_state(batch, dtype)

    def __call__(
        self, x: HiddenStates, info: TokenInfo, state: tuple[NGramState, ConvState] | None = None
    ) -> tuple[ResidualStream, tuple[NGramState, ConvState] | None]:
        """`x`: the residual streams, side by side. **Raises** `ValueError` without the ids of the tokens."""
        if self.tokens is None:
            raise ValueError("NGramMemory reads the ids of tokens, and its block does not have them: use an NGramBlock")
        context = RecurrenceContext.from_info(x, info, state)
        embedded, token_state = self.embedding(self.tokens, context, None if state is None else state[0])
        embedded = embedded.astype(x.dtype)
        shape = (*x.shape[:2], self.streams, -1)
        query, key = self.query_norm(x).reshape(shape), self.key_norm(self.key(embedded)).reshape(shape)
        products = (query.astype(jnp.float32) * key.astype(jnp.float32)).sum(-1, keepdims=True)
        gate = products / math.sqrt(query.shape[-1])
        gate = jax.nn.sigmoid(jnp.sqrt(jnp.maximum(jnp.abs(gate), _LEAST_GATE)) * jnp.sign(gate))
        gated = (gate.astype(x.dtype) * self.value(embedded)[:, :, None]).reshape(x.shape)
        mixed, conv_state = self.convolution(self.conv_norm(gated), context, None if state is None else state[1])
        y = gated + jax.nn.silu(mixed)
        if token_state is None or conv_state is None:
            return y, None
        return y, (token_state, conv_state)

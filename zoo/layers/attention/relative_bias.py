"""Softmax attention with learned biases of relative position: T5 and MPNet."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int, Key

from zoo.ops.attention import AttentionMask
from zoo.ops.attention.mask import MASK_VALUE
from zoo.parallel import Module, all_gather
from zoo.shapes import HeadVectors, HiddenStates, ResidualStream

from ..abstract import AbstractLinear, AbstractMixer
from ..heads import split_heads
from ..kv_cache import KeyValueCache, mark_overfull, require_positions
from ..linear import truncated_normal
from ..token_info import TokenInfo, token_positions
from .base import check_attention_sizes, make_cache, make_projections, update_cache
from .context import find_places


class RelativeBias(Module):
    """Bias of each head's scores, for each bucket of distances (T5; Raffel et al., arXiv:1910.10683, section 2.1)."""

    weight: Float[Array, "distances heads"]

    def __init__(self, buckets: int, heads: int, *, scale: float = 1.0, key: Key[Array, ""]):
        self.weight = truncated_normal(key, (buckets, heads), scale)

    def __call__(self, index: Int[Array, "*rows query_seq key_seq"]) -> Float[Array, "*rows heads query_seq key_seq"]:
        """Return the biases of buckets, in float32."""
        return jnp.moveaxis(self.weight.astype(jnp.float32)[index], -1, -3)


class RelativeBiasAttention(AbstractMixer):
    """Attention with a bias for each head and bucket of distances (T5; Raffel et al., arXiv:1910.10683, section 2.1;
    MPNet, Song et al., arXiv:2004.09297):

        y = W_out softmax(scale q kᵀ + bias[bucket(j - i)]) v

    for query i and key j, see `compute_bucket_index`. It is causal, or sees the tokens on both sides. Scores and
    softmax are computed in float32, by their definition.

    The `relative_bias` is the layer's own, or one that layers share, which the stack puts in its place. Heads are
    sharded over `tensor`. Keys and values are all-gathered where `context` shards the sequence or the slots of a cache.
    """

    shards_sequence = True

    query: AbstractLinear
    key: AbstractLinear
    value: AbstractLinear
    out: AbstractLinear
    relative_bias: Module

    head_dim: int = eqx.field(static=True)
    scale: float = eqx.field(static=True)
    causal: bool = eqx.field(static=True)
    max_distance: int = eqx.field(static=True)

    def __init__(
        self,
        embed: int,
        heads: int,
        relative_bias: Callable[..., Module],
        *,
        head_dim: int | None = None,
        scale: float | None = None,
        causal: bool = False,
        max_distance: int = 128,
        bias: bool = False,
        out_bias: bool = False,
        out_scale: float = 1.0,
        key: Key[Array, ""],
    ):
        """- `relative_bias`: factory of the `RelativeBias`, or of its stand-in, called with `key=`.
        - `scale`: of the scores, head_dim ** -0.5 by default.
        - `max_distance`: of `compute_bucket_index`.

        **Raises** `ValueError` if heads does not divide embed and there is no `head_dim`.
        """
        heads, head_dim = check_attention_sizes(embed, heads, None, head_dim)
        options = {"bias": bias, "out_bias": out_bias, "out_scale": out_scale}
        projections = make_projections(embed, heads, heads, head_dim, key=key, **options)
        self.query, self.key, self.value, self.out = projections
        self.relative_bias = relative_bias(key=jax.random.fold_in(key, 1))
        self.head_dim = head_dim
        self.scale = head_dim**-0.5 if scale is None else float(scale)
        self.causal = causal
        self.max_distance = max_distance

    def __call__(
        self, x: HiddenStates, info: TokenInfo, state: KeyValueCache | None = None
    ) -> tuple[ResidualStream, KeyValueCache | None]:
        """With a KV cache as `state`, the new tokens follow the cached ones, at `info.positions`.

        **Raises** `ValueError` for a cache without positions.
        """
        query, key, value = (split_heads(linear(x), self.head_dim) for linear in (self.query, self.key, self.value))
        query, key, value = map(checkpoint_name, (query, key, value), ("query", "key", "value"))
        positions = jnp.broadcast_to(token_positions(x, info), x.shape[:2])
        if state is None:
            key, value, key_positions = (all_gather(y, "seq", axis=1) for y in (key, value, positions))
            mask = self._mask(query, info, key.shape[1])
        else:
            require_positions(info, state)
            key, value, key_positions, state = update_cache(state, key, value, info.positions, None)
            key, value, key_positions = (all_gather(y, "slots", axis=1) for y in (key, value, key_positions))
            mask = AttentionMask(True, query_positions=positions, key_positions=key_positions)
        distances = key_positions[:, None, :] - positions[:, :, None]
        table: Any = self.relative_bias
        options = {"max_distance": self.max_distance, "causal": self.causal}
        biases = table(compute_bucket_index(distances, buckets=len(table.weight), **options))
        mixed = biased_attention(query, key, value, biases, mask, scale=self.scale)
        if state is not None:
            mixed = mark_overfull(mixed, state)
        return self.out(checkpoint_name(mixed, "attention").reshape(*mixed.shape[:2], -1)), state

    def _mask(self, query: HeadVectors, info: TokenInfo, key_seq: int) -> AttentionMask:
        """Return the mask within a sequence: by places in the row, and by segments."""
        segments = info.segment_ids
        every = None if segments is None else all_gather(segments, "seq", axis=1)
        return AttentionMask(self.causal, None, segments, every, *find_places(query, key_seq))

    def init_state(self, batch: int, length: int, dtype: Any = jnp.float32) -> KeyValueCache:
        """Return an empty KV cache for `length` tokens. **Raises** `NotImplementedError` for attention that is not
        causal: a token attends to those after it."""
        if not self.causal:
            raise NotImplementedError("attention in both directions has no KV cache: a token attends to those after it")
        return make_cache(batch, length, self.key.out_size // self.head_dim, self.head_dim, dtype)


def biased_attention(
    query: HeadVectors,
    key: Float[Array, "batch key_seq heads _"],
    value: Float[Array, "batch key_seq heads _"],
    biases: Float[Array, "rows heads query_seq key_seq"],
    mask: AttentionMask,
    *,
    scale: float,
) -> HeadVectors:
    """Compute softmax(scale q kᵀ + biases) v by its definition in float32. The result has the dtype of `value`. The
    output of a query that sees no key is meaningless."""
    contract = partial(jnp.einsum, precision="highest", preferred_element_type=jnp.float32)
    scores = scale * contract("bqhd,bkhd->bhqk", query, key) + biases
    allowed = mask.materialize(query.shape[1], key.shape[1])
    if allowed is not None:
        scores = jnp.where(allowed[:, None], scores, MASK_VALUE)
    return contract("bhqk,bkhd->bqhd", jax.nn.softmax(scores, axis=-1), value.astype(jnp.float32)).astype(value.dtype)


def compute_bucket_index(
    distances: Int[Array, "*rows query_seq key_seq"], *, buckets: int, max_distance: int, causal: bool = False
) -> Int[Array, "*rows query_seq key_seq"]:
    """Return the bucket of each distance from a query to a key, in T5's buckets.

    Of n buckets the first m = n / 2 hold the distances back from 0 to m - 1, and beyond they grow as logarithms:
    m + floor(m log(distance / m) / log(`max_distance` / m)), at most n - 1. If `causal`, these are all buckets, and
    later keys are in the first; else there are as many more for keys after the query.
    """
    if causal:
        steps = jnp.asarray(_compute_log_buckets(buckets, max_distance))
        return steps[jnp.clip(-distances, 0, max_distance)]
    steps = jnp.asarray(_compute_log_buckets(buckets // 2, max_distance))
    back = steps[jnp.minimum(jnp.abs(distances), max_distance)]
    return jnp.where(distances > 0, back + buckets // 2, back)


def _compute_log_buckets(buckets: int, max_distance: int) -> np.ndarray:
    """Return the buckets of the distances 0, 1, ..., `max_distance`; the last also holds all larger distances."""
    exact = buckets // 2
    distances = np.arange(max_distance + 1)
    ratio = np.maximum(distances, exact).astype(np.float32) / np.float32(exact)
    logs = np.log(ratio) / np.float32(math.log(max_distance / exact)) * np.float32(buckets - exact)
    return np.where(distances < exact, distances, np.minimum(exact + logs.astype(np.int32), buckets - 1))

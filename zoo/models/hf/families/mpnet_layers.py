"""Attention in both directions with T5's biases of relative position: MPNet."""

import math

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int, Key

from zoo.layers import AbstractLinear, TokenInfo
from zoo.layers.attention.base import check_attention_sizes, make_projections
from zoo.layers.heads import split_heads
from zoo.layers.token_info import token_positions
from zoo.models.encoders.relative import AbstractRelativeMixer, biased_attention
from zoo.ops.attention import AttentionMask
from zoo.shapes import HiddenStates, ResidualStream


class RelativeBiasAttention(AbstractRelativeMixer):
    """Attention in both directions with a bias for each head and bucket of distances (T5; Raffel et al.,
    arXiv:1910.10683, section 2.1; MPNet, Song et al., arXiv:2004.09297):

        y = W_out softmax(q kᵀ / sqrt(head_dim) + bias[bucket(j - i)]) v

    for query i and key j, see `compute_bucket_index`. The biases are those of a `RelativeBias`, which all layers share.
    Scores and softmax are computed in float32.

    Distances are between tokens of one segment. Heads are sharded over `tensor`. The sequence is not: `context` stays
    at 1.
    """

    query: AbstractLinear
    key: AbstractLinear
    value: AbstractLinear
    out: AbstractLinear

    head_dim: int = eqx.field(static=True)
    max_distance: int = eqx.field(static=True)

    def __init__(
        self,
        embed: int,
        heads: int,
        *,
        max_distance: int = 128,
        bias: bool = False,
        out_bias: bool = False,
        out_scale: float = 1.0,
        key: Key[Array, ""],
    ):
        """`max_distance`: of `compute_bucket_index`. **Raises** `ValueError` if heads does not divide embed."""
        heads, head_dim = check_attention_sizes(embed, heads, None, None)
        options = {"bias": bias, "out_bias": out_bias, "out_scale": out_scale}
        projections = make_projections(embed, heads, heads, head_dim, key=key, **options)
        self.query, self.key, self.value, self.out = projections
        self.head_dim = head_dim
        self.max_distance = max_distance

    def mix(
        self, x: HiddenStates, info: TokenInfo, table: Float[Array, "distances heads"]
    ) -> tuple[ResidualStream, None]:
        query, key, value = (split_heads(linear(x), self.head_dim) for linear in (self.query, self.key, self.value))
        query, key, value = map(checkpoint_name, (query, key, value), ("query", "key", "value"))
        positions = token_positions(x, info)
        distances = positions[..., None, :] - positions[..., :, None]
        index = compute_bucket_index(distances, buckets=len(table), max_distance=self.max_distance)
        biases = jnp.moveaxis(table.astype(jnp.float32)[index.reshape(-1, *index.shape[-2:])], -1, 1)
        mask = AttentionMask(causal=False, query_segments=info.segment_ids, key_segments=info.segment_ids)
        mixed = biased_attention(query, key, value, biases, mask, scale=self.head_dim**-0.5)
        return self.out(checkpoint_name(mixed, "attention").reshape(*mixed.shape[:2], -1)), None


def compute_bucket_index(
    distances: Int[Array, "*rows query_seq key_seq"], *, buckets: int, max_distance: int
) -> Int[Array, "*rows query_seq key_seq"]:
    """Return the bucket of each distance from a query to a key, in T5's buckets of both directions.

    Half of them are for keys after the query. Of the other half, n, the first m = n / 2 hold the distances back from 0
    to m - 1, and beyond they grow as logarithms: m + floor(m log(distance / m) / log(`max_distance` / m)), at most
    n - 1.
    """
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

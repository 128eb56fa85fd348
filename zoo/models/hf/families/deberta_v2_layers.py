"""Attention in both directions whose scores have terms of content and of relative position: DeBERTa."""

from collections.abc import Collection
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int, Key

from zoo.layers import AbstractLinear, Linear, TokenInfo
from zoo.layers.attention.base import check_attention_sizes, make_projections
from zoo.layers.attention.relative_bias import biased_attention
from zoo.layers.heads import split_heads
from zoo.layers.token_info import token_positions
from zoo.models.encoders.relative import AbstractRelativeMixer, RelativeTable
from zoo.ops.attention import AttentionMask
from zoo.parallel import Dim
from zoo.shapes import HeadVectors, HiddenStates, ResidualStream

TERMS = ("c2p", "p2c")
"""Terms of position in the scores: content to position, position to content."""


class DisentangledAttention(AbstractRelativeMixer):
    """Disentangled attention, in both directions (DeBERTa; He et al., arXiv:2006.03654, equation 4):

        score = (q_i · k_j + q_i · k^r_d + k_j · q^r_d) / sqrt(head_dim (1 + terms))
        y = W_out softmax(score) v

    d is the bucket of the distance i - j, see `compute_distance_index`. Of the vectors of all distances, which a
    `RelativeEmbedding` has for all layers, the layer makes keys k^r (the term "c2p") and queries q^r ("p2c"), with its
    own projections of content or with further ones. Scores and softmax are computed in float32.

    Distances are between tokens of one segment. Heads are sharded over `tensor`. The sequence is not: `context` stays
    at 1.
    """

    query: AbstractLinear
    key: AbstractLinear
    value: AbstractLinear
    out: AbstractLinear
    position_key: AbstractLinear | None
    position_query: AbstractLinear | None

    head_dim: int = eqx.field(static=True)
    terms: tuple[str, ...] = eqx.field(static=True)
    max_distance: int = eqx.field(static=True)
    buckets: int | None = eqx.field(static=True)

    def __init__(
        self,
        embed: int,
        heads: int,
        *,
        max_distance: int,
        buckets: int | None = None,
        terms: Collection[str] = TERMS,
        shared: bool = True,
        bias: bool = True,
        out_bias: bool = True,
        out_scale: float = 1.0,
        key: Key[Array, ""],
    ):
        """- `max_distance`, `buckets`: of `compute_distance_index`.
        - `terms`: "c2p", "p2c" or both.
        - `shared`: project the vectors of distances as content is projected.

        **Raises** `ValueError` if heads does not divide embed, for other terms or none, and for buckets that are odd,
        fewer than 4, or reach as far as `max_distance`.
        """
        if not terms or not set(terms) <= set(TERMS):
            raise ValueError(f"the terms of position are c2p, p2c or both, not {list(terms)}")
        check_distances(max_distance, buckets)
        heads, head_dim = check_attention_sizes(embed, heads, None, None)
        key, position_key, position_query = jax.random.split(key, 3)
        options = {"bias": bias, "out_bias": out_bias, "out_scale": out_scale}
        projections = make_projections(embed, heads, heads, head_dim, key=key, **options)
        self.query, self.key, self.value, self.out = projections
        project = partial(Linear, embed, embed, in_=Dim("embed"), bias=bias)
        is_own = {term: term in terms and not shared for term in TERMS}
        if is_own["c2p"]:
            self.position_key = project(out=Dim("kv_heads", head_dim), key=position_key)
        else:
            self.position_key = None
        if is_own["p2c"]:
            self.position_query = project(out=Dim("heads", head_dim), key=position_query)
        else:
            self.position_query = None
        self.head_dim = head_dim
        self.terms = tuple(term for term in TERMS if term in terms)
        self.max_distance = max_distance
        self.buckets = buckets

    def mix(self, x: HiddenStates, info: TokenInfo, table: RelativeTable) -> tuple[ResidualStream, None]:
        query, key, value = (split_heads(linear(x), self.head_dim) for linear in (self.query, self.key, self.value))
        query, key, value = map(checkpoint_name, (query, key, value), ("query", "key", "value"))
        positions = token_positions(x, info)
        distances = positions[..., :, None] - positions[..., None, :]
        index = compute_distance_index(distances, max_distance=self.max_distance, buckets=self.buckets)
        project_key = self.key if self.position_key is None else self.position_key
        if self.position_query is None:
            project_query = self.query
        else:
            project_query = self.position_query
        split_distances = lambda linear: linear(table).reshape(len(table), -1, self.head_dim)
        keys = split_distances(project_key) if "c2p" in self.terms else None
        queries = split_distances(project_query) if "p2c" in self.terms else None
        mask = AttentionMask(causal=False, query_segments=info.segment_ids, key_segments=info.segment_ids)
        scale = (self.head_dim * (1 + len(self.terms))) ** -0.5
        biases = scale * compute_position_scores(query, key, keys, queries, index.reshape(-1, *index.shape[-2:]))
        mixed = biased_attention(query, key, value, biases, mask, scale=scale)
        return self.out(checkpoint_name(mixed, "attention").reshape(*mixed.shape[:2], -1)), None


def compute_position_scores(
    query: HeadVectors,
    key: HeadVectors,
    position_keys: Float[Array, "distances heads head_dim"] | None,
    position_queries: Float[Array, "distances heads head_dim"] | None,
    index: Int[Array, "rows query_seq key_seq"],
) -> Float[Array, "batch heads query_seq key_seq"]:
    """Return the sum of the terms of position in the scores, in float32, with the row `index` of the distance of each
    query to each key."""
    contract = partial(jnp.einsum, precision="highest", preferred_element_type=jnp.float32)
    index = index[:, None]
    terms = []
    if position_keys is not None:
        products = contract("bqhd,rhd->bhqr", query, position_keys)
        terms.append(jnp.take_along_axis(products, index, axis=-1))
    if position_queries is not None:
        products = contract("bkhd,rhd->bhkr", key, position_queries)
        picked = jnp.take_along_axis(products, index.swapaxes(-1, -2), axis=-1)
        terms.append(picked.swapaxes(-1, -2))
    return sum(terms[1:], start=terms[0])


def check_distances(max_distance: int, buckets: int | None) -> None:
    """**Raises** `ValueError` for buckets that are odd, fewer than 4, or reach as far as `max_distance`."""
    if buckets is not None and (buckets < 4 or buckets % 2 or buckets // 2 >= max_distance - 1):
        raise ValueError(
            f"buckets = {buckets} and max_distance = {max_distance}: buckets are an even number from 4 on, and half of "
            "them are fewer than max_distance - 1"
        )


def compute_distance_index(
    distances: Int[Array, "*rows query_seq key_seq"], *, max_distance: int, buckets: int | None
) -> Int[Array, "*rows query_seq key_seq"]:
    """Return the row of each distance in a table of 2 `span` rows: clip(bucket + span, 0, 2 span - 1).

    Without buckets, the bucket is the distance, and the span `max_distance` M. With b of them, the span is b; buckets
    of distances up to m = b / 2 are those themselves, and beyond grow as logarithms (DeBERTa v2):

        m + ceil((m - 1) log(distance / m) / log((M - 1) / m))
    """
    span = max_distance if buckets is None else buckets
    if buckets is not None:
        steps = jnp.asarray(_compute_log_buckets(max_distance, buckets))
        distances = jnp.sign(distances) * steps[jnp.minimum(jnp.abs(distances), max_distance)]
    return jnp.clip(distances + span, 0, 2 * span - 1)


def _compute_log_buckets(max_distance: int, buckets: int) -> np.ndarray:
    """Return the buckets of the distances 0, 1, ..., `max_distance`; the last also holds all larger distances."""
    middle = np.float32(buckets // 2)
    distances = np.arange(max_distance + 1)
    ratio = np.maximum(distances, middle).astype(np.float32) / middle
    logs = np.log(ratio) / np.log(np.float32((max_distance - 1) / (buckets // 2)))
    steps = np.where(distances <= middle, distances, np.ceil(logs * (middle - 1)) + middle).astype(np.int32)
    steps[-1] = buckets
    return steps

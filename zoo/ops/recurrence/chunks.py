"""Building blocks of chunked recurrences: splitting into chunks, segment boundaries, decayed products.

Decays are log decays in float32, and only sums of them from an earlier to a later token are exponentiated. Such sums
are never positive, so no exponential exceeds one, however strong decays are; a formulation with separate exp(G_i) and
exp(-G_j), G the cumulative sum, overflows for strong decays.

In shapes, `size` is the number of tokens in a chunk.
"""

from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from zoo.ops.matmul import einsum_fp32_accum
from zoo.shapes import SegmentIds

RecurrenceMode = Literal["recurrent", "chunked"]
"""The algorithm of a recurrence: a scan over tokens, or matrix products over chunks, with the same result."""

_MAX_PAIRWISE_SIZE = 4
"""Maximal size of chunks in which the decay of every pair of tokens is computed."""


def find_segment_starts(segment_ids: SegmentIds) -> Bool[Array, "batch seq"]:
    """Return True where a token's segment differs from that of the token before. The first continues the state."""
    changed = segment_ids[:, 1:] != segment_ids[:, :-1]
    return jnp.concatenate([jnp.zeros_like(changed, shape=(len(segment_ids), 1)), changed], axis=1)


def split_into_chunks(
    x: Float[Array, "batch seq heads *dims"], size: int
) -> Float[Array, "batch chunks heads size *dims"]:
    """Split a sequence into chunks of `size` tokens, zero-padding the last: zeros write nothing and do not decay."""
    batch, seq, heads, *dims = x.shape
    x = jnp.pad(x, [(0, 0), (0, -seq % size), *[(0, 0)] * (x.ndim - 2)])
    return jnp.moveaxis(x.reshape(batch, -1, size, heads, *dims), 3, 2)


def join_chunks(x: Float[Array, "batch chunks heads size *dims"], seq: int) -> Float[Array, "batch {seq} heads *dims"]:
    """Concatenate chunks into a sequence of `seq` tokens, without the padding of the last."""
    batch, chunks, heads, size, *dims = x.shape
    return jnp.moveaxis(x, 2, 3).reshape(batch, chunks * size, heads, *dims)[:, :seq]


def count_segment_starts(segment_ids: SegmentIds | None, seq: int, size: int) -> Int[Array, "_ chunks size"]:
    """Count the segments that start in a chunk up to each token, included.

    Tokens of a chunk are in the same segment where counts are equal; a token with count 0 reads the state before the
    chunk; the state after it contains the tokens with the last count.
    """
    if segment_ids is None:
        return jnp.zeros((1, -(-seq // size), size), jnp.int32)
    starts = jnp.pad(find_segment_starts(segment_ids), [(0, 0), (0, -seq % size)])
    return starts.reshape(len(starts), -1, size).astype(jnp.int32).cumsum(-1)


def decay_from_start(
    log_decay: Float[Array, "*lead size dim"], *, exclusive: bool = False
) -> Float[Array, "*lead size dim"]:
    """Compute the decay from the start of a chunk to each token, including its own step unless `exclusive`."""
    total = log_decay.cumsum(-2)
    return jnp.exp(_shift_right(total) if exclusive else total)


def decay_to_end(log_decay: Float[Array, "*lead size dim"]) -> Float[Array, "*lead size dim"]:
    """Compute the decay from each token, after its own step, to the end of the chunk."""
    return jnp.exp(_reverse_exclusive_cumsum(log_decay))


def _shift_right(x: Float[Array, "*lead size dim"]) -> Float[Array, "*lead size dim"]:
    """Shift by one token, with zero at the first."""
    return jnp.concatenate([jnp.zeros_like(x[..., :1, :]), x[..., :-1, :]], axis=-2)


def _reverse_exclusive_cumsum(log_decay: Float[Array, "*lead size dim"]) -> Float[Array, "*lead size dim"]:
    """Sum over all later tokens, from the end: the difference of two long sums would have their rounding error."""
    return jnp.flip(_shift_right(jnp.flip(log_decay, -2).cumsum(-2)), -2)


def decayed_product(
    rows: Float[Array, "*lead size dim"],
    columns: Float[Array, "*lead size dim"],
    log_decay: Float[Array, "*lead size dim"],
    *,
    strict: bool = False,
    exclusive: bool = False,
) -> Float[Array, "*lead size size"]:
    """Compute P_ij = sum over d of rows_id columns_jd exp(g_{j+1,d} + ... + g_{i,d}) for j <= i, and 0 for j > i.

    - `strict`: for j < i only.
    - `exclusive`: a row reads before its own step's decay, so the sum ends with g_{i-1}; implies strict.

    Computed by recursive halving: the decay between the two halves of a chunk is one from the middle to the row times
    one from the column to the middle, neither above one, so that this block is one matrix product. That takes
    log2(size) exponentials per element, instead of `size` for all pairs (GLA's secondary chunking, arXiv:2312.06635,
    section 4.3, has two levels of this). `size` is a power of two.
    """
    size = rows.shape[-2]
    if size <= _MAX_PAIRWISE_SIZE:
        return _decayed_product_pairwise(rows, columns, log_decay, strict=strict, exclusive=exclusive)
    halves = [x.reshape(*x.shape[:-2], 2, size // 2, x.shape[-1]) for x in (rows, columns, log_decay)]
    within = decayed_product(*halves, strict=strict, exclusive=exclusive)
    later_rows, earlier_columns, later_decay = (x[..., half, :, :] for x, half in zip(halves, (1, 0, 1), strict=True))
    later_rows = (later_rows * decay_from_start(later_decay, exclusive=exclusive)).astype(rows.dtype)
    earlier_columns = (earlier_columns * decay_to_end(halves[2][..., 0, :, :])).astype(rows.dtype)
    across = batched_matmul(later_rows, earlier_columns.mT)
    upper = jnp.concatenate([within[..., 0, :, :], jnp.zeros_like(across)], axis=-1)
    return jnp.concatenate([upper, jnp.concatenate([across, within[..., 1, :, :]], axis=-1)], axis=-2)


def _decayed_product_pairwise(
    rows: Float[Array, "*lead size dim"],
    columns: Float[Array, "*lead size dim"],
    log_decay: Float[Array, "*lead size dim"],
    *,
    strict: bool,
    exclusive: bool,
) -> Float[Array, "*lead size size"]:
    """Compute `decayed_product` with one exponential per pair."""
    total = log_decay.cumsum(-2)
    row_total = _shift_right(total) if exclusive else total
    mask = causal_mask(rows.shape[-2], strict=strict or exclusive)
    decay = jnp.exp(jnp.where(mask[..., None], row_total[..., :, None, :] - total[..., None, :, :], -jnp.inf))
    rows = rows.astype(jnp.float32)
    return (rows[..., :, None, :] * columns[..., None, :, :] * decay).sum(-1)


def exp_segsum(
    log_decay: Float[Array, "*lead size"], *, strict: bool = False, exclusive: bool = False
) -> Float[Array, "*lead size size"]:
    """Compute the decay between all pairs of tokens for scalar decays (Mamba-2's exp(segsum)), as `decayed_product` of
    ones.

    exp of differences of the cumulative sum would have its rounding error, 1e-4 at 20 per step, and takes
    size / log2(size) times as many exponentials.
    """
    ones = jnp.ones_like(log_decay)[..., None]
    return decayed_product(ones, ones, log_decay[..., None], strict=strict, exclusive=exclusive)


def causal_mask(size: int, *, strict: bool = False) -> Bool[Array, "size size"]:
    """Return a causal mask: True where column <= row, or column < row if `strict`."""
    return jnp.tril(jnp.ones((size, size), bool), -1 if strict else 0)


def batched_matmul(
    x: Float[Array, "*lead rows inner"], y: Float[Array, "*lead inner columns"]
) -> Float[Array, "*lead rows columns"]:
    """Multiply batches of matrices with float32 accumulation and result."""
    *lead, rows, inner = x.shape
    x, y = x.reshape(-1, rows, inner), y.reshape(-1, inner, y.shape[-1])
    return einsum_fp32_accum("brk,bkc->brc", x, y, dtype=jnp.float32).reshape(*lead, rows, y.shape[-1])

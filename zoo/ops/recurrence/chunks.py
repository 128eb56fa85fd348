"""Building blocks of chunked recurrences: splitting into chunks, segment boundaries, decayed products.

Decays are log decays in float32, and only sums of them from an earlier to a later token are exponentiated. Such sums
are never positive, so no exponential exceeds one, however strong decays are; a formulation with separate exp(G_i) and
exp(-G_j), G the cumulative sum, overflows for strong decays.

In shapes, `size` is the number of tokens in a chunk.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from zoo.ops.matmul import einsum_fp32_accum
from zoo.shapes import SegmentIds

_MAX_PAIRWISE_SIZE = 4
"""Maximal size of chunks in which the decay of every pair of tokens is computed."""


def find_segment_starts(segment_ids: SegmentIds) -> Bool[Array, "batch seq"]:
    """Return True where a token's segment differs from the previous token's. The first token continues the state."""
    changed = segment_ids[:, 1:] != segment_ids[:, :-1]
    return jnp.concatenate([jnp.zeros_like(changed, shape=(segment_ids.shape[0], 1)), changed], axis=1)


def is_in_first_segment(segment_ids: SegmentIds) -> Bool[Array, "batch seq"]:
    """Return True for tokens in the segment of their row's first token, which read the state before it."""
    return find_segment_starts(segment_ids).cumsum(1) == 0


def sum_log_decays(
    log_decay: Float[Array, "batch seq *dims"], segment_ids: SegmentIds | None
) -> Float[Array, "batch seq *dims"]:
    """Sum log decays from the first token to each, in float32; -inf in later segments. exp of the sum is the fraction
    of the state before the first token that a token retains."""
    total = log_decay.astype(jnp.float32).cumsum(1)
    if segment_ids is None:
        return total
    is_reached = is_in_first_segment(segment_ids)
    return jnp.where(is_reached.reshape(*is_reached.shape, *(1,) * (total.ndim - 2)), total, -jnp.inf)


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
    return starts.reshape(starts.shape[0], -1, size).astype(jnp.int32).cumsum(-1)


def decay_from_start(
    log_decay: Float[Array, "*lead size dim"], *, exclusive: bool = False
) -> Float[Array, "*lead size dim"]:
    """Compute the decay from the start of a chunk to each token, including its own step unless `exclusive`."""
    return jnp.exp(_sum_over_tokens(causal_mask(log_decay.shape[-2], strict=exclusive), log_decay))


def decay_to_end(log_decay: Float[Array, "*lead size dim"]) -> Float[Array, "*lead size dim"]:
    """Compute the decay from each token, after its own step, to the end of the chunk."""
    return jnp.exp(_sum_over_tokens(causal_mask(log_decay.shape[-2], strict=True).T, log_decay))


def _sum_over_tokens(
    mask: Bool[Array, "sums size"], log_decay: Float[Array, "*lead size dim"]
) -> Float[Array, "*lead sums dim"]:
    """Sum the log decays that each row of `mask` selects, by a product with it.

    XLA computes a cumulative sum as a chain of windowed reductions, which a CPU runs in one thread. A product adds only
    terms of one sign, so its error is relative to each sum itself; a difference of two longer sums would have the error
    of those sums.
    """
    *lead, size, dim = log_decay.shape
    if dim == 1:
        sums = jnp.matmul(log_decay.reshape(-1, size), mask.T.astype(log_decay.dtype), precision="highest")
        return sums.reshape(*lead, mask.shape[0], 1)
    return jnp.einsum("is,...sd->...id", mask.astype(log_decay.dtype), log_decay, precision="highest")


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
    if exclusive:
        row_total = jnp.pad(total[..., :-1, :], [(0, 0)] * (total.ndim - 2) + [(1, 0), (0, 0)])
    else:
        row_total = total
    mask = causal_mask(rows.shape[-2], strict=strict or exclusive)
    decay = jnp.exp(jnp.where(mask[..., None], row_total[..., :, None, :] - total[..., None, :, :], -jnp.inf))
    rows = rows.astype(jnp.float32)
    return (rows[..., :, None, :] * columns[..., None, :, :] * decay).sum(-1)


def exp_segsum(
    log_decay: Float[Array, "*lead size"], *, strict: bool = False, exclusive: bool = False
) -> Float[Array, "*lead size size"]:
    """Compute the decay between all pairs of tokens for scalar decays (Mamba-2's exp(segsum)), as `decayed_product` of
    ones.

    Each of the size^2 sums is a product with a mask of its own, all of them one matrix product: 2 size^3 FLOPs per
    chunk. exp of differences of the cumulative sum would inherit the sum's rounding error, 1e-4 at 20 per step.
    """
    size = log_decay.shape[-1]
    causal = causal_mask(size)
    between = causal[:, None, :] & causal_mask(size, strict=True).T
    total = _sum_over_tokens(between.reshape(size * size, size), log_decay[..., None])
    decay = jnp.where(causal, jnp.exp(total.reshape(*log_decay.shape, size)), 0)
    if strict or exclusive:
        return exclude_own_token(decay, exclusive=exclusive)
    return decay


def exclude_own_token(decay: Float[Array, "*lead size size"], *, exclusive: bool) -> Float[Array, "*lead size size"]:
    """Reduce the decays between pairs j <= i to pairs j < i; if `exclusive`, to decays without the row's own step."""
    if exclusive:
        return jnp.pad(decay[..., :-1, :], [(0, 0)] * (decay.ndim - 2) + [(1, 0), (0, 0)])
    return jnp.where(causal_mask(decay.shape[-1], strict=True), decay, 0)


def causal_mask(size: int, *, strict: bool = False) -> Bool[Array, "size size"]:
    """Return a causal mask: True where column <= row, or column < row if `strict`."""
    diagonal = -1 if strict else 0
    return jnp.tril(jnp.ones((size, size), bool), diagonal)


def batched_matmul(
    x: Float[Array, "*lead rows inner"], y: Float[Array, "*lead inner columns"], *, custom_vjp: bool = True
) -> Float[Array, "*lead rows columns"]:
    """Multiply batches of matrices with float32 accumulation and result. Rules of custom VJPs pass `custom_vjp=False`,
    as to `einsum_fp32_accum`."""
    *lead, rows, inner = x.shape
    x = x.reshape(-1, rows, inner)
    y = y.reshape(-1, inner, y.shape[-1])
    product = einsum_fp32_accum("brk,bkc->brc", x, y, dtype=jnp.float32, custom_vjp=custom_vjp)
    return product.reshape(*lead, rows, y.shape[-1])

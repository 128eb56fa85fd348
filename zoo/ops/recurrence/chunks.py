"""What the chunked forms of recurrences share: cutting time into chunks, borders of segments, and decayed products.

A decay is kept as its logarithm, in float32, and what is exponentiated is always a sum of decays between two times, the
later after the earlier: such a sum is never positive, so no exponential exceeds one however strong decays are. A form
that takes exp(G_i) and exp(-G_j) apart, G being the running sum, overflows where they are.

In shapes, `size` is a chunk's tokens; dims in front are whatever they are.
"""

from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from zoo.ops.matmul import einsum_fp32_accum

RecurrenceMode = Literal["recurrent", "chunked"]
"""How a recurrence is computed: token after token, or in products over chunks. Both give the same."""

_MAX_PAIRWISE_SIZE = 4
"""Up to so many tokens, decays between two tokens are written out for each pair."""


def find_segment_starts(segment_ids: Int[Array, "batch seq"]) -> Bool[Array, "batch seq"]:
    """Where a token is not of the segment of the one before it. The first goes on with what was before."""
    changed = segment_ids[:, 1:] != segment_ids[:, :-1]
    return jnp.concatenate([jnp.zeros_like(changed, shape=(len(segment_ids), 1)), changed], axis=1)


def split_into_chunks(
    x: Float[Array, "batch seq heads *dims"], size: int
) -> Float[Array, "batch chunks heads size *dims"]:
    """Time cut into chunks of `size` tokens, the last filled up with zeros: tokens that write nothing and do not
    decay."""
    batch, seq, heads, *dims = x.shape
    x = jnp.pad(x, [(0, 0), (0, -seq % size), *[(0, 0)] * (x.ndim - 2)])
    return jnp.moveaxis(x.reshape(batch, -1, size, heads, *dims), 3, 2)


def join_chunks(x: Float[Array, "batch chunks heads size *dims"], seq: int) -> Float[Array, "batch {seq} heads *dims"]:
    """Chunks one after another again, without what filled up the last."""
    batch, chunks, heads, size, *dims = x.shape
    return jnp.moveaxis(x, 2, 3).reshape(batch, chunks * size, heads, *dims)[:, :seq]


def count_segment_starts(
    segment_ids: Int[Array, "batch seq"] | None, seq: int, size: int
) -> Int[Array, "_ chunks size"]:
    """How many segments have begun in a token's chunk, up to it. Tokens of a chunk see each other where these numbers
    are equal; 0 sees what was before the chunk; what comes after sees the last number."""
    if segment_ids is None:
        return jnp.zeros((1, -(-seq // size), size), jnp.int32)
    first = jnp.pad(find_segment_starts(segment_ids), [(0, 0), (0, -seq % size)])
    return first.reshape(len(first), -1, size).astype(jnp.int32).cumsum(-1)


def decay_from_start(
    log_decay: Float[Array, "*lead size dim"], *, exclusive: bool = False
) -> Float[Array, "*lead size dim"]:
    """The decay from the chunk's start to each token, its own step included, or not (`before`)."""
    total = log_decay.cumsum(-2)
    return jnp.exp(_shift_right(total) if exclusive else total)


def decay_to_end(log_decay: Float[Array, "*lead size dim"]) -> Float[Array, "*lead size dim"]:
    """The decay of what each token writes, until the chunk's end."""
    return jnp.exp(_reverse_exclusive_cumsum(log_decay))


def _shift_right(x: Float[Array, "*lead size dim"]) -> Float[Array, "*lead size dim"]:
    """What stood one token earlier; zero at the first."""
    return jnp.concatenate([jnp.zeros_like(x[..., :1, :]), x[..., :-1, :]], axis=-2)


def _reverse_exclusive_cumsum(log_decay: Float[Array, "*lead size dim"]) -> Float[Array, "*lead size dim"]:
    """The sum over all later tokens. A sum of its own, from the end: a difference of two long sums would have their
    rounding, and a small result deserves a small error."""
    return jnp.flip(_shift_right(jnp.flip(log_decay, -2).cumsum(-2)), -2)


def decayed_product(
    rows: Float[Array, "*lead size dim"],
    columns: Float[Array, "*lead size dim"],
    log_decay: Float[Array, "*lead size dim"],
    *,
    strict: bool = False,
    exclusive: bool = False,
) -> Float[Array, "*lead size size"]:
    """P_ij = sum over d of rows_id columns_jd exp(g_{j+1,d} + ... + g_{i,d}) for j <= i, and zero above.

    - `strict`: for j < i only.
    - `before`: a row reads before its own step's decay, so that the sum ends with g_{i-1}; strict, too.

    By halves: between the two halves of a chunk a decay is one from the middle to the row times one from the column to
    the middle, neither of them above one, and their products one matrix product; within the halves likewise. That takes
    log2(size) times as many exponentials as there are numbers, where pairs written out take `size` times as many (GLA's
    secondary chunks, arXiv:2312.06635, section 4.3, are two levels of this). `size` is a power of two.
    """
    size = rows.shape[-2]
    if size <= _MAX_PAIRWISE_SIZE:
        return _decayed_product_pairwise(rows, columns, log_decay, strict=strict, exclusive=exclusive)
    halves = [x.reshape(*x.shape[:-2], 2, size // 2, x.shape[-1]) for x in (rows, columns, log_decay)]
    within = decayed_product(*halves, strict=strict, exclusive=exclusive)
    row, column, decay = (x[..., half, :, :] for x, half in zip(halves, (1, 0, 1), strict=True))
    row = (row * decay_from_start(decay, exclusive=exclusive)).astype(rows.dtype)
    column = (column * decay_to_end(halves[2][..., 0, :, :])).astype(rows.dtype)
    across = batched_matmul(row, column.mT)
    above = jnp.concatenate([within[..., 0, :, :], jnp.zeros_like(across)], axis=-1)
    return jnp.concatenate([above, jnp.concatenate([across, within[..., 1, :, :]], axis=-1)], axis=-2)


def _decayed_product_pairwise(
    rows: Float[Array, "*lead size dim"],
    columns: Float[Array, "*lead size dim"],
    log_decay: Float[Array, "*lead size dim"],
    *,
    strict: bool,
    exclusive: bool,
) -> Float[Array, "*lead size size"]:
    """`decayed_product` with every pair's decay written out."""
    total = log_decay.cumsum(-2)
    reached = _shift_right(total) if exclusive else total
    seen = causal_mask(rows.shape[-2], strict=strict or exclusive)
    between = jnp.exp(jnp.where(seen[..., None], reached[..., :, None, :] - total[..., None, :, :], -jnp.inf))
    rows = rows.astype(jnp.float32)
    return (rows[..., :, None, :] * columns[..., None, :, :] * between).sum(-1)


def exp_segsum(
    log_decay: Float[Array, "*lead size"], *, strict: bool = False, exclusive: bool = False
) -> Float[Array, "*lead size size"]:
    """The decays between all pairs of tokens where a step's is one number: `decayed_product` of ones.

    exp of differences of the running sum would be the same with that sum's rounding, 1e-4 at 20 a step, and takes
    size / log2(size) times as many exponentials.
    """
    one = jnp.ones_like(log_decay)[..., None]
    return decayed_product(one, one, log_decay[..., None], strict=strict, exclusive=exclusive)


def causal_mask(size: int, *, strict: bool = False) -> Bool[Array, "size size"]:
    """True where the column is not later than the row; or earlier, if `strict`."""
    return jnp.tril(jnp.ones((size, size), bool), -1 if strict else 0)


def batched_matmul(
    x: Float[Array, "*lead rows inner"], y: Float[Array, "*lead inner columns"]
) -> Float[Array, "*lead rows columns"]:
    """x y for each of the dims in front, with float32 sums and result."""
    *lead, rows, inner = x.shape
    x, y = x.reshape(-1, rows, inner), y.reshape(-1, inner, y.shape[-1])
    return einsum_fp32_accum("brk,bkc->brc", x, y, dtype=jnp.float32).reshape(*lead, rows, y.shape[-1])

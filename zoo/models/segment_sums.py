"""Sums over the texts of packed rows, where a text is a segment."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from zoo.parallel import num_shards, reduce
from zoo.shapes import SegmentIds


def sum_segments(
    x: Float[Array, "batch seq *rest"], segment_ids: SegmentIds, count: int | None = None
) -> Float[Array, "batch segments *rest"]:
    """Sum over the tokens of each segment: segments 1 to `count`, by default as many as a row has tokens.

    Padding, segment 0, is left out. Where the sequence is sharded, partial sums are all-reduced, and every device of a
    row has all of them. A second term of the loss has to be summed alike: `sum_segments(x, segment_ids).sum()`, where
    `x.sum()` would be the part of one device.
    """
    if count is None:
        count = x.shape[1] * num_shards(segment_ids, "seq")
    # Comparing each token with each segment adds in a fixed order. A scatter does not, on a GPU.
    is_in = segment_ids[..., None] == jnp.arange(1, count + 1)
    is_in = is_in.reshape(*is_in.shape, *[1] * (x.ndim - 2))
    return reduce(jnp.where(is_in, x[:, :, None], 0).sum(axis=1), over="seq")

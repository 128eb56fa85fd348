"""Features as heads, and the KV heads that the query heads of a device use."""

from jax import lax
from jaxtyping import Array, Float

from zoo.parallel.collectives import shard_offset

from .abstract import AbstractNorm


def split_heads(
    x: Float[Array, "batch seq _"], head_dim: int, norm: AbstractNorm | None = None
) -> Float[Array, "batch seq _ head_dim"]:
    """Reshape features to heads, and normalize each head if there is a norm."""
    x = x.reshape(*x.shape[:2], -1, head_dim)
    if norm is None:
        return x
    return norm(x)


def select_kv_heads(
    x: Float[Array, "batch seq units _"], heads: Float[Array, "batch heads_seq heads _"], group: int
) -> Float[Array, "batch seq _ _"]:
    """Select the KV heads (or groups) that this device's query `heads` use, `group` heads each.

    The identity, unless the KV heads, too few for the axis that shards heads, are replicated: then all heads of a
    device use one. Their number tells. That `x` varies over this axis does not: its tokens may be sharded over it.
    """
    if x.shape[2] * group == heads.shape[2]:
        return x
    index = shard_offset(heads, "heads", heads.shape[2]) // group
    return lax.dynamic_slice_in_dim(x, index, 1, axis=2)

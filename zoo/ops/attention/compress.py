"""Compressed keys: one key for each block of tokens, a sum weighted by gates (DeepSeek-V4, 2026, section 2.3)."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from .mask import MASK_VALUE


def compress_blocks(
    values: Float[Array, "batch blocks size features"],
    gates: Float[Array, "batch blocks size features"],
    places: Float[Array, "size features"],
    follows: Bool[Array, "batch blocks"] | None = None,
) -> Float[Array, "batch blocks _"]:
    """Return one vector for each block of tokens, with a softmax over its tokens j for each feature:

        sum_j w_j values_j,    w = softmax_j(gates_j + places_j)

    With `follows`, blocks overlap. Each token has two vectors, side by side in `features`: the first takes part in the
    block after its own, and the second in its own. The sum is over the first vectors of the block before and the second
    vectors of the block. `follows` is True for a block whose block before is the one before it in the array; other
    blocks have no block before. Computed in float32.
    """
    weights = gates.astype(jnp.float32) + places.astype(jnp.float32)
    terms = values.astype(jnp.float32)
    if follows is not None:
        earlier, weights = jnp.split(weights, 2, axis=-1)
        earlier = jnp.where(follows[..., None, None], _move_to_next(earlier), MASK_VALUE)
        weights = jnp.concatenate([earlier, weights], axis=2)
        earlier, terms = jnp.split(terms, 2, axis=-1)
        terms = jnp.concatenate([_move_to_next(earlier), terms], axis=2)
    weights = jax.nn.softmax(weights, axis=2)
    return (weights * terms).sum(2).astype(values.dtype)


def _move_to_next(x: Float[Array, "batch blocks size features"]) -> Float[Array, "batch blocks size features"]:
    """Move each block to the place of the block after it."""
    return jnp.pad(x[:, :-1], ((0, 0), (1, 0), (0, 0), (0, 0)))

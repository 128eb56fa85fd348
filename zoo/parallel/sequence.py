"""A shard of a sequence and the shards before it: shifts, halos and prefixes over the mesh axes that shard `seq`.

`axes` come from `sharded_axes(x, "seq")`, outermost first: the device with index i along them holds the i-th shard.
All communication is by `ppermute` from earlier shards to later ones, and its gradient by the reverse permutations.
"""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Shaped

_Tree = TypeVar("_Tree")


def shift_right(tree: _Tree, axes: tuple[str, ...], by: int = 1) -> _Tree:
    """Return the arrays of the device `by` shards earlier; zeros on the first `by`. One `ppermute` per array."""
    count = lax.axis_size(axes)
    pairs = [(source, source + by) for source in range(count - by)]
    return jax.tree.map(lambda x: lax.ppermute(x, axes, pairs), tree)


def halo(
    x: Shaped[Array, "batch seq *dims"], count: int, axes: tuple[str, ...]
) -> Shaped[Array, "batch {count} *dims"]:
    """Return the last `count` tokens of the shard before; zeros on the first.

    **Raises** `ValueError` if a shard has fewer tokens.
    """
    seq = x.shape[1]
    if seq < count:
        raise ValueError(
            f"a shard of {seq} tokens is too short: the next one looks back {count}. Use {count * lax.axis_size(axes)} "
            f"tokens or more, or fewer devices along {' x '.join(axes)}"
        )
    last = x[:, seq - count :]
    return shift_right(last, axes) if count else last


def exclusive_prefix(value: _Tree, then: Callable[[_Tree, _Tree], _Tree], axes: tuple[str, ...]) -> _Tree:
    """Combine the values of all earlier shards by an associative `then(earlier, later)`; zeros on the first.

    Recursive doubling (Hillis & Steele, 1986): of n shards each receives 1 + ceil(log2(n - 1)) values. The last of them
    is received only as far as the result depends on it: a permutation whose result is unused is not compiled.
    """
    index = lax.axis_index(axes)
    count = lax.axis_size(axes)
    distance = 1
    value = shift_right(value, axes)
    while distance < count - 1:
        combined = then(shift_right(value, axes, distance), value)
        # The first shard has no value, so the shards up to `distance` have nothing to combine theirs with.
        value = jax.tree.map(lambda new, old: jnp.where(index > distance, new, old), combined, value)  # noqa: B023
        distance *= 2
    return value

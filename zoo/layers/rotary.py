"""Rotary positions as mixers use them: angles of the tokens that are here, and of how long a text they are."""

from jax import lax
from jaxtyping import Array, Float, Int

from zoo.ops.rotary import Dynamic, LongRope, Rotary
from zoo.parallel import reduce, shares

from .info import Info, positions_of

GROWING = (Dynamic, LongRope)
"""Scalings of rotary embeddings that depend on how long the text is so far."""

Angles = Float[Array, "*batch seq pairs"]


def settled_length(rotary: Rotary | None) -> int | None:
    """Up to how many tokens the rotation does not depend on the length of the text; None where it never does."""
    scaling = None if rotary is None else rotary.scaling
    return scaling.original_length if isinstance(scaling, GROWING) else None


def cos_and_sin(
    rotary: Rotary, x: Float[Array, "batch seq embed"], info: Info, length: int | None = None
) -> tuple[Angles, Angles]:
    """Those of each token's angles. Where they depend on the length of the text it is `length`, which a cache was made
    for, or else that of the longest row."""
    if length is None and isinstance(rotary.scaling, GROWING):
        return rotary(positions_of(x, info), length=length_of(x, info))
    return rotary(positions_of(x, info), length=length)


def length_of(x: Float[Array, "batch seq embed"], info: Info) -> int | Int[Array, ""]:
    """How long the longest row is, wherever it lives."""
    if info.positions is None:
        return x.shape[1] * shares(x, "seq")
    longest = reduce(info.positions.max() + 1, over="batch", by=lax.pmax)
    return reduce(longest, over="seq", by=lax.pmax)

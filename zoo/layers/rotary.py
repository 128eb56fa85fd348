"""Rotary positions as mixers use them: angles of the tokens that are here, and of how long a text they are."""

from jax import lax
from jaxtyping import Array, Float, Int

from zoo.ops.rotary import DynamicScaling, LongRopeScaling, Rotary
from zoo.parallel import num_shards, reduce
from zoo.shapes import HiddenStates

from .token_info import TokenInfo, token_positions

_LENGTH_DEPENDENT = (DynamicScaling, LongRopeScaling)
"""Scalings of rotary embeddings that depend on how long the text is so far."""

_Angles = Float[Array, "*batch seq pairs"]


def rope_stable_length(rotary: Rotary | None) -> int | None:
    """Up to how many tokens the rotation does not depend on the length of the text; None where it never does."""
    scaling = None if rotary is None else rotary.scaling
    return scaling.original_length if isinstance(scaling, _LENGTH_DEPENDENT) else None


def compute_cos_sin(
    rotary: Rotary, x: HiddenStates, info: TokenInfo, length: int | None = None
) -> tuple[_Angles, _Angles]:
    """Those of each token's angles. Where they depend on the length of the text it is `length`, which a cache was made
    for, or else that of the longest row."""
    if length is None and isinstance(rotary.scaling, _LENGTH_DEPENDENT):
        return rotary(token_positions(x, info), length=_max_row_length(x, info))
    return rotary(token_positions(x, info), length=length)


def _max_row_length(x: HiddenStates, info: TokenInfo) -> int | Int[Array, ""]:
    """How long the longest row is, wherever it lives."""
    if info.positions is None:
        return x.shape[1] * num_shards(x, "seq")
    longest = reduce(info.positions.max() + 1, over="batch", by=lax.pmax)
    return reduce(longest, over="seq", by=lax.pmax)

"""Scale of queries by position, against attention that flattens in long contexts."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from zoo.shapes import HeadVectors, HiddenStates

from .token_info import TokenInfo, token_positions


@dataclasses.dataclass(frozen=True)
class QueryScale:
    """1 + strength log(1 + floor((position + offset) / length)): the softmax over n keys grows sharper by steps of
    `length` tokens (scalable softmax, Nakanishi, arXiv:2501.19399; Llama 4, with an offset of 1; Ministral 3, without).

    **Raises** `ValueError` for a length below 1.
    """

    strength: float
    length: int
    offset: int = 0

    def __post_init__(self):
        if self.length < 1:
            raise ValueError(f"queries are scaled in steps of at least 1 token, not of {self.length}")

    def __call__(self, positions: Int[Array, "*batch seq"]) -> Float[Array, "*batch seq"]:
        """Return the scale of the query at each position, in float32. Padding, at a negative position, has the scale of
        position 0."""
        steps = jnp.maximum(positions + self.offset, 0) // self.length
        return 1 + self.strength * jnp.log1p(steps.astype(jnp.float32))


def scale_queries(query: HeadVectors, scale: QueryScale, x: HiddenStates, info: TokenInfo) -> HeadVectors:
    """Scale the queries of the tokens `x` by their positions."""
    return (query * scale(token_positions(x, info))[..., None, None]).astype(query.dtype)

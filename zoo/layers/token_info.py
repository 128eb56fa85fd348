"""What every mixer may ask about the tokens of a batch."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Key

from zoo.parallel import Module, shard_offset
from zoo.shapes import HiddenStates


class TokenInfo(Module):
    """Positions, segments and random keys of the tokens, row first, so that whatever cuts the rows of a stream
    (micro-batches, devices, pipeline stages) cuts these with them."""

    positions: Int[Array, "batch seq"] | None = None
    """Place of each token in its document; None where every row counts 0, 1, 2, ... from its first token. A negative
    position is padding: no cache shows it to a query."""
    segment_ids: Int[Array, "batch seq"] | None = None
    """Tokens see those of the same id; None where a row is one document."""
    keys: Key[Array, "batch"] | None = None
    """One PRNG key a row; None where nothing is random: at inference."""

    def fold_keys(self, number: int | Int[Array, ""]) -> "TokenInfo":
        """The same with other keys: those of a layer, or of one place in it."""
        if self.keys is None:
            return self
        keys = jax.vmap(jax.random.fold_in, (0, None))(self.keys, number)
        return type(self)(self.positions, self.segment_ids, keys)


def token_positions(x: HiddenStates, info: TokenInfo) -> Int[Array, "*batch seq"]:
    """The place of each token: as `info` has it, or counted from the first of the row."""
    return jnp.arange(x.shape[1]) + shard_offset(x, "seq", x.shape[1]) if info.positions is None else info.positions

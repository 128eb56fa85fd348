"""What attention remembers of the tokens before."""

from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from zoo.parallel import Module

Heads = Float[Array, "batch seq kv_heads head_dim"]


class KeyValueCache(Module):
    """A ring of slots. Each knows the position of the token it holds, -1 while it is empty or holds padding, so that
    what a query sees needs no other bookkeeping, whatever the padding and however often the ring has gone round.

    Slots lie next to last, where the products of attention want them: kept as they come in, the whole cache would
    be turned round at every token.
    """

    key: Float[Array, "batch kv_heads slots head_dim"]
    value: Float[Array, "batch kv_heads slots head_dim"]
    positions: Int[Array, "batch slots"]
    written: Int[Array, ""]

    length: int = eqx.field(static=True)
    """How many tokens it was made for; with a window there are fewer slots."""

    @classmethod
    def empty(cls, batch: int, slots: int, kv_heads: int, head_dim: int, dtype: Any, length: int) -> "KeyValueCache":
        key, value = (jnp.zeros((batch, kv_heads, slots, head_dim), dtype) for _ in range(2))  # donated one by one
        return cls(key, value, jnp.full((batch, slots), -1), jnp.int32(0), length)

    def write(
        self,
        key: Float[Array, "batch seq kv_heads head_dim"],
        value: Float[Array, "batch seq kv_heads head_dim"],
        positions: Int[Array, "batch seq"],
    ) -> "KeyValueCache":
        """The cache after these tokens; of more than it has slots, it keeps the last."""
        slots, seq = self.positions.shape[1], positions.shape[1]
        at = (self.written + jnp.arange(seq)[-slots:]) % slots

        def put(ring, new, axis):
            new = lax.slice_in_dim(new, max(seq - slots, 0), seq, axis=axis).astype(ring.dtype)
            if seq == 1:  # a slice that cannot wrap round, written in place
                return lax.dynamic_update_slice_in_dim(ring, new, at[0], axis=axis)
            return ring.at[(slice(None),) * axis + (at,)].set(new)

        return type(self)(
            put(self.key, key.swapaxes(1, 2), 2),
            put(self.value, value.swapaxes(1, 2), 2),
            put(self.positions, positions, 1),
            self.written + seq,
            self.length,
        )

    def read(self) -> tuple[Heads, Heads, Int[Array, "batch seq"]]:
        """Keys, values and positions as `write` takes them, slots along seq."""
        return self.key.swapaxes(1, 2), self.value.swapaxes(1, 2), self.positions

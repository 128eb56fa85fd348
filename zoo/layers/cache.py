"""What attention remembers of the tokens before."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from zoo.parallel import Module


class KeyValueCache(Module):
    """A ring of slots. Each knows the position of the token it holds, -1 while it is empty or holds padding, so that
    what a query sees needs no other bookkeeping, whatever the padding and however often the ring has gone round."""

    key: Float[Array, "batch slots kv_heads head_dim"]
    value: Float[Array, "batch slots kv_heads head_dim"]
    positions: Int[Array, "batch slots"]
    written: Int[Array, ""]

    @classmethod
    def empty(cls, batch: int, slots: int, kv_heads: int, head_dim: int, dtype: Any) -> "KeyValueCache":
        zeros = jnp.zeros((batch, slots, kv_heads, head_dim), dtype)
        return cls(zeros, zeros, jnp.full((batch, slots), -1), jnp.array(0))

    def write(
        self,
        key: Float[Array, "batch seq kv_heads head_dim"],
        value: Float[Array, "batch seq kv_heads head_dim"],
        positions: Int[Array, "batch seq"],
    ) -> "KeyValueCache":
        """The cache after these tokens; of more than it has slots, it keeps the last."""
        slots, seq = self.positions.shape[1], positions.shape[1]
        at = (self.written + jnp.arange(seq)[-slots:]) % slots

        def put(ring, new):
            return ring.at[:, at].set(new[:, -slots:].astype(ring.dtype))

        rings = put(self.key, key), put(self.value, value), put(self.positions, positions)
        return type(self)(*rings, self.written + seq)

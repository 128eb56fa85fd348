"""Dropout whose mask depends only on a row's key and global indices, so that it is bitwise the same on any mesh.

`jax.random.bernoulli` counts the values of the local array, so a shard would get another mask than the same values on
one device. Here the counter is made of global indices: a sharded activation passes the offsets of its shard.
"""

import jax
import jax.numpy as jnp
from einops import rearrange
from jax import lax
from jax.extend.random import threefry_2x32
from jaxtyping import Array, Float, Int, Key, Shaped, UInt32


def dropout(
    x: Float[Array, "batch seq features"],
    keys: Key[Array, "batch"],
    *,
    rate: float,
    seq_offset: int | Int[Array, ""] = 0,
    feature_offset: int | Int[Array, ""] = 0,
) -> Float[Array, "batch seq features"]:
    """Apply dropout: zero each value with probability `rate`, and divide the others by 1 - rate.

    Value (b, s, f) of the shard `x` has the global index (b, s + seq_offset, f + feature_offset); its mask depends only
    on `keys[b]` and that index. Offsets may be traced (an axis index) and odd. There is one key per row, so the batch
    may be sharded in any way; a layer folds its index into the keys.

    **Raises** `ValueError` for a rate outside [0, 1), and for keys that are not Threefry's.

    Source: Srivastava et al., Dropout, JMLR 15 (2014), section 4, in the form that scales in training. The bits are
    Threefry-2x32's (Salmon et al., Random123, SC 2011), a hash of a key and a counter.
    """
    if not 0 <= rate < 1:
        raise ValueError(f"dropout: rate is {rate}; it must be in [0, 1).")
    if not jnp.issubdtype(keys.dtype, jax.dtypes.prng_key) or jax.random.key_impl(keys) != "threefry2x32":
        raise ValueError(
            f"dropout: the keys are of {keys.dtype}, and the mask is made of Threefry's bits. "
            'Make them by jax.random.key(seed, impl="threefry2x32").'
        )
    if rate == 0:
        return x
    bits = random_bits(jax.random.key_data(keys), (x.shape[1], x.shape[2]), seq_offset, feature_offset)
    threshold = min(round(rate * 2**32), 2**32 - 1)
    return jnp.where(bits >= jnp.uint32(threshold), x / (1 - rate), 0)


def random_bits(
    keys: UInt32[Array, "batch 2"],
    shape: tuple[int, int],
    seq_offset: int | Shaped[Array, ""] = 0,
    feature_offset: int | Shaped[Array, ""] = 0,
) -> UInt32[Array, "batch seq features"]:
    """Return random bits of `shape` (seq, features) for each row, which depend on the row's key and global indices.

    The counter is (seq index, feature index // 2); the two words of the hash are the bits of two adjacent features.
    """
    seq, features = shape
    pairs = features // 2 + 1  # one more than needed for an odd offset, which splits the first pair and the last
    feature_offset = jnp.asarray(feature_offset)
    rows = jnp.arange(seq, dtype=jnp.uint32) + jnp.asarray(seq_offset).astype(jnp.uint32)
    columns = jnp.arange(pairs, dtype=jnp.uint32) + (feature_offset // 2).astype(jnp.uint32)
    counter = jnp.stack(jnp.meshgrid(rows, columns, indexing="ij"))

    def hash_row(key: UInt32[Array, "2"]) -> UInt32[Array, "seq features"]:
        words = rearrange(threefry_2x32((key[0], key[1]), counter), "two seq pairs -> seq (pairs two)")
        return lax.dynamic_slice_in_dim(words, feature_offset % 2, features, axis=1)

    return jax.vmap(hash_row)(keys)

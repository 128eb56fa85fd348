"""Dropout whose mask is a function of a row's key and a value's place in the whole array.

`jax.random.bernoulli` numbers the values of the array that it is given, so that a device's share of an activation gets
another mask than the same values got on one device. Here a value is numbered by its global indices. A share passes its
offsets, and the mask is bitwise the same on one device and on any mesh.
"""

from functools import partial

import jax
import jax.numpy as jnp
from einops import rearrange
from jax import lax
from jax.extend.random import threefry_2x32
from jaxtyping import Array, Bool, Float, Int, Key, UInt32


def dropout(
    x: Float[Array, "batch seq features"],
    keys: Key[Array, "batch"],
    *,
    rate: float,
    seq_offset: int | Int[Array, ""] = 0,
    feature_offset: int | Int[Array, ""] = 0,
) -> Float[Array, "batch seq features"]:
    """Zero each value with probability `rate`, and divide the others by 1 - rate.

    Value (b, s, f) of `x` stands at (b, s + seq_offset, f + feature_offset) of the whole, and its fate is a function of
    `keys[b]` and that place alone. Offsets may be traced (an axis index) and odd. A row has a key of its own, so that
    rows may be dealt to devices in any way; a layer folds its number into the keys.

    **Raises** `ValueError` for a rate outside [0, 1), and for keys that are not of threefry.

    Source: Srivastava et al., Dropout, JMLR 15 (2014), section 4, in the form that scales in training. The bits are
    Threefry-2x32's (Salmon et al., Random123, SC 2011), a hash of a key and a counter.
    """
    if not 0 <= rate < 1:
        raise ValueError(f"dropout: rate is {rate}; it must lie in [0, 1).")
    if not jnp.issubdtype(keys.dtype, jax.dtypes.prng_key) or jax.random.key_impl(keys) != "threefry2x32":
        raise ValueError(
            f"dropout: the keys are of {keys.dtype}, and the mask is made of Threefry's bits. "
            'Make them by jax.random.key(seed, impl="threefry2x32").'
        )
    if rate == 0:
        return x
    keep = partial(
        _make_dropout_mask, (x.shape[1], x.shape[2]), rate=rate, seq_offset=seq_offset, feature_offset=feature_offset
    )
    return jnp.where(jax.vmap(keep)(jax.random.key_data(keys)), x / (1 - rate), 0)


def _make_dropout_mask(
    shape: tuple[int, int],
    key: UInt32[Array, "2"],
    *,
    rate: float,
    seq_offset: int | Int[Array, ""] = 0,
    feature_offset: int | Int[Array, ""] = 0,
) -> Bool[Array, "seq features"]:
    """Which values of one row survive: `shape` (seq, features) of the whole mask, from the offsets on.

    The counter is (seq index, feature index // 2); the hash's two words decide on the two features that share it.
    """
    seq, features = shape
    pairs = features // 2 + 1  # enough for an odd offset too, where the first pair and the last are halves
    feature_offset = jnp.asarray(feature_offset)
    rows = jnp.arange(seq, dtype=jnp.uint32) + jnp.asarray(seq_offset).astype(jnp.uint32)
    columns = jnp.arange(pairs, dtype=jnp.uint32) + (feature_offset // 2).astype(jnp.uint32)
    words = threefry_2x32((key[0], key[1]), jnp.stack(jnp.meshgrid(rows, columns, indexing="ij")))
    words = rearrange(words, "two seq pairs -> seq (pairs two)")
    threshold = min(round(rate * 2**32), 2**32 - 1)
    return lax.dynamic_slice_in_dim(words >= jnp.uint32(threshold), feature_offset % 2, features, axis=1)

"""Running sums of log decays, c, exact enough for differences, and the channels of queries and keys that hold them.

c grows with the text to thousands, and attention needs its differences. It is held in two float32 numbers, high + low,
of which low is what rounding took from high (Knuth, "The Art of Computer Programming", volume 2, section 4.2.2):

    c_t - c_j = (high_t - high_j) + (low_t - low_j)

has an error relative to the difference, not to c. Queries and keys carry c in 5 more channels, as bfloat16 numbers that
sum to the 24 bits of high and 16 bits of low. A KV cache, a ring and an exchange of heads then hold and send c with the
key, in bfloat16 too. Gradients flow through high, and through its first channel.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

DECAY_CHANNELS = 5
"""Channels that hold c: three bfloat16 numbers for high, two for low."""
_HIGH_CHANNELS = 3

_Sums = Float[Array, "#batch #seq heads 2"]
"""High and low of c."""


def sum_log_decays(log_decay: Float[Array, "batch seq heads"]) -> Float[Array, "batch seq heads 2"]:
    """Return the sum of the log decays of each token and all before it."""
    log_decay = log_decay.astype(jnp.float32)
    constant = lax.stop_gradient(log_decay)
    sums = lax.associative_scan(_add_exactly, jnp.stack([constant, jnp.zeros_like(constant)], axis=-1), axis=1)
    return _with_gradient(sums, jnp.cumsum(log_decay, axis=1))


def add_decay_sums(x: _Sums, y: _Sums) -> _Sums:
    """Return x + y: associative up to the last bits of low."""
    return _with_gradient(_add_exactly(*map(lax.stop_gradient, (x, y))), x[..., 0] + y[..., 0])


def subtract_decay_sums(
    query_sums: Float[Array, "*batch queries 2"], key_sums: Float[Array, "*batch keys 2"]
) -> Float[Array, "*batch queries keys"]:
    """Return c of each query less c of each key."""
    high, low = (query_sums[..., :, None, part] - key_sums[..., None, :, part] for part in (0, 1))
    return high + low


def append_decay_sums(x: Float[Array, "batch seq heads dim"], sums: _Sums) -> Float[Array, "batch seq heads _"]:
    """Append the channels of c to queries or keys.

    **Raises** `ValueError` for a dtype with a smaller range than bfloat16, as float16.
    """
    check_decay_dtype(x.dtype)
    channels = []
    for part, count in ((sums[..., 0], _HIGH_CHANNELS), (sums[..., 1], DECAY_CHANNELS - _HIGH_CHANNELS)):
        rest = lax.stop_gradient(part)
        for _ in range(count):
            channels.append(lax.reduce_precision(rest, exponent_bits=8, mantissa_bits=7))
            rest = rest - channels[-1]
    channels[0] = channels[0] + (sums[..., 0] - lax.stop_gradient(sums[..., 0]))
    return jnp.concatenate([x, jnp.stack(channels, axis=-1).astype(x.dtype)], axis=-1)


def split_decay_sums(
    x: Float[Array, "*batch dim"], decay_channels: bool = True
) -> tuple[Float[Array, "*batch _"], Float[Array, "*batch 2"] | None]:
    """Split queries or keys into their other channels and c. Without `decay_channels`, return `x` and None."""
    if not decay_channels:
        return x, None
    features = x[..., :-DECAY_CHANNELS]
    channels = x[..., -DECAY_CHANNELS:].astype(jnp.float32)
    first = channels[..., 0]
    others = lax.stop_gradient(channels[..., 1:])
    high = first + others[..., : _HIGH_CHANNELS - 1].sum(axis=-1)
    low = others[..., _HIGH_CHANNELS - 1 :].sum(axis=-1)
    return features, jnp.stack([high, low], axis=-1)


def append_decay_gradient(
    gradient: Float[Array, "*batch dim"], sum_gradient: Float[Array, "*batch 1"] | None
) -> Float[Array, "*batch _"]:
    """Append the gradient of c, if there is one, to the gradient of the other channels: the transpose of
    `split_decay_sums`."""
    if sum_gradient is None:
        return gradient
    others = jnp.zeros((*gradient.shape[:-1], DECAY_CHANNELS - 1), gradient.dtype)
    return jnp.concatenate([gradient, sum_gradient, others], axis=-1)


def check_decay_dtype(dtype: Any) -> None:
    """**Raises** `ValueError` for a dtype whose range is smaller than the range of bfloat16."""
    if jnp.finfo(dtype).maxexp < jnp.finfo(jnp.bfloat16).maxexp:
        raise ValueError(
            f"sums of log decays need the range of bfloat16, which {jnp.dtype(dtype).name} does not have: use float32 "
            "or bfloat16"
        )


def _add_exactly(x: _Sums, y: _Sums) -> _Sums:
    """Return x + y with the rounding error of the high parts in the low part."""
    high = x[..., 0] + y[..., 0]
    taken = high - x[..., 0]
    error = (x[..., 0] - (high - taken)) + (y[..., 0] - taken)
    low = error + (x[..., 1] + y[..., 1])
    total = high + low
    return jnp.stack([total, low - (total - high)], axis=-1)


def _with_gradient(sums: _Sums, linear: Float[Array, "batch seq heads"]) -> _Sums:
    """Return `sums` with the gradient of `linear`, which is the same number but for its rounding, on high."""
    zero = linear - lax.stop_gradient(linear)
    return sums.at[..., 0].add(zero)

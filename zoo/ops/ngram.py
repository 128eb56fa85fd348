"""Hashed n-grams: a row of a table for the last tokens of a text, without a vocabulary of n-grams.

A hash is a 64-bit product of ids and odd multipliers, XORed over the tokens of an n-gram, modulo the size of a table.
JAX has no 64-bit numbers unless they are enabled, and these products are not rounded: they are computed as pairs of 32
bits.
"""

import functools
import math
from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Int, UInt32

_Bits = tuple[UInt32[Array, "*shape"], UInt32[Array, "*shape"]]
"""The upper and the lower 32 bits of a number."""
_MASK = 2**64 - 1


def hash_ngrams(
    tokens: Int[Array, "*shape order"], multipliers: Sequence[int], sizes: Sequence[Sequence[int]]
) -> Int[Array, "*shape heads"]:
    """Hash each n-gram that ends in the first token, bigrams first:

        ((tokens_0 m_0) xor ... xor (tokens_{n-1} m_{n-1})) mod size,    n = 2, ..., order

    - `tokens`: ids, the present token first, then the tokens before it.
    - `multipliers`: m_k, one for each distance. A product of an id and a multiplier is below 2^63.
    - `sizes`: the sizes of the hashes of bigrams, of trigrams and so on, below 2^31.
    """
    upper, lower = _multiply_exactly(tokens[..., 0], multipliers[0])
    hashes = []
    for lag in range(1, tokens.shape[-1]):
        more = _multiply_exactly(tokens[..., lag], multipliers[lag])
        upper = upper ^ more[0]
        lower = lower ^ more[1]
        hashes += [_find_remainder((upper, lower), size) for size in sizes[lag - 1]]
    return jnp.stack(hashes, axis=-1).astype(jnp.int32)


def _multiply_exactly(x: Int[Array, "*shape"], factor: int) -> _Bits:
    """Return x * factor modulo 2^64, by digits of 16 bits."""
    digits = [x.astype(jnp.uint32) & 0xFFFF, x.astype(jnp.uint32) >> 16]
    columns = [jnp.zeros(x.shape, jnp.uint32)] * 5
    for i, digit in enumerate(digits):
        for j in range(4 - i):
            product = digit * jnp.uint32(factor >> 16 * j & 0xFFFF)
            columns[i + j] += product & 0xFFFF
            columns[i + j + 1] += product >> 16
    for k in range(3):
        columns[k + 1] += columns[k] >> 16
    d0, d1, d2, d3 = (column & 0xFFFF for column in columns[:4])
    return d2 | d3 << 16, d0 | d1 << 16


def _find_remainder(x: _Bits, size: int) -> UInt32[Array, "*shape"]:
    """Return x modulo `size`, a few bits at a time: a remainder and as many more bits fit into 32."""
    upper, lower = x
    step = 32 - size.bit_length()
    rest = upper % jnp.uint32(size)
    for end in range(32, 0, -step):
        bits = min(step, end)
        digit = lower >> (end - bits) & (2**bits - 1)
        rest = (rest << bits | digit) % jnp.uint32(size)
    return rest


def make_multipliers(vocab: int, order: int, seed: int, number: int = 0) -> tuple[int, ...]:
    """Return odd multipliers of `order` distances for ids below `vocab`, from SplitMix64 (Steele, Lea and Flood, 2014).
    `number` is the number of the table: each has multipliers of its own."""
    half = max(1, (2**63 - 1) // vocab // 2)
    first = seed + 10007 * number
    return tuple(2 * (_mix_bits(first + (lag + 1) * _GAMMA) % half) + 1 for lag in range(order))


_GAMMA = 0x9E3779B97F4A7C15
"""2^64 divided by the golden ratio."""


def _mix_bits(value: int) -> int:
    """Return the output of SplitMix64 in a state."""
    value = (value + _GAMMA) & _MASK
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _MASK
    return value ^ value >> 31


@functools.cache
def list_primes(least: int, count: int) -> tuple[int, ...]:
    """Return the first `count` primes from `least` on."""
    primes: list[int] = []
    value = max(least, 2)
    while len(primes) < count:
        if all(value % divisor for divisor in range(2, math.isqrt(value) + 1)):
            primes.append(value)
        value += 1
    return tuple(primes)

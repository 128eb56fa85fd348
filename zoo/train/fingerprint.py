"""What a run reads and does not learn, in a few bytes: enough to tell whether it is the same when the run goes on."""

import hashlib
import json
from collections.abc import Mapping

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, PyTree, Shaped, UInt32

from zoo.parallel import leaves, map_leaves

_HASH_SEEDS = (0x243F6A88, 0x13198A2E)
"""Where two sums start that have nothing else in common: of pi's fraction, in hexadecimals, words 1 and 3."""


def fingerprint(tree: PyTree) -> str:
    """64 hexadecimals that are the same of the same numbers under the same names, on any mesh and in any layout.

    It is SHA-256 (FIPS 180-4) of what `prints` says, and covers what that covers. Unlike trees have the same one by
    accident alone: whoever means to deceive can.
    """
    return hashlib.sha256(json.dumps(fingerprint_arrays(tree), sort_keys=True).encode()).hexdigest()


def fingerprint_arrays(tree: PyTree) -> dict[str, str]:
    """For every array of a tree, by its path, dtype, shape and 64 bits made from its numbers and where they stand:
    `float32 [4, 128, 128] 5be0cd19 1f83d9ab`.

    - Left out is what was declared `tuned()`, which is learnt on top of the rest, and what is no array: a model's
      static fields follow from the configuration.
    - Sums are taken where the numbers lie, each device's of its share; what moves is eight bytes an array. Arrays are
      read one after another: XLA on CPUs writes down what it is to add.
    """
    fixed = map_leaves(lambda leaf, x: None if leaf.tuned else x, eqx.filter(tree, eqx.is_array))
    arrays = {leaf.name: x for leaf, x in zip(leaves(fixed), jax.tree.leaves(fixed), strict=True)}
    sums = jax.device_get([hash_array(x) for x in arrays.values()])
    return {
        name: f"{x.dtype} {list(x.shape)} {' '.join(f'{int(lane):08x}' for lane in pair)}"
        for (name, x), pair in zip(arrays.items(), sums, strict=True)
    }


def require_same_fingerprints(
    saved: Mapping[str, str], current: Mapping[str, str], origin: object, max_lines: int = 8
) -> None:
    """**Raises** `ValueError`, with the first names, unless a run was saved beside the same numbers that it has now."""
    names = [*current, *(name for name in saved if name not in current)]
    lines = [
        f"  {name}: {_describe_difference(saved.get(name), current.get(name))}"
        for name in names
        if saved.get(name) != current.get(name)
    ]
    if lines:
        more = f"  and {len(lines) - max_lines} more\n" if len(lines) > max_lines else ""
        raise ValueError(
            f"{origin} holds what was learnt on top of something else; what is not learnt differs:\n"
            + "\n".join(lines[:max_lines])
            + f"\n{more}Start from the model, with the adapter's settings, that it was saved with, or start a run in "
            "another folder. Nothing was changed."
        )


def _describe_difference(saved: str | None, current: str | None) -> str:
    """How two prints differ."""
    kinds = ["absent" if one is None else one.partition("]")[0] + "]" for one in (saved, current)]
    return "the numbers differ" if kinds[0] == kinds[1] else f"{kinds[0]} in the checkpoint, {kinds[1]} here"


@jax.jit
def hash_array(x: Shaped[Array, "..."]) -> list[UInt32[Array, ""]]:
    return [_hash_words(_bitcast_to_words(x), start) for start in _HASH_SEEDS]


def _bitcast_to_words(x: Shaped[Array, "*shape"]) -> UInt32[Array, "..."]:
    """The bits of an array's numbers; of eight bytes two words."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = jnp.stack([x.real, x.imag], -1)
    if x.dtype != bool:
        x = lax.bitcast_convert_type(x, _UINT_BY_BITS[min(jax.dtypes.itemsize_bits(x.dtype), 32)])
    return x.astype(jnp.uint32)


_UINT_BY_BITS = {2: jnp.uint2, 4: jnp.uint4, 8: jnp.uint8, 16: jnp.uint16, 32: jnp.uint32}


def _hash_words(words: UInt32[Array, "..."], seed: int) -> UInt32[Array, ""]:
    """The sum of mix(word + place), modulo 2^32: it does not matter who adds what to what first."""
    place = jnp.full(words.shape, seed, jnp.uint32)
    for dim in range(words.ndim):  # one by one: an array may hold more numbers than a word can count
        place = _fmix32(place + lax.broadcasted_iota(jnp.uint32, words.shape, dim))
    return _fmix32(place ^ _fmix32(words + np.uint32(seed))).sum(dtype=jnp.uint32)


def _fmix32(word: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    """A word whose every bit depends on every bit of the one given, and one to one (MurmurHash3's last step, Appleby,
    2011)."""
    word = (word ^ (word >> 16)) * np.uint32(0x85EBCA6B)
    word = (word ^ (word >> 13)) * np.uint32(0xC2B2AE35)
    return word ^ (word >> 16)

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

LANES = (0x243F6A88, 0x13198A2E)
"""Where two sums start that have nothing else in common: of pi's fraction, in hexadecimals, words 1 and 3."""


def fingerprint(tree: PyTree) -> str:
    """64 hexadecimals that are the same of the same numbers under the same names, on any mesh and in any layout.

    It is SHA-256 (FIPS 180-4) of what `prints` says, and covers what that covers. Unlike trees have the same one by
    accident alone: whoever means to deceive can.
    """
    return hashlib.sha256(json.dumps(prints(tree), sort_keys=True).encode()).hexdigest()


def prints(tree: PyTree) -> dict[str, str]:
    """For every array of a tree, by its path, dtype, shape and 64 bits made from its numbers and where they stand:
    `float32 [4, 128, 128] 5be0cd19 1f83d9ab`.

    - Left out is what was declared `tuned()`, which is learnt on top of the rest, and what is no array: a model's
      static fields follow from the configuration.
    - Sums are taken where the numbers lie, each device's of its share; what moves is eight bytes an array. Arrays are
      read one after another: XLA on CPUs writes down what it is to add.
    """
    fixed = map_leaves(lambda leaf, x: None if leaf.tuned else x, eqx.filter(tree, eqx.is_array))
    arrays = {leaf.name: x for leaf, x in zip(leaves(fixed), jax.tree.leaves(fixed), strict=True)}
    sums = jax.device_get([two_sums(x) for x in arrays.values()])
    return {
        name: f"{x.dtype} {list(x.shape)} {' '.join(f'{int(lane):08x}' for lane in pair)}"
        for (name, x), pair in zip(arrays.items(), sums, strict=True)
    }


def require_same(saved: Mapping[str, str], here: Mapping[str, str], where: object, shown: int = 8) -> None:
    """**Raises** `ValueError`, with the first names, unless a run was saved beside the same numbers that it has now."""
    names = [*here, *(name for name in saved if name not in here)]
    lines = [
        f"  {name}: {told(saved.get(name), here.get(name))}" for name in names if saved.get(name) != here.get(name)
    ]
    if lines:
        more = f"  and {len(lines) - shown} more\n" if len(lines) > shown else ""
        raise ValueError(
            f"{where} holds what was learnt on top of something else; what is not learnt differs:\n"
            + "\n".join(lines[:shown])
            + f"\n{more}Start from the model, with the adapter's settings, that it was saved with, or start a run in "
            "another folder. Nothing was changed."
        )


def told(saved: str | None, here: str | None) -> str:
    """How two prints differ."""
    kinds = ["absent" if one is None else one.partition("]")[0] + "]" for one in (saved, here)]
    return "the numbers differ" if kinds[0] == kinds[1] else f"{kinds[0]} in the checkpoint, {kinds[1]} here"


@jax.jit
def two_sums(x: Shaped[Array, "..."]) -> list[UInt32[Array, ""]]:
    return [sum_of(words_of(x), start) for start in LANES]


def words_of(x: Shaped[Array, "*shape"]) -> UInt32[Array, "..."]:
    """The bits of an array's numbers; of eight bytes two words."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = jnp.stack([x.real, x.imag], -1)
    if x.dtype != bool:
        x = lax.bitcast_convert_type(x, UNSIGNED[min(jax.dtypes.itemsize_bits(x.dtype), 32)])
    return x.astype(jnp.uint32)


UNSIGNED = {2: jnp.uint2, 4: jnp.uint4, 8: jnp.uint8, 16: jnp.uint16, 32: jnp.uint32}


def sum_of(words: UInt32[Array, "..."], start: int) -> UInt32[Array, ""]:
    """The sum of mix(word + place), modulo 2^32: it does not matter who adds what to what first."""
    place = jnp.full(words.shape, start, jnp.uint32)
    for dim in range(words.ndim):  # one by one: an array may hold more numbers than a word can count
        place = mix(place + lax.broadcasted_iota(jnp.uint32, words.shape, dim))
    return mix(place ^ mix(words + np.uint32(start))).sum(dtype=jnp.uint32)


def mix(word: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    """A word whose every bit depends on every bit of the one given, and one to one (MurmurHash3's last step, Appleby,
    2011)."""
    word = (word ^ (word >> 16)) * np.uint32(0x85EBCA6B)
    word = (word ^ (word >> 13)) * np.uint32(0xC2B2AE35)
    return word ^ (word >> 16)

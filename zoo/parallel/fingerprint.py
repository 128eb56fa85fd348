"""Fingerprints of trees of arrays: hashes that depend on names and values, not on the mesh or the layout.

By them a run detects that an adapter is resumed on another base model.
"""

import hashlib
import json
from collections.abc import Mapping
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, PyTree, Shaped, UInt32

from .module import Leaf, leaves, map_leaves
from .rounds import has_rounds

_HASH_SEEDS = (0x243F6A88, 0x13198A2E)
"""Seeds of two independent hashes: words 1 and 3 of pi's hexadecimal fraction."""


def fingerprint(tree: PyTree) -> str:
    """Return 64 hexadecimal digits that depend on the names and values of the arrays, not on mesh or layout.

    It is SHA-256 (FIPS 180-4) of `fingerprint_arrays`. Detects accidents; it is not secure against forgery.
    """
    return hashlib.sha256(json.dumps(fingerprint_arrays(tree), sort_keys=True).encode()).hexdigest()


def fingerprint_arrays(tree: PyTree) -> dict[str, str]:
    """Map the path of every array to its dtype, shape and a 64-bit hash: `float32 [4, 128, 128] 5be0cd19 1f83d9ab`.

    - Excludes parameters declared `adapter_parameter()`, which are trained on top of the rest, statistics declared
      `observed()`, and everything that is not an array: static fields follow from the configuration.
    - Each device hashes its shards, so only eight bytes per array are communicated. One program per array, because XLA
      materializes the summands on CPUs.
    """
    return fingerprint_all_arrays(map_leaves(_drop_trained, eqx.filter(tree, eqx.is_array)))


def fingerprint_all_arrays(tree: PyTree) -> dict[str, str]:
    """Map the path of every array to what `fingerprint_arrays` does, adapters and statistics included."""
    tree = eqx.filter(tree, eqx.is_array)
    arrays = {leaf.name: x for leaf, x in zip(leaves(tree), jax.tree.leaves(tree), strict=True)}
    in_rounds = [has_rounds(leaf) for leaf in leaves(tree)]
    # One after the other: emulated devices share few threads, where all-reduces of many programs wait for each other.
    sums = [jax.device_get(hash_array(x, has)) for x, has in zip(arrays.values(), in_rounds, strict=True)]
    shapes = [x.shape for x in arrays.values()]
    shapes = [_merge_shape(shape) if has else shape for shape, has in zip(shapes, in_rounds, strict=True)]
    return {
        name: f"{x.dtype} {list(shape)} {' '.join(f'{int(lane):08x}' for lane in pair)}"
        for (name, x), shape, pair in zip(arrays.items(), shapes, sums, strict=True)
    }


def _drop_trained(leaf: Leaf, x: Any) -> Any:
    """Return None for what is trained or observed on top of the frozen parameters."""
    if leaf.adapter_parameter or leaf.observed:
        return None
    return x


def _merge_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the stored shape of layers in rounds."""
    return shape[0] * shape[1], *shape[2:]


def require_same_fingerprints(
    saved: Mapping[str, str], current: Mapping[str, str], origin: object, max_lines: int = 8
) -> None:
    """**Raises** `ValueError`, with the first names that differ, unless the frozen parameters are the same as saved."""
    names = [*current, *(name for name in saved if name not in current)]
    lines = [
        f"  {name}: {_describe_difference(saved.get(name), current.get(name))}"
        for name in names
        if saved.get(name) != current.get(name)
    ]
    if lines:
        if len(lines) > max_lines:
            more = f"  and {len(lines) - max_lines} more\n"
        else:
            more = ""
        raise ValueError(
            f"{origin} was trained on top of other parameters; these frozen ones differ:\n"
            + "\n".join(lines[:max_lines])
            + f"\n{more}Start from the model, with the adapter's settings, that it was saved with, or start a run in "
            "another folder. Nothing was changed."
        )


def _describe_difference(saved: str | None, current: str | None) -> str:
    """Return in words whether two hashes differ in dtype and shape, or in values."""
    before = _describe_kind(saved)
    now = _describe_kind(current)
    if before == now:
        return "the numbers differ"
    return f"{before} in the checkpoint, {now} here"


def _describe_kind(entry: str | None) -> str:
    """Return the dtype and shape that a hash begins with."""
    if entry is None:
        return "absent"
    return entry.partition("]")[0] + "]"


@partial(jax.jit, static_argnums=1)
def hash_array(x: Shaped[Array, "..."], in_rounds: bool = False) -> list[UInt32[Array, ""]]:
    """Hash an array. An array of dims `rounds layers ...` has the same hash as with dims `layers ...`."""
    return [_hash_words(_bitcast_to_words(x), start, in_rounds) for start in _HASH_SEEDS]


def _bitcast_to_words(x: Shaped[Array, "*shape"]) -> UInt32[Array, "..."]:
    """Reinterpret an array as 32-bit words, or narrower; 64-bit elements become two words."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = jnp.stack([x.real, x.imag], -1)
    if x.dtype != bool:
        x = lax.bitcast_convert_type(x, _UINT_BY_BITS[min(jax.dtypes.itemsize_bits(x.dtype), 32)])
    return x.astype(jnp.uint32)


_UINT_BY_BITS = {2: jnp.uint2, 4: jnp.uint4, 8: jnp.uint8, 16: jnp.uint16, 32: jnp.uint32}


def _hash_words(words: UInt32[Array, "..."], seed: int, in_rounds: bool) -> UInt32[Array, ""]:
    """Sum fmix32 of each word and its index, modulo 2^32: independent of the order of summation, hence of sharding."""
    index_hash = jnp.full(words.shape, seed, jnp.uint32)
    for dim in range(in_rounds, words.ndim):  # dim by dim, because a flat index may exceed 32 bits
        index = lax.broadcasted_iota(jnp.uint32, words.shape, dim)
        if in_rounds and dim == 1:
            index += words.shape[1] * lax.broadcasted_iota(jnp.uint32, words.shape, 0)
        index_hash = _fmix32(index_hash + index)
    return _fmix32(index_hash ^ _fmix32(words + np.uint32(seed))).sum(dtype=jnp.uint32)


def _fmix32(word: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    """MurmurHash3's finalizer (Appleby, 2011): a bijection in which every output bit depends on every input bit."""
    word = (word ^ (word >> 16)) * np.uint32(0x85EBCA6B)
    word = (word ^ (word >> 13)) * np.uint32(0xC2B2AE35)
    return word ^ (word >> 16)

"""Storage formats for the moments of Adam: float32, bfloat16, 8 bits in blocks.

A format encodes a float32 array and decodes it again. Bytes per parameter:

    Float32Moment      4
    BFloat16Moment     2                            rounded stochastically: an average does not stall
    BlockwiseMoment    1 + 4 / block                8-bit codes with one scale per block (arXiv:2110.02861)
"""

import abc
import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key, UInt8

from zoo.ops.stochastic_rounding import stochastic_round
from zoo.parallel import Dim, Module
from zoo.parallel.module import Leaf


class AbstractMoment(abc.ABC):
    """A storage format of a moment."""

    @abc.abstractmethod
    def encode(self, leaf: Leaf, x: Float[Array, "..."], key: Key[Array, ""]) -> Any:
        """Return the stored form of the moment of a parameter with the metadata `leaf`."""

    @abc.abstractmethod
    def decode(self, leaf: Leaf, stored: Any) -> Float[Array, "..."]:
        """Return the moment in float32."""


@dataclasses.dataclass(frozen=True)
class Float32Moment(AbstractMoment):
    """Four bytes per parameter: exact."""

    def encode(self, leaf: Leaf, x: Float[Array, "..."], key: Key[Array, ""]) -> Any:
        return x

    def decode(self, leaf: Leaf, stored: Any) -> Float[Array, "..."]:
        return stored


@dataclasses.dataclass(frozen=True)
class BFloat16Moment(AbstractMoment):
    """Two bytes per parameter, rounded stochastically.

    A second moment with b2 = 0.999 changes by a thousandth per step, less than half the spacing of bfloat16: rounded to
    nearest it would stay where it is.
    """

    def encode(self, leaf: Leaf, x: Float[Array, "..."], key: Key[Array, ""]) -> Any:
        return stochastic_round(x, jax.random.bits(key, x.shape, jnp.uint32), jnp.bfloat16)

    def decode(self, leaf: Leaf, stored: Any) -> Float[Array, "..."]:
        return stored.astype(jnp.float32)


class _Packed(Module):
    """8-bit codes of a parameter's moment, and the scales of their blocks along one of its dims."""

    codes: UInt8[Array, "d0"] | UInt8[Array, "d0 d1"] | UInt8[Array, "d0 d1 d2"]
    scales: Float[Array, "s0"] | Float[Array, "s0 s1"] | Float[Array, "s0 s1 s2"]

    d0: Dim = eqx.field(static=True)
    d1: Dim = eqx.field(static=True)
    d2: Dim = eqx.field(static=True)
    s0: Dim = eqx.field(static=True)
    s1: Dim = eqx.field(static=True)
    s2: Dim = eqx.field(static=True)


@dataclasses.dataclass(frozen=True)
class BlockwiseMoment(AbstractMoment):
    """About one byte per parameter: each block of values is divided by its largest magnitude and rounded to the nearest
    of 256 values, which lie ever closer towards zero (Dettmers et al., arXiv:2110.02861, sections 2 and 3).

    Blocks divide the global array, so they do not depend on the mesh. They run along the last dim that is not `embed`,
    so the scales are sharded with `embed` (ZeRO). A dim that is not a whole number of blocks ends with a shorter one.
    As in the paper, the update is computed before the moment is rounded.
    Parameters with fewer than `min_size` values per layer stay in float32.
    """

    block: int = 256
    min_size: int = 4096
    signed: bool = True
    """False for second moments, which are not negative."""

    def encode(self, leaf: Leaf, x: Float[Array, "..."], key: Key[Array, ""]) -> Any:
        dims = _unstacked_dims(leaf, x.ndim)
        stacked = x.ndim - len(dims)
        if not 1 <= len(dims) <= 3 or math.prod(x.shape[stacked:]) < self.min_size:
            return x
        return _vmap(partial(self._pack, dims), stacked)(x)

    def decode(self, leaf: Leaf, stored: Any) -> Float[Array, "..."]:
        if not isinstance(stored, _Packed):
            return stored
        dims = _unstacked_dims(leaf, stored.codes.ndim)
        return _vmap(partial(self._unpack, dims), stored.codes.ndim - len(dims))(stored)

    def _pack(self, dims: tuple[Dim, ...], x: Float[Array, "..."]) -> _Packed:
        axis = _find_block_axis(dims)
        x = jnp.moveaxis(x, axis, -1)
        count = -(-x.shape[-1] // self.block)
        padding = count * self.block - x.shape[-1]
        blocks = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, padding)]).reshape(*x.shape[:-1], count, self.block)
        scales = jnp.abs(blocks).max(-1)
        values = make_dynamic_map(signed=self.signed)
        boundaries = jnp.asarray((values[:-1] + values[1:]) / 2)
        codes = jnp.searchsorted(boundaries, blocks / jnp.where(scales == 0, 1, scales)[..., None])
        codes = codes.reshape(*x.shape[:-1], -1)[..., : x.shape[-1]].astype(jnp.uint8)
        padded = (*dims, *(Dim("chunk"),) * (3 - len(dims)))
        scale_dims = list(padded)
        scale_dims[axis] = Dim("chunk")
        return _Packed(jnp.moveaxis(codes, -1, axis), jnp.moveaxis(scales, -1, axis), *padded, *scale_dims)

    def _unpack(self, dims: tuple[Dim, ...], packed: _Packed) -> Float[Array, "..."]:
        axis = _find_block_axis(dims)
        scales = jnp.repeat(packed.scales, self.block, axis=axis)
        scales = jax.lax.slice_in_dim(scales, 0, packed.codes.shape[axis], axis=axis)
        return jnp.asarray(make_dynamic_map(signed=self.signed))[packed.codes] * scales


def _find_block_axis(dims: tuple[Dim, ...]) -> int:
    """Return the last axis that is not `embed`, or the last one."""
    return max((axis for axis, dim in enumerate(dims) if dim.name != "embed"), default=len(dims) - 1)


def make_dynamic_map(*, signed: bool) -> Float[np.ndarray, "256"]:
    """Return the 256 values of the dynamic 8-bit data type, sorted.

    They are 0, 1 and, in the decade that ends at 10^-(6 - i), i = 0 ... 6, the centers of 2^i equal intervals, with
    both signs; without a sign of 2^(i + 1) intervals: relative precision is highest near the largest magnitude. Source:
    Dettmers, arXiv:1511.04561, section 2.1; Dettmers et al., arXiv:2110.02861, section 1.3.
    """
    values = [0.0, 1.0]
    for i in range(7):
        intervals = 2**i if signed else 2 ** (i + 1)
        edges = np.linspace(0.1, 1, intervals + 1)
        centers = (edges[:-1] + edges[1:]) / 2 * 10.0 ** (i - 6)
        values.extend(centers)
        if signed:
            values.extend(-centers)
    return np.sort(np.array(values, np.float32))


def _unstacked_dims(leaf: Leaf, ndim: int) -> tuple[Dim, ...]:
    """Return the dims of a parameter of one layer; the dims of an array outside of modules are replicated."""
    if leaf.unstacked_dims is None:
        return (Dim("chunk"),) * ndim
    return leaf.unstacked_dims


def _vmap(function: Callable, times: int) -> Callable:
    """Map a function over the stacked dims, so that it makes the module of one layer."""
    for _ in range(times):
        function = eqx.filter_vmap(function)
    return function

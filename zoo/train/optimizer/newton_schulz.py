"""Orthogonalize matrices by Newton-Schulz iterations, each whole matrix on one device of a mesh."""

import dataclasses
import math
from collections import defaultdict

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, PyTree

from zoo.ops.varying import varying
from zoo.parallel import Mesh
from zoo.parallel.spmd import spmd

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of Jordan, kellerjordan.github.io/posts/muon: singular values reach 0.7 to 1.2 within five steps."""
_MatrixAxes = tuple[tuple[str, ...], tuple[str, ...]]
"""Mesh axes that shard the rows and the columns of a matrix."""


@dataclasses.dataclass(frozen=True)
class NewtonSchulz:
    """Newton-Schulz iterations that move all singular values of a matrix towards 1:

        X <- X / (|X| + eps),    then in each step    X <- a X + (b A + c A²) X,    A = X Xᵀ

    with the Frobenius norm |X|. Source: Jordan, kellerjordan.github.io/posts/muon. A zero matrix stays zero.
    """

    steps: tuple[tuple[float, float, float], ...]
    """a, b, c of each step."""
    eps: float = 1e-8
    dtype: str = "float32"
    """Dtype of the iterations, and of the matrices that devices exchange for them."""
    adaptive: bool = False
    """If True, multiply the result Y by the dual norm <X, Y> of each matrix (arXiv:2409.20325)."""

    def __call__(self, x: Float[Array, "matrices rows columns"]) -> Float[Array, "matrices rows columns"]:
        is_tall = x.shape[-2] > x.shape[-1]
        y = x.mT if is_tall else x  # A is the smaller of both products
        y = y / (jnp.linalg.norm(y, axis=(-2, -1), keepdims=True) + self.eps)
        for a, b, c in self.steps:
            gram = y @ y.mT
            y = a * y + (b * gram + c * (gram @ gram)) @ y
        y = y.mT if is_tall else y
        if self.adaptive:
            y = y * (x * y).sum((-2, -1), keepdims=True)
        return y


def orthogonalize(newton_schulz: NewtonSchulz, tree: PyTree, mesh: Mesh | None) -> PyTree:
    """Orthogonalize every matrix of a tree of gradients or momenta, in which the last two dims of each array are rows
    and columns and all others are stacked. Returns arrays of the same dtypes and shardings.

    On a mesh, where gradients are shards of matrices (`mesh.optimizer`), each device receives whole matrices, iterates
    on its share of the stack, and returns the shards of the result: one all-to-all there and one back. Devices along
    axes that shard no matrix do the same work.
    """
    if mesh is None or mesh.devices.size == 1:
        return jax.tree.map(lambda x: _call_in_dtype(newton_schulz, _flatten_stack(x)).reshape(x.shape), tree)
    mesh = mesh.optimizer
    arrays, treedef = jax.tree.flatten(tree)
    specs = treedef.flatten_up_to(mesh.specs(tree))
    axes = tuple(_read_axes(spec, x.ndim) for spec, x in zip(specs, arrays, strict=True))
    return spmd(_OrthogonalizeShards(newton_schulz, axes), mesh, out="")(tree)


@dataclasses.dataclass(frozen=True)
class _OrthogonalizeShards:
    """Orthogonalize the matrices whose shards are on this device. Hashable, so that it compiles once."""

    newton_schulz: NewtonSchulz
    axes: tuple[_MatrixAxes, ...]

    def __call__(self, tree: PyTree) -> PyTree:
        arrays, treedef = jax.tree.flatten(tree)
        results: list[Array | None] = [None] * len(arrays)
        for members in self._group(arrays):
            stacks = [_flatten_stack(arrays[i]) for i in members]
            joined = jnp.concatenate(stacks) if len(stacks) > 1 else stacks[0]
            orthogonal = self._orthogonalize(joined, self.axes[members[0]])
            start = 0
            for i, stack in zip(members, stacks, strict=True):
                part = orthogonal[start : start + len(stack)]
                results[i] = part.reshape(arrays[i].shape)
                start += len(stack)
        return jax.tree.unflatten(treedef, results)

    def _group(self, arrays: list[Array]) -> list[list[int]]:
        """Return the arrays that are exchanged together: one whose stack the devices divide by itself, the others of
        one shape and sharding joined, to fill the devices."""
        groups = defaultdict(list)
        for i, (x, axes) in enumerate(zip(arrays, self.axes, strict=True)):
            divides = math.prod(x.shape[:-2]) % _count_matrix_shards(axes) == 0
            groups[i if divides else -1, x.shape[-2:], x.dtype, axes, varying(x)].append(i)
        return list(groups.values())

    def _orthogonalize(
        self, shards: Float[Array, "matrices rows columns"], axes: _MatrixAxes
    ) -> Float[Array, "matrices rows columns"]:
        devices = _count_matrix_shards(axes)
        if devices == 1:
            return _call_in_dtype(self.newton_schulz, shards)
        count, rows, columns = shards.shape
        share = -(-count // devices)
        row_shards = _count_matrix_shards((axes[0], ()))
        column_shards = devices // row_shards
        padded = jnp.pad(shards.astype(self.newton_schulz.dtype), [(0, devices * share - count), (0, 0), (0, 0)])
        received = lax.all_to_all(padded.reshape(devices, share, rows, columns), axes[0] + axes[1], 0, 0)
        pieces = received.reshape(row_shards, column_shards, share, rows, columns).transpose(2, 0, 3, 1, 4)
        whole = self.newton_schulz(pieces.reshape(share, row_shards * rows, column_shards * columns))
        pieces = whole.reshape(share, row_shards, rows, column_shards, columns).transpose(1, 3, 0, 2, 4)
        returned = lax.all_to_all(pieces.reshape(devices, share, rows, columns), axes[0] + axes[1], 0, 0)
        return returned.reshape(-1, rows, columns)[:count].astype(shards.dtype)


def _call_in_dtype(newton_schulz: NewtonSchulz, x: Float[Array, "matrices _ _"]) -> Float[Array, "matrices _ _"]:
    return newton_schulz(x.astype(newton_schulz.dtype)).astype(x.dtype)


def _flatten_stack(x: Float[Array, "*stacked rows columns"]) -> Float[Array, "matrices rows columns"]:
    return x.reshape(-1, *x.shape[-2:])


def _read_axes(spec: jax.P, ndim: int) -> _MatrixAxes:
    """Return the mesh axes that a PartitionSpec gives to the last two of `ndim` dims."""
    entries = (*spec, *[None] * (ndim - len(spec)))
    rows, columns = ((entry,) if isinstance(entry, str) else tuple(entry or ()) for entry in entries[-2:])
    return rows, columns


def _count_matrix_shards(axes: _MatrixAxes) -> int:
    """Return the number of devices that hold shards of one matrix, inside `shard_map`."""
    return math.prod(lax.axis_size(axis) for axis in axes[0] + axes[1])

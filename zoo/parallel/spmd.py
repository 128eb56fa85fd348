"""Run a function on every device's shards, by the library's only `jax.shard_map` and one `jit` wrapper.

Modules are sharded as their annotations and the layout specify. Every other array is part of a batch, whose dims
`place_batch` documents.
"""

import abc
import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import equinox as eqx
import jax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Key, PRNGKeyArray, PyTree

from zoo._checks import check_numpy_values, wrap_key
from zoo.ops.platform import target_platform

from .batch import find_batch_axis, name_batch_dims
from .closures import refuse_closed_over_arrays
from .collectives import active_mesh, varying
from .dims import Dim
from .mesh import Mesh, check_placed, require_mesh
from .module import Leaf, Module, leaves


@dataclasses.dataclass(frozen=True)
class ShardMapProgram(abc.ABC):
    """A function to run under `shard_map`. Hashable, because it is part of the `jit` cache key."""

    fn: Callable
    mesh: Mesh
    microbatches: int

    @abc.abstractmethod
    def __call__(self, args: tuple, keys: Key[Array, "batch"] | None) -> PyTree:
        """Run on one device's shards."""

    @abc.abstractmethod
    def out_specs(self, shard_map: Callable, run_on_shards: Callable, arrays: PyTree) -> PyTree:
        """Return the `out_specs` of the `shard_map`: the PartitionSpecs of the result."""


def spmd(fn: Callable, mesh: Mesh, *, out: PyTree[str]) -> Callable:
    """Return a function that runs `fn(*args)` on every device's shards of the arguments (SPMD).

    - `fn`: any function of modules, batch arrays and scalars.
    - `out`: the dims of the result, `"batch seq vocab"`; a tree of them for a tree of results, `""` for a scalar. It
      applies to plain arrays: a module in the result is sharded at rest, by its annotations.

    The returned function takes the arguments of `fn`, and a `key`, which is split into one PRNG key per row. It
    compiles once per shape.

    **Raises** `ValueError` if the mesh does not divide a size, if a model lies on another mesh, if `fn` closes over an
    array, and if a result differs between devices along an axis that shards none of its dims.
    """

    require_mesh(mesh)

    def run(*args: Any, key: PRNGKeyArray | None = None) -> PyTree:
        return run_sharded(SpmdProgram(fn, mesh, 1, OutputDims.from_tree(out)), args, key)

    return run


def run_sharded(program: ShardMapProgram, args: tuple, key: PRNGKeyArray | None) -> Any:
    """Check the arguments of a program, split `key` into one PRNG key per row, and run it."""
    refuse_closed_over_arrays(program.fn)
    for arg in args:
        if isinstance(arg, eqx.Module) and not isinstance(arg, Module):
            raise TypeError(
                f"{type(arg).__name__} is a module whose annotations name no dims, so it has no sharding. "
                "Derive it from zoo.parallel.Module."
            )
    arrays = eqx.filter(args, eqx.is_array)
    named = list(zip(leaves(arrays), jax.tree.leaves(arrays), strict=True))
    for leaf, x in named:
        check_numpy_values(x, leaf.name)
        check_placed(leaf, x, program.mesh)
    rows = _count_rows(named, program.mesh, program.microbatches)
    return run_jitted(program, args, keys=None if key is None else _split_row_keys(key, rows))


def run_jitted(
    program: Callable,
    fixed: tuple,
    args: tuple = (),
    *,
    keys: Key[Array, "batch"] | None = None,
    donate: bool = False,
) -> Any:
    """Run `program(*fixed, *args)` under `jit`: compiled once per program and shapes, under `shard_map` if it is a
    `ShardMapProgram`.

    `donate` lets the result reuse the memory of `args`; `fixed` is never donated. Arguments are not checked, so that a
    loop does not pay for the checks of `run_sharded` at every step.
    """
    return _JITTED[donate]((program, fixed), args, keys)


def _call_program(program_and_fixed: tuple[Callable, tuple], args: tuple, keys: Key[Array, "batch"] | None) -> Any:
    program, fixed = program_and_fixed
    if not isinstance(program, ShardMapProgram):
        return program(*fixed, *args)
    arrays, rest = eqx.partition(((*fixed, *args), keys), eqx.is_array)
    mesh = program.mesh
    specs = mesh.specs(arrays, name_batch_dims)

    def run_on_shards(arrays):
        with active_mesh(mesh), target_platform(mesh.platform):
            args, keys = eqx.combine(arrays, rest)
            return program(args, keys)

    shard_map = partial(jax.shard_map, mesh=mesh.devices, in_specs=(specs,))
    return shard_map(run_on_shards, out_specs=program.out_specs(shard_map, run_on_shards, arrays))(arrays)


_JITTED = {False: eqx.filter_jit(_call_program), True: eqx.filter_jit(_call_program, donate="all-except-first")}
"""The jitted function of `run_jitted`, by `donate`: one for all programs, so that each compiles once."""


def _count_rows(named: list[tuple[Leaf, Any]], mesh: Mesh, microbatches: int) -> int | None:
    """Return the number of rows of the batch; None if no array is a batch array.

    **Raises** `ValueError` if batch arrays differ in their number of rows, or the mesh and `microbatches` do not divide
    it.
    """
    sizes = {leaf.name: x.shape[axis] for leaf, x in named if (axis := find_batch_axis(leaf, x)) is not None}
    if len(set(sizes.values())) > 1:
        raise ValueError(f"the arrays of a batch have one number of rows, not {sizes}")
    if microbatches < 1:
        raise ValueError(f"microbatches is at least 1, not {microbatches}")
    rows = next(iter(sizes.values()), None)
    parts = {f"{axis}={mesh.shape[axis]}": mesh.shape[axis] for axis in mesh.axes("batch")}
    parts |= {f"{microbatches} microbatches": microbatches} if microbatches > 1 else {}
    if rows is not None and rows % math.prod(parts.values()):
        raise ValueError(
            f"a batch of {rows} rows does not divide evenly over {' x '.join(parts)}: "
            f"use a multiple of {math.prod(parts.values())}"
        )
    return rows


def _split_row_keys(key: PRNGKeyArray, rows: int | None) -> Key[Array, "batch"]:
    if rows is None:
        raise ValueError("key is split into one key per row of the batch, and no batch array was passed")
    return jax.random.split(wrap_key(key), rows)


@dataclasses.dataclass(frozen=True)
class OutputDims:
    """Dims of a tree of results, hashable."""

    dims: tuple[str, ...]
    treedef: Any

    @classmethod
    def from_tree(cls, out: PyTree[str]) -> "OutputDims":
        dims, treedef = jax.tree.flatten(out)
        return cls(tuple(dims), treedef)


@dataclasses.dataclass(frozen=True)
class SpmdProgram(ShardMapProgram):
    """Program of `spmd`: `fn`, with PartitionSpecs inferred from the varying axes of its results."""

    out: OutputDims

    def __call__(self, args, keys):
        return self.fn(*args) if keys is None else self.fn(*args, key=keys)

    def out_specs(self, shard_map, run_on_shards, arrays):
        """Infer specs: a result is sharded over its varying axes, each along the dim that has it in the layout.
        Varying axes exist only inside `shard_map`, so the function is traced once to read them."""
        traced: list = []

        def read_varying_axes(arrays):
            result = run_on_shards(arrays)
            traced.append((jax.tree.map(varying, result), leaves(result)))
            return ()

        jax.eval_shape(shard_map(read_varying_axes, out_specs=()), arrays)
        axes, result_leaves = traced[0]
        dims = self.out.treedef.unflatten(self.out.dims)
        dims = jax.tree.leaves(jax.tree.map(lambda name, part: jax.tree.map(lambda _: name, part), dims, axes))
        axes, treedef = jax.tree.flatten(axes)
        return jax.tree.unflatten(treedef, list(map(self._infer_spec, dims, result_leaves, axes)))

    def _infer_spec(self, names: str, leaf: Leaf, axes: frozenset[str]) -> PartitionSpec:
        dims = [Dim(name) for name in names.split()] if leaf.dims is None else leaf.dims
        at_rest = {} if leaf.dims is None else dict(self.mesh.find_gather_dims(dims))
        entries: list[tuple[str, ...] | None] = []
        remaining = set(axes)
        for index, dim in enumerate(dims):
            dim_axes = tuple(a for a in self.mesh.axes(dim.name) + at_rest.get(index, ()) if a in remaining)
            remaining -= set(dim_axes)
            entries.append(dim_axes or None)
        if remaining:
            result = f"named {names!r}" if leaf.dims is None else leaf.name
            raise ValueError(
                f"a result {result} differs between devices along {sorted(remaining)}, which shards none of its dims. "
                "Name the dim that it shards, or all-reduce partial results with zoo.parallel.reduce(x, over=dim)."
            )
        while entries and entries[-1] is None:  # as `Mesh.spec`: equal shardings have equal specs, and a result that is
            entries.pop()  # passed in again compiles nothing new
        return PartitionSpec(*entries)

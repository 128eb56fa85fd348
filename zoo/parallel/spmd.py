"""One function on every device's share.

There is one `jax.shard_map` in the library, and it is here. Modules come in laid out by their annotations, every other
array is batch: its first dim is `batch`, its second `seq`.
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
from jax.sharding import PartitionSpec
from jaxtyping import Array, Key, PRNGKeyArray, PyTree

from .closures import refuse_closed_over_arrays
from .collectives import active_mesh, varying
from .layout import Mesh
from .module import Dim, Leaf, Module, leaves
from .place import BATCH_DIMS


@dataclasses.dataclass(frozen=True)
class ShardMapProgram(abc.ABC):
    """What runs on shares: hashable, so that it compiles once."""

    fn: Callable
    mesh: Mesh
    microbatches: int

    @abc.abstractmethod
    def __call__(self, args: tuple, keys: Key[Array, "batch"] | None) -> PyTree:
        """On one device's share."""

    @abc.abstractmethod
    def out_specs(self, shard_map: Callable, on_one_device: Callable, arrays: PyTree) -> PyTree:
        """How the shares of the result are put together."""


def spmd(fn: Callable, mesh: Mesh, *, out: PyTree[str]) -> Callable:
    """`fn(*args)`, run on every device's share of the arguments.

    - `fn`: any function of modules, batch arrays and scalars.
    - `out`: the dims of what it returns, `"batch seq vocab"`; a tree of them for a tree of results, `""` for a scalar.
      It names loose arrays: a module in the result lies as its annotations say, at rest, whatever its name here.

    The result takes `fn`'s arguments, and a `key` that reaches `fn` as one key a row. It compiles once a shape.

    **Raises** `ValueError` where the mesh does not divide a size, where `fn` closes over an array, and where a result
    still differs between devices along an axis that none of its dims accounts for.
    """

    def run(*args: Any, key: PRNGKeyArray | None = None) -> PyTree:
        return run_sharded(SpmdProgram(fn, mesh, 1, OutputDims.from_tree(out)), args, key)

    return run


def run_sharded(program: ShardMapProgram, args: tuple, key: PRNGKeyArray | None) -> Any:
    refuse_closed_over_arrays(program.fn)
    for arg in args:
        if isinstance(arg, eqx.Module) and not isinstance(arg, Module):
            raise TypeError(
                f"{type(arg).__name__} is a module whose annotations name no dims: nothing says how it lies on a mesh. "
                "Derive it from zoo.parallel.Module."
            )
    rows = _count_rows(args, program.mesh, program.microbatches)
    return run_jitted((program, args), (), None if key is None else _split_row_keys(key, rows))


def _call_shard_map(kept: tuple[ShardMapProgram, tuple], args: tuple, keys: Key[Array, "batch"] | None) -> Any:
    """A `shard_map` outside `jit` is slow at every call, and compiled at every call: here it is compiled once.

    `kept` has the program and its first arguments, `args` those after: `donating` gives the memory of these to the
    result. Nothing is checked here: callers that bring their own program in a loop skip what `on_shares` costs.
    """
    program, first = kept
    arrays, rest = eqx.partition(((*first, *args), keys), eqx.is_array)
    mesh = program.mesh
    specs = mesh.specs(arrays, BATCH_DIMS)

    def on_one_device(arrays):
        with active_mesh(mesh):
            args, keys = eqx.combine(arrays, rest)
            return program(args, keys)

    share = partial(jax.shard_map, mesh=mesh.devices, in_specs=(specs,))
    return share(on_one_device, out_specs=program.out_specs(share, on_one_device, arrays))(arrays)


run_jitted = eqx.filter_jit(_call_shard_map)
run_jitted_donating = eqx.filter_jit(_call_shard_map, donate="all-except-first")


def _count_rows(args: tuple, mesh: Mesh, microbatches: int) -> int | None:
    """How many rows the batch has, None where no array is batch.

    **Raises** `ValueError` where its arrays disagree, or devices and micro-batches do not divide it.
    """
    arrays = eqx.filter(args, eqx.is_array)
    named = zip(leaves(arrays), jax.tree.leaves(arrays), strict=True)
    sizes = {leaf.name: x.shape[0] for leaf, x in named if leaf.dims is None and x.ndim}
    if len(set(sizes.values())) > 1:
        raise ValueError(f"the arrays of a batch have one number of rows, not {sizes}")
    if microbatches < 1:
        raise ValueError(f"a batch is taken in at least 1 micro-batch, not {microbatches}")
    rows = next(iter(sizes.values()), None)
    parts = {f"{axis}={mesh.shape[axis]}": mesh.shape[axis] for axis in mesh.axes("batch")}
    parts |= {f"{microbatches} microbatches": microbatches} if microbatches > 1 else {}
    if rows is not None and rows % math.prod(parts.values()):
        raise ValueError(
            f"a batch of {rows} rows does not share out over {' x '.join(parts)}: "
            f"use a multiple of {math.prod(parts.values())}"
        )
    return rows


def _split_row_keys(key: PRNGKeyArray, rows: int | None) -> Key[Array, "batch"]:
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        raise ValueError("key is a typed PRNG key, made by jax.random.key(seed), not by jax.random.PRNGKey")
    if rows is None:
        raise ValueError("a key is shared out over the rows of a batch, and no array of a batch was passed")
    return jax.random.split(key, rows)


@dataclasses.dataclass(frozen=True)
class OutputDims:
    """The dims of results, a tree of strings, in a form that can be hashed."""

    dims: tuple[str, ...]
    treedef: Any

    @classmethod
    def from_tree(cls, out: PyTree[str]) -> "OutputDims":
        names, treedef = jax.tree.flatten(out)
        return cls(tuple(names), treedef)


@dataclasses.dataclass(frozen=True)
class SpmdProgram(ShardMapProgram):
    """`fn` as it stands."""

    out: OutputDims

    def __call__(self, args, keys):
        return self.fn(*args) if keys is None else self.fn(*args, key=keys)

    def out_specs(self, shard_map, on_one_device, arrays):
        """A varying type tells along which axes a result differs, its names tell which of its dims is split: together
        they are its spec. The types are known only inside, so the function is traced once for them."""
        found: list = []

        def look(arrays):
            result = on_one_device(arrays)
            found.append((jax.tree.map(varying, result), leaves(result)))
            return ()

        jax.eval_shape(shard_map(look, out_specs=()), arrays)
        axes, described = found[0]
        names = self.out.treedef.unflatten(self.out.dims)
        names = jax.tree.leaves(jax.tree.map(lambda name, part: jax.tree.map(lambda _: name, part), names, axes))
        results, treedef = jax.tree.flatten(axes)
        return jax.tree.unflatten(treedef, list(map(self.infer_spec, names, described, results)))

    def infer_spec(self, names: str, leaf: Leaf, axes: frozenset[str]) -> PartitionSpec:
        dims = [Dim(name) for name in names.split()] if leaf.dims is None else leaf.dims
        at_rest = {} if leaf.dims is None else dict(self.mesh.find_gather_dims(dims))
        split: list[tuple[str, ...] | None] = []
        open_axes = set(axes)
        for place, dim in enumerate(dims):
            own = tuple(a for a in self.mesh.axes(dim.name) + at_rest.get(place, ()) if a in open_axes)
            open_axes -= set(own)
            split.append(own or None)
        if open_axes:
            what = f"named {names!r}" if leaf.dims is None else leaf.name
            raise ValueError(
                f"a result {what} differs between devices along {sorted(open_axes)}, which splits none of its dims. "
                "Name the dim that it splits, or sum partial results with zoo.parallel.reduce(x, over=dim)."
            )
        while split and split[-1] is None:  # as JAX writes its own, and Mesh.spec: a result that comes in again is
            split.pop()  # then no other layout
        return PartitionSpec(*split)

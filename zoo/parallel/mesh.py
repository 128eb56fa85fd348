"""The mesh: devices along six named axes, and the PartitionSpec of an array by its dims, its shape and the layout."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jax.core import Tracer
from jax.experimental import mesh_utils
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from zoo._checks import check_not_donated, describe_argument
from zoo._compile_cache import disable_cache_for_cpu_mesh
from zoo._keywords import check_keywords
from zoo.ops.platform import Platform, normalize_platform, stand_in_platform

from .dims import Dim
from .layout import AXES, Layout
from .module import Leaf, leaves

_AXES_OVER_SLICES = ("pipe", "data")  # they move least, and seldom
_REPLICATED_IF_FEWER = ("kv_heads", "groups")
"""Dims that are replicated over an axis larger than their count: a device selects the heads that its queries use."""
_REPLICATED_IF_UNEVEN = ("vocab",)
"""Dims that are replicated, with a warning, if their axes do not divide them."""


@dataclasses.dataclass(frozen=True)
class Mesh:
    """Devices along six named axes, with the layout that shards arrays over them. Made by `make_mesh`."""

    devices: jax.sharding.Mesh
    layout: Layout

    @property
    def shape(self) -> dict[str, int]:
        """Size of each axis, by name; all six axes always exist."""
        return dict(self.devices.shape)

    @property
    def platform(self) -> Platform:
        """Platform of the devices, which need not be JAX's default backend, or for which they stand in."""
        return normalize_platform(stand_in_platform.value or self.devices.devices.flat[0].platform)

    @property
    def optimizer(self) -> "Mesh":
        """The mesh with the layout of gradients and optimizer state: `zoo.place(opt_state, mesh.optimizer)`."""
        if self.layout.optimizer is None:
            return self.gradients
        return self._with_parameters(self.layout.optimizer)

    @property
    def gradients(self) -> "Mesh":
        """The mesh with the layout of gradients in the backward pass."""
        if self.layout.gradients is None:
            return self
        return self._with_parameters(self.layout.gradients)

    @property
    def num_stages(self) -> int:
        """Parts that a pipeline deals the layers out in: one per device of `pipe` and round, 1 without a pipeline."""
        return self.shape["pipe"] * self.layout.rounds

    @property
    def axes_at_rest(self) -> tuple[str, ...]:
        """Axes of size above 1 that shard parameters at rest, and not during compute (ZeRO-3)."""
        axes = [axis for row in self.layout.parameters.values() for axis in row]
        return tuple(axis for axis in AXES if axis in axes and self.devices.shape[axis] > 1)

    @property
    def without_sequence_parallelism(self) -> "Mesh":
        """The mesh with hidden states that `tensor` does not shard, as decoding needs them: a step has one token."""
        layout = self.layout.with_dims(tokens=self.layout.axes("seq"))
        return dataclasses.replace(self, layout=layout)

    def _with_parameters(self, parameters: Mapping[str, tuple[str, ...]]) -> "Mesh":
        layout = dataclasses.replace(self.layout, parameters=parameters, gradients=None, optimizer=None)
        return dataclasses.replace(self, layout=layout)

    def axes(self, dim: str) -> tuple[str, ...]:
        """Return the axes of size above 1 that shard `dim` during compute."""
        return tuple(axis for axis in self.layout.axes(dim) if self.devices.shape[axis] > 1)

    def count_shards(self, dim: str) -> int:
        """Return the number of shards of `dim` during compute; 1 if it is replicated.

        Inside `zoo.spmd`, `zoo.parallel.num_shards` counts the shards of an array.
        """
        return self._multiply(self.axes(dim))

    def find_gather_dims(self, dims: Sequence[Dim]) -> list[tuple[int, tuple[str, ...]]]:
        """Return the array axes of a parameter with these dims that `gather` all-gathers, each with its mesh axes."""
        used = {axis for dim in dims for axis in self.axes(dim.name)}
        gather_dims = []
        for index, dim in enumerate(dims):
            at_rest = self.layout.parameters.get(dim.name, ())
            if axes := tuple(axis for axis in at_rest if self.devices.shape[axis] > 1 and axis not in used):
                gather_dims.append((index, axes))
                used |= set(axes)
        return gather_dims

    def spec(self, dims: Sequence[Dim], shape: Sequence[int], name: str = "an array") -> PartitionSpec:
        """Return the PartitionSpec at rest of an array with these dims and this shape.

        A mesh axis shards at most one dim of an array, the first that names it. If the axes do not divide a vocabulary,
        outer axes are left out until the remaining ones do. **Raises** `ValueError` for an unknown dim, and if the axes
        do not divide another count, with the sizes that would work.
        """
        at_rest = dict(self.find_gather_dims(dims))
        used: set[str] = set()
        entries = []
        for index, (dim, size) in enumerate(zip(dims, shape, strict=True)):
            axes = tuple(axis for axis in self.axes(dim.name) if axis not in used)
            axes = self._choose_axes(dim, size // dim.unit, axes, at_rest.get(index, ()), name)
            used |= set(axes)
            entries.append(axes or None)
        while entries and entries[-1] is None:  # as JAX writes its own: equal shardings then have equal specs
            entries.pop()
        return PartitionSpec(*entries)

    def _choose_axes(
        self, dim: Dim, count: int, axes: tuple[str, ...], at_rest: tuple[str, ...], name: str
    ) -> tuple[str, ...]:
        """Return the axes that shard `count` elements at rest: `axes` and `at_rest`, except axes that the dim may drop.
        The axes at rest are always kept: `gather` reads them off the layout, and cannot know the whole count.
        """
        candidates = [axes]
        if dim.name in _REPLICATED_IF_UNEVEN:
            candidates += [axes[first:] for first in range(1, len(axes) + 1)]
        elif dim.name in _REPLICATED_IF_FEWER and self._multiply(axes) % count == 0:
            candidates.append(())
        for chosen in candidates:
            if count % self._multiply(chosen + at_rest) == 0:
                return chosen + at_rest
        needed = candidates[-1] + at_rest
        shards = self._multiply(needed)
        sizes = " x ".join(f"{axis}={self.devices.shape[axis]}" for axis in needed)
        divisors = [str(n) for n in range(1, min(count, 4096) + 1) if count % n == 0]
        divisors += [f"a multiple of {count}"] if dim.name in _REPLICATED_IF_FEWER else []
        advice = ""
        if dim.name == "layers" and count > shards:
            advice = f", or move layers out of the stages with zoo.models.split_ends(model, {self.num_stages})"
        noun = {"batch": "rows", "seq": "tokens"}.get(dim.name, dim.name)
        raise ValueError(
            f"{name}: {count} {noun} do not divide evenly over {sizes}. Use a multiple of {shards} {noun}, or let "
            f"{' x '.join(needed)} be {', '.join(divisors[:-1])}{' or ' if divisors[:-1] else ''}{divisors[-1]}"
            f"{advice}."
        )

    def _multiply(self, axes: Sequence[str]) -> int:
        return math.prod(self.devices.shape[axis] for axis in axes)

    def specs(
        self, tree: PyTree, name_dims: Callable[[str], Sequence[str]] = lambda name: (), *, uneven_state: bool = False
    ) -> PyTree:
        """Return a PartitionSpec for every array of `tree`.

        Arrays in modules have the dims of their annotations. For other arrays `name_dims(path)` names the leading dims;
        further dims are replicated. `uneven_state` replicates dims of an optimizer state that the axes do not divide,
        such as a placeholder of one element, instead of raising.
        """

        def spec(leaf, x):
            if leaf.dims is None:
                dims = [Dim(name) for name in name_dims(leaf.name)[: x.ndim]]
            else:
                dims = leaf.dims
            try:
                return self.spec(dims, x.shape[: len(dims)], leaf.name)
            except ValueError:
                if uneven_state and leaf.in_optimizer_state:
                    return PartitionSpec()
                raise

        values, treedef = jax.tree.flatten(tree)
        return jax.tree.unflatten(treedef, list(map(spec, leaves(tree), values)))

    def shardings(
        self, tree: PyTree, name_dims: Callable[[str], Sequence[str]] = lambda name: (), *, uneven_state: bool = False
    ) -> PyTree:
        """Return `specs` as `NamedSharding`s."""
        specs = self.specs(tree, name_dims, uneven_state=uneven_state)
        return jax.tree.map(lambda spec: NamedSharding(self.devices, spec), specs, is_leaf=_is_spec)

    def __str__(self) -> str:
        return format_sizes(self.shape)

    def __repr__(self) -> str:
        sizes = [f"{axis}={size}" for axis, size in self.shape.items() if size > 1]
        count = self.devices.size
        devices = "1 device" if count == 1 else f"{count} devices"
        return f"Mesh({'; '.join(filter(None, [', '.join(sizes), devices]))})"


def require_mesh(mesh: Any) -> None:
    """**Raises** `TypeError` for anything but a `Mesh`."""
    if isinstance(mesh, Mesh):
        return
    advice = ""
    if isinstance(mesh, jax.sharding.Mesh):
        advice = " of jax.sharding, which lacks the layout that zoo.make_mesh(data=2, tensor=4) gives to its six axes"
    elif callable(mesh):
        advice = ": the mesh comes second, as in zoo.value_and_grad(loss_fn, mesh) and zoo.place(model, mesh)"
    raise TypeError(f"expected a mesh of zoo.make_mesh, got {describe_argument(mesh)}{advice}")


def check_placed(leaf: Leaf, x: Any, mesh: Mesh) -> None:
    """Check that an array of a module does not lie on a mesh of another shape. An array of one device, which a program
    shares out, may be anywhere, and where a traced one lies is not known.

    **Raises** `ValueError` with both meshes; `RuntimeError` for a donated array.
    """
    check_not_donated(x)
    if leaf.dims is not None and isinstance(x, jax.Array) and not isinstance(x, Tracer):
        sharding = x.sharding
        if isinstance(sharding, NamedSharding) and dict(sharding.mesh.shape) != mesh.shape:
            raise ValueError(
                f"the model lies on {format_sizes(sharding.mesh.shape)}, and this call is for {mesh}: "
                "zoo.place(model, mesh) moves it"
            )


def format_sizes(sizes: Mapping[str, int]) -> str:
    """Return the axes that shard something, as in "data 4 x tensor 2"."""
    return " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1) or "one device"


def is_array_or_shape(x: Any) -> bool:
    """Return True for an array, and for a `jax.ShapeDtypeStruct` that stands for one."""
    return eqx.is_array(x) or isinstance(x, jax.ShapeDtypeStruct)


def _is_spec(x: Any) -> bool:
    return isinstance(x, PartitionSpec)


@check_keywords
def make_mesh(
    data: int = -1,
    fsdp: int = 1,
    expert: int = 1,
    context: int = 1,
    tensor: int = 1,
    pipe: int = 1,
    *,
    devices: Sequence[Any] | None = None,
    layout: Layout | None = None,
) -> Mesh:
    """Make a mesh over `devices` (default: all). One axis may be -1: its size is inferred from the number of devices.

    All six axes exist whatever their sizes; an axis of size 1 shards nothing. Over several CPU devices, the process no
    longer uses JAX's persistent compilation cache, which returns wrong programs for them.

    **Raises** `ValueError` if the product of the sizes is not the number of devices, or if other axes than `pipe` and
    `data` would span slices of TPUs, between which the network is slow.
    """
    devices = jax.devices() if devices is None else list(devices)
    sizes: dict[str, int] = dict(zip(AXES, (pipe, data, fsdp, expert, context, tensor), strict=True))
    for size in sizes.values():
        if not isinstance(size, int | np.integer):
            raise TypeError(
                f"the size of a mesh axis is a whole number, as in zoo.make_mesh(data=2, tensor=4), not {size!r}: axes "
                "have names, and devices are passed as devices="
            )
    if bad := {axis: size for axis, size in sizes.items() if size < 1 and size != -1}:
        raise ValueError(f"a mesh axis has a size of at least 1, or -1 for the remaining devices, not {bad}")
    inferred = [axis for axis, size in sizes.items() if size == -1]
    if len(inferred) > 1:
        raise ValueError(f"only one axis can be -1, not {' and '.join(inferred)}: give the others a size")
    fixed = math.prod(size for size in sizes.values() if size != -1)
    asked = " x ".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1) or "every axis 1"
    if inferred and len(devices) % fixed == 0:
        sizes[inferred[0]] = len(devices) // fixed
    elif fixed != len(devices):
        raise ValueError(
            f"{asked} asks for {'a multiple of ' if inferred else ''}{fixed} device{'s' * (fixed > 1)}, "
            f"{format_device_count(len(devices))}. {_suggest_devices(fixed, len(devices))}"
        )
    disable_cache_for_cpu_mesh(devices)
    auto = (AxisType.Auto,) * len(AXES)
    arranged = _arrange_devices(list(sizes.values()), devices)
    return Mesh(jax.sharding.Mesh(arranged, AXES, axis_types=auto), layout or Layout())


def format_device_count(count: int) -> str:
    """Return "there is 1", "there are 8"."""
    return f"there {'is' if count == 1 else 'are'} {count}"


def _suggest_devices(asked: int, available: int) -> str:
    """Suggest how to give a mesh the devices that it asks for, or how to ask for the available ones."""
    multiply = f"Let the sizes multiply to {available}"
    if asked < available:
        return f"{multiply}, or call make_mesh(devices=jax.devices()[:{asked}])."
    return (
        f"{multiply}. To try a mesh of {asked} on a CPU, start Python with JAX_PLATFORMS=cpu "
        f"XLA_FLAGS=--xla_force_host_platform_device_count={asked}"
    )


def _arrange_devices(sizes: Sequence[int], devices: Sequence[Any]) -> np.ndarray:
    """Return devices in an array of these sizes: inner axes along the fastest links, and outermost axes over slices,
    which a slower network joins. A torus of TPUs may be cut along any of its dims."""
    slices = len({getattr(device, "slice_index", 0) for device in devices})
    on_gpus = all(getattr(device, "platform", None) == "gpu" for device in devices)  # whose slices are single hosts
    outer = []
    remaining = slices
    for axis, size in zip(AXES, sizes, strict=True):
        outer.append(math.gcd(size, remaining) if on_gpus or axis in _AXES_OVER_SLICES else 1)
        remaining //= outer[-1]
    if remaining > 1:
        asked = " x ".join(f"{axis}={size}" for axis, size in zip(AXES, sizes, strict=True) if size > 1)
        raise ValueError(
            f"{len(devices)} devices in {slices} slices, which a slow network joins, and {asked}: let pipe x data be a "
            f"multiple of {slices}, so that each slice holds all of the other axes"
        )
    if slices == 1:
        return mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)
    inner = [size // count for size, count in zip(sizes, outer, strict=True)]
    return mesh_utils.create_hybrid_device_mesh(inner, outer, devices, allow_split_physical_axes=True)


def replicated_dims(tree: PyTree, mesh: Mesh) -> list[str]:
    """Return one line for each dim that is replicated, over some axes or all, because its axes do not divide it."""
    lines: dict[str, str] = {}
    arrays = eqx.filter(tree, is_array_or_shape)
    for leaf, x in zip(leaves(arrays), jax.tree.leaves(arrays), strict=True):
        spec = mesh.spec(leaf.dims, x.shape, leaf.name) if leaf.dims else ()
        for dim, size, entry in zip(leaf.dims or (), x.shape, (*spec, *[None] * x.ndim), strict=False):
            axes = mesh.axes(dim.name)
            chosen = (entry,) if isinstance(entry, str) else entry or ()
            if dim.name in _REPLICATED_IF_UNEVEN and not set(axes) <= set(chosen):
                shards = mesh._multiply(axes)
                kept = [axis for axis in axes if axis in chosen]
                if kept:
                    result = f"sharded only over {' x '.join(kept)}"
                else:
                    result = "replicated"
                lines[dim.name] = (
                    f"{leaf.name}: {size} {dim.name} do not divide evenly over {' x '.join(axes)}={shards} and are "
                    f"{result}; {-(-size // shards) * shards} would be sharded{' over all' if kept else ''}."
                )
    return list(lines.values())

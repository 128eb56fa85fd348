"""One table says which mesh axis splits which dim; every PartitionSpec of the library follows from it."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import equinox as eqx
import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from .module import Dim, leaves

AXES = ("pipe", "data", "fsdp", "expert", "context", "tensor")
"""The axes of every mesh, outermost first: what talks most lies closest."""

_COMPUTE: dict[str, tuple[str, ...]] = {
    "batch": ("data", "fsdp", "expert"),
    "seq": ("context",),
    "key_seq": ("context",),
    "layers": ("pipe",),
    "experts": ("expert",),
    "vocab": ("pipe", "tensor"),
    **dict.fromkeys(("heads", "kv_heads", "groups", "mlp", "inner"), ("tensor",)),
    **dict.fromkeys(("embed", "head_dim", "state", "latent", "conv", "positions", "classes", "chunk", "rank"), ()),
    **dict.fromkeys(("in", "out", "features", "new", "slots", "choices", "top", "key_dim", "value_dim"), ()),
    **dict.fromkeys(("left_out", "left_in", "right_out", "right_in", "pairs"), ()),
}
_PARAMETERS: dict[str, tuple[str, ...]] = {"embed": ("fsdp",)}

_REPLICATED_IF_FEWER = ("kv_heads", "groups")
"""Dims that lie whole on an axis larger than their count: a device picks those that its queries use."""
_REPLICATED_IF_UNEVEN = ("vocab",)
"""Dims that lie whole wherever their axes do not divide them."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """Which mesh axes split which dim.

    - `split`: while it is used. Heads over `tensor` is Megatron's split (arXiv:1909.08053).
    - `at_rest`: parameters, where they are stored; `gather` brings them together just before use: ZeRO-3
      (arXiv:1910.02054, section 5.3).
    - `updates`: gradients and the optimizer's state; as `at_rest` unless given.

    `Layout()` is the table of the documentation; `Layout().with_dims(sensors=("tensor",))` adds a dim of your own.
    """

    compute: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=_COMPUTE.copy)
    parameters: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=_PARAMETERS.copy)
    optimizer: Mapping[str, tuple[str, ...]] | None = None

    def __post_init__(self):
        for row in (self.compute, self.parameters, self.optimizer or {}):
            for dim, axes in row.items():
                if unknown := [axis for axis in axes if axis not in AXES]:
                    raise ValueError(f"the layout splits {dim!r} over {unknown[0]!r}, but the mesh axes are {AXES}")
                if dim not in self.compute:
                    raise ValueError(f"the layout stores {dim!r}, a dim that its table `split` does not have")
        if self.optimizer is not None and any(self.optimizer.get(dim) != axes for dim, axes in self.parameters.items()):
            raise ValueError("what is split at rest is split in updates too: let `updates` hold the rows of `at_rest`")

    def __hash__(self):
        # Asked for thousands of times while one program is traced, so of the names alone; == tells the rest.
        return hash(frozenset(self.compute))

    def with_dims(self, **rows: tuple[str, ...]) -> "Layout":
        """The same table with more dims, or other axes for a dim it has."""
        return dataclasses.replace(self, compute={**self.compute, **rows})

    def axes(self, dim: str) -> tuple[str, ...]:
        """The axes that split a dim in use. **Raises** `ValueError` for a name that the table does not have."""
        if dim.isdigit():
            return ()
        if dim not in self.compute:
            raise ValueError(
                f"the layout has no dim {dim!r}. It knows {', '.join(sorted(self.compute))}; "
                f"Layout().with_dims({dim}=()) adds one that nothing splits."
            )
        return self.compute[dim]


ZERO1 = Layout(parameters={}, optimizer=_PARAMETERS)
"""Parameters whole on every device of `fsdp`, gradients and the optimizer's state split (ZeRO stages 1 and 2)."""


@dataclasses.dataclass(frozen=True)
class Mesh:
    """Devices with six named axes, and the layout that says what lies where on them. Made by `make_mesh`."""

    devices: jax.sharding.Mesh
    layout: Layout

    @property
    def shape(self) -> dict[str, int]:
        """Axis name to size; all six axes always exist."""
        return dict(self.devices.shape)

    @property
    def optimizer(self) -> "Mesh":
        """The mesh as gradients and the optimizer's state lie on it: place an optimizer's state on this one."""
        layout = self.layout
        parameters = layout.parameters if layout.optimizer is None else layout.optimizer
        return dataclasses.replace(self, layout=dataclasses.replace(layout, parameters=parameters, optimizer=None))

    def axes(self, dim: str) -> tuple[str, ...]:
        """The axes of more than one device that split `dim` in use."""
        return tuple(axis for axis in self.layout.axes(dim) if self.devices.shape[axis] > 1)

    def find_gather_dims(self, dims: Sequence[Dim]) -> list[tuple[int, tuple[str, ...]]]:
        """Where `gather` has something to bring together in an array of these dims: (place of the dim, its axes)."""
        taken = {axis for dim in dims for axis in self.axes(dim.name)}
        found = []
        for place, dim in enumerate(dims):
            rows = self.layout.parameters.get(dim.name, ())
            if axes := tuple(axis for axis in rows if self.devices.shape[axis] > 1 and axis not in taken):
                found.append((place, axes))
                taken |= set(axes)
        return found

    def spec(self, dims: Sequence[Dim], shape: Sequence[int], name: str = "an array") -> PartitionSpec:
        """How an array of these dims and this shape lies at rest.

        An axis splits one dim of an array, the first that names it. **Raises** `ValueError` for an unknown dim, and
        where the axes do not divide the count, with what would do.
        """
        at_rest = dict(self.find_gather_dims(dims))
        taken: set[str] = set()
        split = []
        for place, (dim, size) in enumerate(zip(dims, shape, strict=True)):
            axes = tuple(axis for axis in self.axes(dim.name) if axis not in taken)
            axes = axes + at_rest.get(place, ())
            if axes and not self.is_divisible(dim, size // dim.unit, axes, name):
                axes = ()
            taken |= set(axes)
            split.append(axes or None)
        while split and split[-1] is None:  # as JAX writes its own: equal layouts are then equal specs
            split.pop()
        return PartitionSpec(*split)

    def is_divisible(self, dim: Dim, count: int, axes: tuple[str, ...], name: str) -> bool:
        shares = math.prod(self.devices.shape[axis] for axis in axes)
        if count % shares == 0:
            return True
        if dim.name in _REPLICATED_IF_UNEVEN or (dim.name in _REPLICATED_IF_FEWER and shares % count == 0):
            return False
        sizes = " x ".join(f"{axis}={self.devices.shape[axis]}" for axis in axes)
        fitting = [str(n) for n in range(1, min(count, 4096) + 1) if count % n == 0]
        fitting += [f"a multiple of {count}"] if dim.name in _REPLICATED_IF_FEWER else []
        what = {"batch": "rows", "seq": "tokens"}.get(dim.name, dim.name)
        raise ValueError(
            f"{name}: {count} {what} do not share out over {sizes}. Use a multiple of {shares} {what}, "
            f"or let {' x '.join(axes)} be {', '.join(fitting[:-1])}{' or ' if fitting[:-1] else ''}{fitting[-1]}."
        )

    def specs(self, tree: PyTree, default_dims: Sequence[str] = ()) -> PyTree:
        """A PartitionSpec for every array of `tree`: in a module by its annotations; a loose array by `loose`, the
        names of its first dims, and whole where it has more."""

        def spec(leaf, x):
            dims = [Dim(name) for name in default_dims[: x.ndim]] if leaf.dims is None else leaf.dims
            return self.spec(dims, x.shape[: len(dims)], leaf.name)

        values, treedef = jax.tree.flatten(tree)
        return jax.tree.unflatten(treedef, list(map(spec, leaves(tree), values)))

    def shardings(self, tree: PyTree, default_dims: Sequence[str] = ()) -> PyTree:
        """`specs` as shardings, for JAX's own functions."""
        specs = self.specs(tree, default_dims)
        return jax.tree.map(lambda spec: NamedSharding(self.devices, spec), specs, is_leaf=_is_spec)

    def __str__(self) -> str:
        split = [f"{axis} {size}" for axis, size in self.shape.items() if size > 1]
        return " x ".join(split) or "one device"


def _is_spec(x: Any) -> bool:
    return isinstance(x, PartitionSpec)


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
    """A mesh over `devices` (all there are, unless given). One axis may be -1: it takes the devices that remain.

    All six axes exist whatever their sizes; one of size 1 splits nothing.

    **Raises** `ValueError` where the sizes do not multiply to the number of devices, and `NotImplementedError`, by
    name, for an axis that the layers do not split over yet.
    """
    devices = jax.devices() if devices is None else list(devices)
    sizes: dict[str, int] = dict(zip(AXES, (pipe, data, fsdp, expert, context, tensor), strict=True))
    for axis in ("expert", "context", "pipe"):
        if sizes[axis] != 1:
            raise NotImplementedError(
                f"{axis}={sizes[axis]}: this version does not split over {axis!r} yet, leave it at 1. "
                "data, fsdp and tensor work in every combination."
            )
    if bad := {axis: size for axis, size in sizes.items() if size < 1 and size != -1}:
        raise ValueError(f"a mesh axis has a size of at least 1, or -1 for what remains, not {bad}")
    open_axes = [axis for axis, size in sizes.items() if size == -1]
    if len(open_axes) > 1:
        raise ValueError(f"only one axis can take what remains, not {' and '.join(open_axes)}: give the others a size")
    fixed = math.prod(size for size in sizes.values() if size != -1)
    asked = " x ".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1) or "every axis 1"
    if open_axes and len(devices) % fixed == 0:
        sizes[open_axes[0]] = len(devices) // fixed
    elif fixed != len(devices):
        raise ValueError(
            f"{asked} asks for {'a multiple of ' if open_axes else ''}{fixed} devices, there are {len(devices)}. "
            f"Let the sizes multiply to {len(devices)}, or pass devices=jax.devices()[:{fixed}]."
        )
    auto = (AxisType.Auto,) * len(AXES)
    mesh = jax.make_mesh(tuple(sizes.values()), AXES, axis_types=auto, devices=devices)
    return Mesh(mesh, layout or Layout())


def replicated_dims(tree: PyTree, mesh: Mesh) -> list[str]:
    """One line for every kind of dim that its axes do not divide and that therefore lies whole on each device."""
    found: dict[str, str] = {}
    arrays = eqx.filter(tree, lambda x: eqx.is_array(x) or isinstance(x, jax.ShapeDtypeStruct))
    for leaf, x in zip(leaves(arrays), jax.tree.leaves(arrays), strict=True):
        for dim, size in zip(leaf.dims or (), x.shape, strict=False):
            axes = mesh.axes(dim.name)
            if (
                dim.name in _REPLICATED_IF_UNEVEN
                and axes
                and not mesh.is_divisible(dim, size // dim.unit, axes, leaf.name)
            ):
                shares = math.prod(mesh.shape[axis] for axis in axes)
                found[dim.name] = (
                    f"{leaf.name}: {size} {dim.name} do not share out over {' x '.join(axes)}={shares} and lie whole "
                    f"on each device; {-(-size // shares) * shares} would be split."
                )
    return list(found.values())

"""Describe a model on a mesh: parameters with their shards by kind of layer, and the moves of a training step."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jaxtyping import PyTree

from zoo.inspect.implementations import format_ranges
from zoo.models.encoders.image import ImageEncoder
from zoo.models.parameter_paths import ParameterPath, list_parameter_paths
from zoo.parallel import Mesh
from zoo.parallel.layout import AXES
from zoo.parallel.mesh import is_array_or_shape
from zoo.parallel.module import is_trainable
from zoo.parallel.rounds import merge_rounds

from .moves import Move, choose_seq_len, count_microbatches, find_image_shape, trace_moves

_LAYER = "layers.*."


@dataclasses.dataclass(frozen=True)
class DrawnParameter:
    """A parameter of one layer, or outside of the layers."""

    name: str
    """`layers.*.attention.query.weight`, as `zoo.models.list_parameter_paths` has it."""
    dims: tuple[str, ...]
    """Names of the dims, except the dim of the layers."""
    shape: tuple[int, ...]
    sharded_axes: tuple[tuple[str, ...], ...]
    """Mesh axes that shard each dim at rest, outermost first."""
    gathered_axes: tuple[tuple[str, ...], ...]
    """The axes among these over which it is all-gathered before use."""
    dtype: str
    bytes: int
    bytes_per_device: int
    trainable: bool
    """False for buffers, and for parameters that adapters freeze."""


@dataclasses.dataclass(frozen=True)
class Group:
    """All layers with the same parameters, or the parameters outside of the layers."""

    name: str
    layers: tuple[int, ...]
    """Numbers of the layers; () outside of them."""
    stages: int
    """Stages of the pipeline that share the layers out."""
    parameters: tuple[DrawnParameter, ...]

    @property
    def bytes(self) -> int:
        return max(len(self.layers), 1) * sum(parameter.bytes for parameter in self.parameters)

    @property
    def bytes_per_device(self) -> int:
        one = sum(parameter.bytes_per_device for parameter in self.parameters)
        return one * max(len(self.layers), 1) // self.stages


@dataclasses.dataclass(frozen=True)
class AxisUse:
    """A mesh axis of more than one device, and its uses."""

    name: str
    size: int
    shards: tuple[str, ...]
    """Dims of parameters and batches that it shards."""
    count: int
    """Collectives along it in a step, on one device."""
    bytes: int
    """Bytes of these collectives per device in a step."""


@dataclasses.dataclass(frozen=True)
class Drawing:
    """A model on a mesh: the result of `describe_layout`."""

    title: str
    mesh: str
    axis_sizes: dict[str, int]
    axes: tuple[AxisUse, ...]
    groups: tuple[Group, ...]
    moves: tuple[Move, ...]
    """Collectives of a training step, summed by place, phase and axes."""
    batch: str
    """The batch for which the moves are counted, in words; empty without moves."""

    @property
    def num_devices(self) -> int:
        return math.prod(self.axis_sizes.values())

    @property
    def bytes(self) -> int:
        return sum(group.bytes for group in self.groups)

    @property
    def bytes_per_device(self) -> int:
        return sum(group.bytes_per_device for group in self.groups)


def describe_layout(
    model: PyTree,
    mesh: Mesh,
    *,
    title: str = "",
    loss_fn: Callable | None = None,
    batch: Mapping[str, Any] | None = None,
    seq_len: int = 1024,
) -> Drawing:
    """Describe a model on a mesh, and its training step, which is traced in shapes: nothing is computed.

    The arguments are the same as for `draw_layout`, which draws the result. **Raises** as it does.
    """
    shapes = merge_rounds(jax.tree.map(_to_shape, model))
    groups = _make_groups(shapes, mesh)
    moves = trace_moves(shapes, mesh, loss_fn=loss_fn, batch=batch, seq_len=seq_len)
    return Drawing(
        title=title or type(model).__name__,
        mesh=str(mesh),
        axis_sizes=mesh.shape,
        axes=tuple(_describe_axis(axis, mesh, groups, moves) for axis in AXES if mesh.shape[axis] > 1),
        groups=tuple(groups),
        moves=tuple(moves),
        batch=_describe_batch(shapes, mesh, batch, seq_len) if moves else "",
    )


def _to_shape(x: Any) -> Any:
    if not is_array_or_shape(x):
        return x
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _make_groups(model: PyTree, mesh: Mesh) -> list[Group]:
    """Return a group for the parts before the layers, one per kind of layer, and one for the parts after them."""
    before: list[DrawnParameter] = []
    after: list[DrawnParameter] = []
    blocks: dict[Sequence[int], list[DrawnParameter]] = {}
    stages = mesh.count_shards("layers")
    for path, x in zip(list_parameter_paths(model), jax.tree.leaves(eqx.filter(model, is_array_or_shape)), strict=True):
        parameter = _describe_parameter(path, x, mesh)
        if path.name.startswith(_LAYER):
            blocks.setdefault(path.ranges[0], []).append(parameter)
        elif _is_input(path.name):
            before.append(parameter)
        else:
            after.append(parameter)
    kinds: dict[tuple[DrawnParameter, ...], list[int]] = {}
    for layers, parameters in blocks.items():
        kinds.setdefault(tuple(parameters), []).extend(layers)
    groups = [Group("before the layers" if kinds else "input", (), 1, tuple(before))]
    for parameters, layers in kinds.items():
        name = f"layer {layers[0]}" if len(layers) == 1 else f"{len(layers):,} layers: {format_ranges(layers)}"
        groups.append(Group(name, tuple(sorted(layers)), stages, parameters))
    groups.append(Group("after the layers" if kinds else "model", (), 1, tuple(after)))
    return [group for group in groups if group.parameters]


def _is_input(name: str) -> bool:
    word = name.partition(".")[0]
    return "embedding" in word or "inputs" in word


def _describe_parameter(path: ParameterPath, x: Any, mesh: Mesh) -> DrawnParameter:
    sharded = []
    if path.dims:
        for axes in mesh.spec(path.dims, x.shape, path.name):
            if isinstance(axes, str):  # JAX unpacks single axes
                axes = (axes,)
            sharded.append(axes or ())
    sharded += [()] * (len(x.shape) - len(sharded))
    gathered = dict(mesh.find_gather_dims(path.dims))
    first = int(path.name.startswith(_LAYER))
    dims = tuple(dim.name for dim in path.dims) or ("",) * len(x.shape)
    size = math.prod(x.shape[first:]) * np.dtype(x.dtype).itemsize
    return DrawnParameter(
        name=path.name,
        dims=dims[first:],
        shape=tuple(x.shape[first:]),
        sharded_axes=tuple(sharded[first:]),
        gathered_axes=tuple(gathered.get(index, ()) for index in range(first, len(x.shape))),
        dtype=str(x.dtype),
        bytes=size,
        bytes_per_device=size // math.prod(mesh.shape[axis] for axes in sharded[first:] for axis in axes),
        trainable=is_trainable(path.leaf, x),
    )


def _describe_axis(axis: str, mesh: Mesh, groups: Sequence[Group], moves: Sequence[Move]) -> AxisUse:
    dims = [dim for dim in ("batch", "seq") if axis in mesh.axes(dim)]
    for group in groups:
        if group.layers and axis in mesh.axes("layers"):
            dims.append("layers")
        for x in group.parameters:
            dims += [dim for dim, axes in zip(x.dims, x.sharded_axes, strict=True) if axis in axes]
    along = [move for move in moves if axis in move.axes]
    count = sum(move.count for move in along)
    size = sum(move.bytes for move in along)
    return AxisUse(axis, mesh.shape[axis], tuple(dict.fromkeys(dims)), count, size)


def _describe_batch(model: Any, mesh: Mesh, batch: Mapping[str, Any] | None, seq_len: int) -> str:
    if batch is not None:
        shape = jax.tree.leaves(batch)[0].shape
        return f"a batch of {' x '.join(f'{size:,}' for size in shape)}"
    microbatches = count_microbatches(mesh)
    rows = f"{microbatches} micro-batches of 1 row" if microbatches > 1 else "1 row"
    if isinstance(model, ImageEncoder):
        return f"{rows} per device, images of {' x '.join(map(str, find_image_shape(model)[1:]))}"
    tokens = f"{rows} of {choose_seq_len(model, mesh, seq_len):,} tokens per"
    if not (axes := mesh.axes("seq")):
        return f"{tokens} device"
    return f"{tokens} {mesh.count_shards('seq')} devices along {' x '.join(axes)}"

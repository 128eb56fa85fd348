"""Describe a model on a mesh: parameters with their shards by kind of layer, and the moves of a training step."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jaxtyping import PyTree

from zoo.models.decoder import AbstractBlock
from zoo.models.encoders.image import ImageEncoder
from zoo.models.parameter_paths import ParameterPath, list_parameter_paths
from zoo.models.stack import is_stack
from zoo.parallel import Mesh
from zoo.parallel.layout import AXES
from zoo.parallel.mesh import is_array_or_shape
from zoo.parallel.module import is_trainable
from zoo.parallel.rounds import merge_rounds

from .attach import attach_moves
from .parts import AxisUse, Drawing, DrawnParameter, Group, Section
from .traced_moves import TracedMove, choose_seq_len, count_microbatches, find_image_shape, trace_step

_LAYER = "layers.*."


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
    kinds = _find_kinds(shapes)
    groups = _make_groups(shapes, kinds, mesh)
    step = trace_step(shapes, mesh, kinds.find_label, loss_fn=loss_fn, batch=batch, seq_len=seq_len)
    groups, rest = attach_moves(_sort_sections(groups, step.calls), step.moves)
    described_batch = _describe_batch(shapes, mesh, batch, seq_len) if step.moves else ""
    return Drawing(
        title=title or type(model).__name__,
        mesh=str(mesh),
        axis_sizes=mesh.shape,
        axes=tuple(_describe_axis(axis, mesh, groups, step.moves) for axis in AXES if mesh.shape[axis] > 1),
        groups=tuple(groups),
        moves=tuple(rest),
        batch=described_batch,
    )


def _to_shape(x: Any) -> Any:
    if not is_array_or_shape(x):
        return x
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _drop_layer_axis(x: Any) -> Any:
    if not is_array_or_shape(x):
        return x
    return jax.ShapeDtypeStruct(x.shape[1:], x.dtype)


@dataclasses.dataclass
class _LayerKinds:
    """Kinds of layers. Layers of one kind have parameters with the same names, dims and shapes."""

    keys: list[Any] = dataclasses.field(default_factory=list)
    layers: list[list[int]] = dataclasses.field(default_factory=list)
    """Numbers of the layers of each kind."""
    names: list[str] = dataclasses.field(default_factory=list)

    def find_label(self, block: AbstractBlock) -> int:
        """Return the number of the kind of a stacked block."""
        return self.keys.index(_make_key(block))

    def add(self, block: AbstractBlock, layers: Sequence[int]) -> None:
        if (key := _make_key(block)) not in self.keys:
            self.keys.append(key)
            self.layers.append([])
            self.names.append(type(block).__name__)
        self.layers[self.keys.index(key)] += layers

    def find_kind(self, layer: int) -> int:
        """Return the number of the kind of a layer."""
        return next(kind for kind, layers in enumerate(self.layers) if layer in layers)


def _make_key(block: AbstractBlock) -> Any:
    """Return a key that is equal for layers of one kind."""
    one = jax.tree.map(_drop_layer_axis, block)
    arrays = zip(list_parameter_paths(one), jax.tree.leaves(eqx.filter(one, is_array_or_shape)), strict=True)
    return type(block), tuple((path.name, path.dims, x.shape, str(x.dtype)) for path, x in arrays)


def _find_kinds(model: PyTree) -> _LayerKinds:
    kinds = _LayerKinds()
    for stack in filter(is_stack, jax.tree.leaves(model, is_leaf=is_stack)):
        start = 0
        for segment in getattr(stack, "segments", ()):
            period = len(segment.blocks)
            repeats = segment.num_repeats
            for i, block in enumerate(segment.blocks):
                kinds.add(block, range(start + i, start + period * repeats, period))
            start += period * repeats
    return kinds


def _make_groups(model: PyTree, kinds: _LayerKinds, mesh: Mesh) -> list[Group]:
    """Return a group for the parts before the layers, one per kind of layer, and one for the parts after them."""
    arrays = jax.tree.leaves(eqx.filter(model, is_array_or_shape))
    before: list[DrawnParameter] = []
    after: list[DrawnParameter] = []
    in_layers: list[dict[str, DrawnParameter]] = [{} for _ in kinds.keys]
    layer_axes: tuple[str, ...] = ()
    for path, x in zip(list_parameter_paths(model), arrays, strict=True):
        parameter, axes = _describe_parameter(path, x, mesh)
        parameter = dataclasses.replace(parameter, trainable=is_trainable(path.leaf, x))
        if not path.name.startswith(_LAYER):
            side = before if _is_input(path.name) else after
            side.append(parameter)
            continue
        layer_axes = layer_axes or axes
        found = in_layers[kinds.find_kind(path.ranges[0][0])]
        if parameter.name in found:
            parameter = _add_layers(found[parameter.name], parameter)
        found[parameter.name] = parameter
    groups = [
        Group(name, tuple(sorted(layers)), layer_axes, _split_sections(list(parameters.values())))
        for name, layers, parameters in zip(kinds.names, kinds.layers, in_layers, strict=True)
    ]
    names = ("before the layers", "after the layers") if groups else ("input", "model")
    first, last = (
        Group(name, (), (), _split_sections(part)) for name, part in zip(names, (before, after), strict=True)
    )
    if before:
        groups.insert(0, first)
    return [*groups, last]


def _is_input(name: str) -> bool:
    word = name.partition(".")[0]
    return "embedding" in word or "inputs" in word


def _split_sections(parameters: Sequence[DrawnParameter]) -> tuple[Section, ...]:
    """Return a section per first word of the parameters within their layer, in the order of the layer."""
    sections: dict[str, list[DrawnParameter]] = {}
    for parameter in parameters:
        sections.setdefault(parameter.name.removeprefix(_LAYER).partition(".")[0], []).append(parameter)
    return tuple(Section(name, tuple(found)) for name, found in sections.items())


def _sort_sections(groups: Sequence[Group], calls: Sequence[tuple[int | None, str]]) -> list[Group]:
    """Return the groups with their sections in the order of the calls, if all sections are called by name: a norm comes
    before its attention, after it, or on both sides."""
    labels = iter(range(len(groups)))
    sorted_groups = []
    for group in groups:
        label = next(labels) if group.layers else None
        order = {name: number for number, (layer, name) in enumerate(calls) if layer == label}
        sections = group.sections
        if order.keys() >= {section.name for section in sections}:
            sections = tuple(sorted(sections, key=lambda section: order[section.name]))
        sorted_groups.append(dataclasses.replace(group, sections=sections))
    return sorted_groups


def _describe_parameter(path: ParameterPath, x: Any, mesh: Mesh) -> tuple[DrawnParameter, tuple[str, ...]]:
    """Return a parameter, and the mesh axes that shard its layers."""
    sharded = []
    if path.dims:
        for axes in mesh.spec(path.dims, x.shape, path.name):
            if isinstance(axes, str):  # JAX unpacks single axes
                axes = (axes,)
            sharded.append(axes or ())
    sharded += [()] * (len(x.shape) - len(sharded))
    gathered = dict(mesh.find_gather_dims(path.dims))
    shards = math.prod(mesh.shape[axis] for axes in sharded for axis in axes)
    first = int(path.name.startswith(_LAYER))
    entries = list(enumerate(sharded))[first:]
    used = [mesh.shape[axis] for index, axes in entries for axis in axes if axis not in gathered.get(index, ())]
    size = x.size * np.dtype(x.dtype).itemsize
    dims = tuple(dim.name for dim in path.dims) or ("",) * len(x.shape)
    parameter = DrawnParameter(
        name=path.name,
        dims=dims[first:],
        shape=tuple(x.shape[first:]),
        sharded_axes=tuple(sharded[first:]),
        gathered_axes=tuple(gathered.get(index, ()) for index in range(first, len(x.shape))),
        gradient_axes=tuple(axis for _, axes in mesh.gradients.find_gather_dims(path.dims) for axis in axes),
        size_in_use=math.prod(x.shape[first:]) // math.prod(used),
        dtype=str(x.dtype),
        bytes=size,
        bytes_per_device=size // shards,
    )
    layer_axes = sharded[0] if first else ()
    return parameter, layer_axes


def _add_layers(first: DrawnParameter, second: DrawnParameter) -> DrawnParameter:
    """Return a parameter with the layers of another segment."""
    return dataclasses.replace(
        first,
        bytes=first.bytes + second.bytes,
        bytes_per_device=first.bytes_per_device + second.bytes_per_device,
    )


def _describe_axis(axis: str, mesh: Mesh, groups: Sequence[Group], moves: Sequence[TracedMove]) -> AxisUse:
    dims = [dim for dim in ("batch", "seq") if axis in mesh.axes(dim)]
    if any(axis in group.layer_axes for group in groups):
        dims.append("layers")
    for group in groups:
        for x in group.parameters:
            dims += [dim for dim, axes in zip(x.dims, x.sharded_axes, strict=True) if axis in axes]
    along = [move for move in moves if axis in move.axes]
    count, size = (sum(numbers) for numbers in ([x.times for x in along], [x.times * x.bytes for x in along]))
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

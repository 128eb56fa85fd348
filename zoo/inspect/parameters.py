"""Summarize a model in memory, or in shapes: its parameters by part, their dims and sharding, memory, and KV cache."""

import dataclasses
import html
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jax.sharding import PartitionSpec

from zoo._terminal import align_columns, format_bytes
from zoo.layers.encoders.packed_images import PackedImages
from zoo.models import Decoder, EncoderDecoder, ImageText, Stack, count_active_parameters
from zoo.models.blocks import UnreadBlock
from zoo.models.hf.config import read_config
from zoo.models.parameter_paths import ParameterPath, list_parameters
from zoo.models.stack import is_stack, swap_stack
from zoo.parallel import Mesh
from zoo.parallel.mesh import is_array_or_shape
from zoo.parallel.module import is_parameter, is_trainable, replace_option
from zoo.parallel.rounds import merge_rounds

from .implementations import format_ranges
from .size import count_packed


@dataclasses.dataclass(frozen=True)
class ParameterSummary:
    """A parameter, in all layers where it has the same shape."""

    name: str
    """Name with * for layer and expert numbers: `layers.*.attention.query.weight`."""
    part: str
    """Part of the model: `attention`, `norms`, `head`."""
    layers: tuple[int, ...]
    """Numbers of the layers, or of the calls of a module that layers share."""
    dims: str
    shape: tuple[int, ...]
    dtypes: tuple[str, ...]
    """Dtypes as stored, or as initialized."""
    tensors: tuple[str, ...]
    """Names in the checkpoint."""
    spec: PartitionSpec | None
    bytes: int
    bytes_per_device: int
    trainable: bool = True

    @property
    def count(self) -> int:
        return math.prod(self.shape)


@dataclasses.dataclass(frozen=True)
class ModelSummary:
    """Summary of a model: text where it is printed, a table in a notebook."""

    tied: bool
    active: int
    """Active parameters per token: fewer than all in a mixture of experts."""
    num_parameters: int
    """Number of parameters, trainable or frozen; a quantized matrix counts those of the decoded matrix."""
    dtypes: dict[str, int]
    """Number of elements of each dtype, most first."""
    segments: list[list[int]]
    """Layers per pattern and repeats of the pattern, for each scanned segment."""
    cache: dict[str, Any] | None
    """Bytes of the KV cache or recurrent state per token and per row, and for the config's maximum length. None for a
    model without one."""
    mesh: Mesh | None
    rows: tuple[ParameterSummary, ...]
    images: dict[str, Any] | None = None
    """Class and layers of the tower of an `ImageText`, class of its projector, and the number of features of an image
    of `size` pixels, or of `patches`. None for another model."""

    @property
    def count(self) -> int:
        """Number of trainable parameters, as `zoo.count`."""
        return sum(row.count for row in self.rows if row.trainable)

    @property
    def bytes(self) -> int:
        """Memory of all parameters."""
        return sum(count * np.dtype(dtype).itemsize for dtype, count in self.dtypes.items())

    @property
    def bytes_per_device(self) -> int:
        return sum(row.bytes_per_device for row in self.rows)

    def __str__(self) -> str:
        return "\n".join([*align_columns(self._list_facts()), "", *self.format_table()])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        facts = "".join(_format_html_row(cells) for cells in self._list_facts())
        head, *lines = self._list_cells(names=False)
        body = "".join(_format_html_row(cells) for cells in lines)
        return f"<table>{facts}</table><table>{_format_html_row(head, 'th')}{body}</table>"

    def _list_facts(self) -> list[tuple[str, str]]:
        memory = ("in memory", f"{format_bytes(self.bytes)} of {', '.join(self.dtypes)}")
        return [*self.describe_parameters(), memory, *self.describe_layers(), *self.describe_mesh()]

    def describe_parameters(self) -> list[tuple[str, str]]:
        """Return what is counted: all parameters, and those that are trained or active if they are fewer."""
        if self.count == self.num_parameters:
            trained = ""
        else:
            trained = f", {self.count:,} of them trainable"
        tied = ", head tied to the embedding" if self.tied else ""
        rows = [("parameters", f"{self.num_parameters:,}{trained}{tied}")]
        if self.active < self.count:
            rows.append(("active", f"{self.active:,} per token, in the experts it is routed to and all shared layers"))
        return rows

    def describe_layers(self) -> list[tuple[str, str]]:
        """Return the scanned segments of layers, and the size of their caches."""
        rows = []
        if self.segments:
            layers = sum(period * repeats for period, repeats in self.segments)
            patterns = " + ".join(f"{period} x {repeats}" for period, repeats in self.segments)
            rows.append(("layers", f"{layers}, scanned as {patterns} (layers per pattern x repeats)"))
        if self.images:
            images = self.images
            features = f"{images['features']:,} features" if images["features"] != 1 else "a feature"
            unit = "an image of {} x {} pixels" if "size" in images else "{} x {} patches"
            of = unit.format(*images.get("size", images.get("patches", ())))
            towered = f"{images['tower']} of {images['layers']} layers, {images['projector']}"
            rows.append(("images", f"{towered}: {features} of {of}"))
        if self.cache:
            cache = self.cache
            text = f"{format_bytes(cache['bytes_per_token'])} per token and row, in {cache['dtype']}"
            if not cache["bytes_per_token"]:
                text = f"{format_bytes(cache['bytes_per_row'])} per row, of any length, in {cache['dtype']}"
            if cache["length"]:
                text += f"; {format_bytes(cache['bytes'])} for {cache['length']:,} tokens"
            rows.append(("cache", text))
        return rows

    def describe_mesh(self) -> list[tuple[str, str]]:
        """Return the mesh and the parameters on each of its devices."""
        if self.mesh is None:
            return []
        count = self.mesh.devices.size
        devices = f" on each of {count} devices" if count > 1 else ""
        return [("mesh", f"{self.mesh}: {format_bytes(self.bytes_per_device)} of parameters{devices}")]

    def format_table(self, *, names: bool = False) -> list[str]:
        """Return one line per parameter, grouped by part below a line with the part's total; with `names`, also those
        of the checkpoint's tensors."""
        return align_columns(self._list_cells(names), right=(5, 7))

    def _list_cells(self, names: bool) -> list[list[str]]:
        lines = [["parameter", "layers", "dims", "shape", "dtype", "share"]]
        if self.mesh is not None:
            lines[0] += ["sharding", "per device"]
        for part in dict.fromkeys(row.part for row in self.rows):
            rows = [row for row in self.rows if row.part == part]
            count = sum(row.count for row in rows)
            lines.append([f"{part}: {count:,}", "", "", "", "", _format_percentage(count, self.num_parameters)])
            for row in rows:
                lines.append(_format_cells(row, self.num_parameters))
                if names:
                    lines += [[f"    {name}"] for name in row.tensors]
        return lines


def summary(model: Any, mesh: Mesh | None = None) -> ModelSummary:
    """Summarize a model, or a model of `jax.ShapeDtypeStruct`s: what `zoo info` shows of a checkpoint.

    With a `mesh`, whose devices need not exist, also the sharding of each parameter and its bytes on a device.
    **Raises** `ValueError` for a mesh that does not divide the model.
    """
    shapes = list_shapes(model)
    origin = getattr(model, "origin", None)
    if origin is None:
        config = {}
    else:
        config = read_config(origin.family, json.loads(origin.config))
    return summarize_model(shapes, None, mesh, cached_model=shapes, max_length=find_max_length(config))


def find_max_length(config: Mapping[str, Any]) -> int | None:
    """Return the maximum length that a config says, of a model of images and texts that of its texts."""
    return (config.get("text_config") or config).get("max_position_embeddings")


def list_shapes(model: Any) -> Any:
    """Return the arrays of a model in shapes, with layers in one round."""
    arrays = eqx.filter(model, is_array_or_shape)
    return merge_rounds(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arrays))


def summarize_model(
    model: Any,
    dtypes: Sequence[tuple[str, ...]] | None,
    mesh: Mesh | None,
    *,
    cached_model: Any,
    max_length: int | None,
    name_tensor: Callable[[ParameterPath], str] | None = None,
) -> ModelSummary:
    """Summarize a model in shapes.

    - `dtypes`: of each array, as stored or as initialized; None for the dtypes of the shapes.
    - `cached_model`: the model that decodes, or that has it for a decoder.
    - `name_tensor`: returns the name of a parameter's tensor in a checkpoint.
    """
    parameters = list_parameters(model)
    return ModelSummary(
        tied=_is_tied(find_decoder(model)),
        active=count_active_parameters(model),
        num_parameters=sum(x.size for path, x in parameters if is_parameter(path.leaf, x))
        + count_packed(model)
        + _count_unread(model),
        dtypes=count_by_dtype(jax.tree.leaves(model)),
        segments=[
            [len(segment.blocks), segment.local_repeats] for stack in _find_stacks(model) for segment in stack.segments
        ],
        cache=_measure_cache(find_decoder(cached_model), max_length),
        images=_describe_images(model) if isinstance(model, ImageText) else None,
        mesh=mesh,
        rows=tuple(summarize_parameters(model, mesh, dtypes, name_tensor)),
    )


def find_decoder(model: Any) -> Any:
    """Return the decoder of a model of two parts, any other model as it is."""
    return model.decoder if isinstance(model, EncoderDecoder | ImageText) else model


def _count_unread(model: Any) -> int:
    """Count what nothing reads: buffers here, and parameters in a checkpoint."""
    is_unread = lambda x: isinstance(x, UnreadBlock)
    blocks = [x for x in jax.tree.leaves(model, is_leaf=is_unread) if is_unread(x)]
    return sum(x.size for x in jax.tree.leaves(blocks))


def _describe_images(model: ImageText) -> dict[str, Any]:
    """Return the facts of `ModelSummary.images`."""
    embedding = model.tower.embedding
    projector: Any = model.projector
    layers = sum(len(segment.blocks) * segment.local_repeats for segment in model.tower.stack.segments)
    names = {"tower": type(model.tower).__name__, "layers": layers, "projector": type(projector).__name__}
    if embedding.reads is PackedImages or embedding.positions is None:
        return {**names, "features": 1, "patches": [projector.merge] * 2}
    grid = embedding.positions.grid
    size = [count * side for count, side in zip(grid, embedding.patches.patch_size, strict=True)]
    return {**names, "features": projector.count_features(grid), "size": size}


def _find_stacks(model: Any) -> list[Stack]:
    return [x for x in jax.tree.leaves(model, is_leaf=is_stack) if isinstance(x, Stack)]


def summarize_parameters(
    model: Any,
    mesh: Mesh | None,
    dtypes: Sequence[tuple[str, ...]] | None = None,
    name_tensor: Callable[[ParameterPath], str] | None = None,
) -> list[ParameterSummary]:
    """Return a row per parameter name and shape: arrays of the same parameter in different layers share a row, if all
    are trained, or none.

    Arguments are as for `summarize_model`. Outside of a `Module`, arrays have the names of the tree, and no mesh shards
    them.
    """
    parameters = list_parameters(model)
    if dtypes is None:
        dtypes = [(str(x.dtype),) for _, x in parameters]
    groups: dict[tuple, list] = {}
    for (path, x), array_dtypes in zip(parameters, dtypes, strict=True):
        name = path.name or path.leaf.name
        spec = None if mesh is None else PartitionSpec()
        if mesh is not None and path.dims:
            spec = mesh.spec(path.dims, x.shape, path.name)
        num_bytes = x.size * np.dtype(array_dtypes[0]).itemsize
        group = name, x.shape[_is_stacked(path) :], is_trainable(path.leaf, x)
        groups.setdefault(group, []).append((path, array_dtypes, spec, num_bytes))
    rows = []
    for (name, shape, trainable), arrays in groups.items():
        layers = [number for path, *_ in arrays if _is_stacked(path) for number in path.ranges[0]]
        if layers:
            shape = (len(layers), *shape)
        path, _, spec, _ = max(arrays, key=lambda array: array[-1])  # its segment has the dim `layers`
        rows.append(
            ParameterSummary(
                name=name,
                part=_get_part_name(name),
                layers=tuple(sorted(layers)),
                dims=" ".join(dim.name for dim in path.dims),
                shape=shape,
                dtypes=tuple(dict.fromkeys(dtype for _, array_dtypes, *_ in arrays for dtype in array_dtypes)),
                tensors=() if name_tensor is None else (name_tensor(arrays[0][0]),),
                spec=spec,
                bytes=sum(num_bytes for *_, num_bytes in arrays),
                bytes_per_device=sum(num_bytes // _count_shards(spec, mesh) for _, _, spec, num_bytes in arrays),
                trainable=trainable,
            )
        )
    parts = list(dict.fromkeys(row.part for row in rows))
    places = {part: number for number, part in enumerate(parts)}
    places.update(dict.fromkeys((part for part in parts if "embedding" in part), -1))
    places.update(norms=len(parts), head=len(parts) + 1)
    return sorted(rows, key=lambda row: places[row.part])


def _is_stacked(path: ParameterPath) -> bool:
    """Return True for an array over layers, or over the calls of a module that layers share."""
    return path.leaf.num_stacked > 0 and path.dims[0].name in ("layers", "ends")


def list_axes(spec: PartitionSpec | None) -> list[tuple[str, ...]]:
    """Return the mesh axes of each dim. JAX unpacks single axes."""
    return [(axes,) if isinstance(axes, str) else tuple(axes or ()) for axes in spec or ()]


def _count_shards(spec: PartitionSpec | None, mesh: Mesh | None) -> int:
    """Return the number of shards of an array."""
    if mesh is None:
        return 1
    return math.prod(mesh.shape[axis] for axes in list_axes(spec) for axis in axes)


def _get_part_name(name: str) -> str:
    """Return the part of the model that a parameter belongs to: the first word of its name within the layer."""
    word = name.removeprefix("layers.*.").partition(".")[0]
    if word == "norm" or word.endswith("_norm"):
        return "norms"
    return word


def _is_tied(model: Any) -> bool:
    """Return True for a decoder whose head is its embedding."""
    return isinstance(model, Decoder) and model.head is None


def count_by_dtype(tensors: Iterable[Any]) -> dict[str, int]:
    """Count the elements of each dtype, most first."""
    counts: dict[str, int] = {}
    for tensor in tensors:
        counts[str(tensor.dtype)] = counts.get(str(tensor.dtype), 0) + math.prod(tensor.shape)
    return dict(sorted(counts.items(), key=lambda item: -item[1]))


def _measure_cache(model: Any, max_length: int | None) -> dict[str, Any] | None:
    """Return the bytes of the KV cache or recurrent state: per token, per row, and of `max_length` tokens."""
    if not isinstance(model, Decoder) or not isinstance(model.stack, Stack):
        return None
    repeats = [segment.local_repeats for segment in model.stack.segments for _ in segment.blocks]
    # all repeats of a pattern have states of the same shape: one suffices
    shorten = lambda x: jax.ShapeDtypeStruct((1, *x.shape[1:]), x.dtype)

    def take_one_repeat(stack: Stack) -> Stack:
        segments = [type(x)(jax.tree.map(shorten, x.blocks), 1, x.layers) for x in stack.segments]
        return replace_option(stack, "segments", tuple(segments))

    first = swap_stack(model, take_one_repeat)

    def measure(length: int) -> tuple[int, str]:
        states = eqx.filter_eval_shape(first.init_state, 1, length)
        sizes = [sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state)) for state in states]
        return sum(map(math.prod, zip(sizes, repeats, strict=True))), str(jax.tree.leaves(states)[0].dtype)

    try:
        one_token, dtype = measure(1)
        two_tokens, _ = measure(2)
    except NotImplementedError:
        return None
    size = None
    if max_length is not None:
        size, _ = measure(max_length)
    return {
        "bytes_per_token": two_tokens - one_token,
        "bytes_per_row": 2 * one_token - two_tokens,
        "dtype": dtype,
        "length": max_length,
        "bytes": size,
    }


def _format_cells(row: ParameterSummary, total: int) -> list[str]:
    layers = format_ranges(row.layers) if row.layers else ""
    shape = " x ".join(map(str, row.shape))
    here = [
        f"  {row.name}",
        layers,
        row.dims,
        shape,
        ", ".join(row.dtypes),
        _format_percentage(row.count, total),
    ]
    if row.spec is None:
        return here
    return [*here, str(row.spec), format_bytes(row.bytes_per_device)]


def _format_percentage(count: int, total: int) -> str:
    return f"{100 * count / total:.2f}%"


def _format_html_row(cells: Sequence[str], tag: str = "td") -> str:
    return f"<tr>{''.join(f'<{tag}>{html.escape(cell)}</{tag}>' for cell in cells)}</tr>"

"""Estimate a training step on a mesh from the shapes of the parameters, to choose the meshes that are traced.

Collectives are timed as in the plan (`zoo.inspect.links`). Counted are the work and the traffic that differ between
meshes: products of weights, their bytes, gathers and sums of parameters, sums of activations over `tensor`, tokens to
their experts, keys around `context`, bubbles of the pipeline. Scores of attention are not.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from zoo.inspect.collectives import Collective
from zoo.inspect.links import time_transfer
from zoo.layers.moe.router import AbstractRouter
from zoo.models.parameter_paths import ParameterPath, list_parameter_paths
from zoo.parallel import Mesh
from zoo.parallel.chips import CHIPS
from zoo.parallel.mesh import is_array_or_shape
from zoo.parallel.topology import Topology

from .options import TrainingOptions

_PASSES = 4
"""Products of a weight: forward, again in the backward pass, and the gradients of the input and of the weight."""
_MEAN_BOX = 1.5
"""Slots of an expert's box over its tokens, where tokens are exchanged."""


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Seconds of a step if products, memory and collectives take turns, and bytes of a device."""

    seconds: float
    at_rest: float
    """Parameters, gradients and moments."""
    peak: float
    collectives: tuple[Collective, ...]
    """Collectives of one device, as far as they are estimated: one for each parameter and cause."""


def estimate_step(model: Any, mesh: Mesh, topology: Topology, options: TrainingOptions) -> Estimate:
    """Estimate a training step of `model`, in shapes, on a mesh of stand-in devices.

    **Raises** `ValueError` if the mesh does not divide a parameter.
    """
    weights = _list_weights(model, mesh)
    top = _find_top(model)
    chip = CHIPS[topology.kind]
    itemsize = jnp.dtype(options.dtype).itemsize
    tokens = _count_tokens(mesh, options)
    matrices = [weight for weight in weights if weight.is_matrix]

    products = sum(weight.count_flops(tokens, top) for weight in matrices) * _PASSES / chip.measured_rate(options.dtype)
    stages = mesh.shape["pipe"]
    if stages > 1:  # a stage keeps only inputs, and computes forward once more
        products *= (1 + 1 / _PASSES) * (1 + (stages - 1) / options.microbatches)
    read = sum(options.microbatches * weight.computed + weight.count_activations(tokens, top) for weight in matrices)
    rewritten = 12 * sum(weight.at_rest for weight in weights)
    memory = (_PASSES * itemsize * read + 2 * rewritten) / chip.bandwidth
    moved = tuple(row for row in _iterate_collectives(weights, mesh, options, tokens, top) if row.axes)
    traffic = sum(time_transfer(row, mesh.shape, topology, chip).seconds for row in moved)
    at_rest = _count_at_rest(weights, mesh)
    activations = _estimate_activations(weights, mesh, options, tokens, top)
    return Estimate(products + memory + traffic, at_rest, at_rest + activations, moved)


def _count_tokens(mesh: Mesh, options: TrainingOptions) -> float:
    """Return the tokens of a step that one device computes."""
    return options.tokens / mesh.count_shards("batch") / mesh.count_shards("seq")


class _Weight:
    """Sizes of a parameter on one device: at rest, and gathered for compute."""

    def __init__(self, path: ParameterPath, shape: tuple[int, ...], mesh: Mesh):
        dims = path.dims
        spec = mesh.spec(dims, shape[: len(dims)], path.name)
        axes = [_list_axes(entry) for entry in spec]
        axes += [()] * (len(shape) - len(axes))
        gathered = dict(mesh.find_gather_dims(dims))
        self.gather_axes = tuple(axis for index in gathered for axis in gathered[index])
        kept = [[axis for axis in row if axis not in gathered.get(index, ())] for index, row in enumerate(axes)]
        self.sizes = [
            size // math.prod(mesh.shape[axis] for axis in row) for size, row in zip(shape, kept, strict=True)
        ]
        self.computed = math.prod(self.sizes)
        self.at_rest = self.computed // math.prod(mesh.shape[axis] for axis in self.gather_axes)
        self.axes = {axis for row in kept for axis in row}
        self.names = [dim.name for dim in dims]
        self.is_in_layers = "layers" in self.names
        self.has_experts = "experts" in self.names
        self.is_matrix = len(dims) - self.is_in_layers - self.has_experts == 2 and self.names[-1] != "conv"
        self.sums_over_tensor = self.is_matrix and "tensor" in kept[-1]

    @property
    def layers(self) -> int:
        return self.sizes[0] if self.is_in_layers else 1

    def count_rows(self, tokens: float, top: int) -> float:
        """Return the rows that the matrices of one layer multiply on this device."""
        if not self.has_experts:
            return tokens
        rows = tokens * top
        return _MEAN_BOX * rows if "expert" in self.axes else rows

    def count_flops(self, tokens: float, top: int) -> float:
        out, in_ = self.sizes[-2:]
        return 2 * self.layers * self.count_rows(tokens, top) * out * in_

    def count_activations(self, tokens: float, top: int) -> float:
        """Return the elements that one pass reads and writes besides the weight."""
        return self.layers * self.count_rows(tokens, top) * sum(self.sizes[-2:])


def _list_axes(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """Return the mesh axes of an entry of a `PartitionSpec`."""
    if isinstance(entry, tuple):
        return entry
    return () if entry is None else (entry,)


def _list_weights(model: Any, mesh: Mesh) -> list[_Weight]:
    arrays = jax.tree.leaves(eqx.filter(model, is_array_or_shape))
    return [
        _Weight(path, x.shape, mesh)
        for path, x in zip(list_parameter_paths(model), arrays, strict=True)
        if jnp.issubdtype(x.dtype, jnp.floating)
    ]


def _find_top(model: Any) -> int:
    """Return the experts that a token uses in a layer, at most; 1 for a dense model."""
    nodes = jax.tree.leaves(model, is_leaf=lambda node: isinstance(node, AbstractRouter))
    return max((node.top for node in nodes if isinstance(node, AbstractRouter)), default=1)


def _iterate_collectives(
    weights: list[_Weight], mesh: Mesh, options: TrainingOptions, tokens: float, top: int
) -> Iterator[Collective]:
    """Yield the collectives of one device: of parameters, then of activations."""
    itemsize = jnp.dtype(options.dtype).itemsize
    scattered = mesh.gradients.axes_at_rest
    token_axes = [axis for axis in ("data", "fsdp", "expert", "context") if mesh.shape[axis] > 1]
    for weight in weights:
        if weight.gather_axes:
            size = 2 * options.microbatches * itemsize * weight.computed
            yield _collect("all-gather", weight.gather_axes, size)
        summed = tuple(axis for axis in token_axes if axis not in weight.axes)
        along = tuple(axis for axis in summed if axis in scattered)
        times = options.microbatches if along else 1
        shards = math.prod(mesh.shape[axis] for axis in along)
        yield _collect("reduce-scatter", along, 4 * times * weight.computed)
        rest = tuple(axis for axis in summed if axis not in along)
        yield _collect("all-reduce", rest, 4 * weight.computed / shards)
        if weight.sums_over_tensor:
            out = weight.sizes[-2]
            size = 3 * itemsize * weight.layers * weight.count_rows(tokens, top) * out
            yield _collect("all-reduce", ("tensor",), size)
            if weight.has_experts:
                yield _collect("all-to-all", mesh.axes("experts"), 2 * size)
        elif weight.has_experts and weight.is_matrix and weight.names[-2] == "embed":
            size = 6 * itemsize * weight.layers * tokens * top * weight.sizes[-2]
            yield _collect("all-to-all", mesh.axes("experts"), size)
        if "kv_heads" in weight.names and weight.is_matrix:
            hops = mesh.count_shards("seq") - 1
            size = 4 * hops * itemsize * weight.layers * tokens * weight.sizes[-2]
            yield _collect("collective-permute", mesh.axes("seq"), size)


def _collect(kind: str, axes: tuple[str, ...], size: float) -> Collective:
    return Collective(kind, axes, "", 1, 1, round(size))


def _count_at_rest(weights: list[_Weight], mesh: Mesh) -> float:
    """Return the bytes of parameters, gradients and two moments in float32."""
    size = sum(weight.at_rest for weight in weights)
    shards = [
        math.prod(mesh.shape[axis] for axis in part.axes_at_rest) for part in (mesh, mesh.gradients, mesh.optimizer)
    ]
    return 4 * size * (1 + shards[0] / shards[1] + 2 * shards[0] / shards[2])


def _estimate_activations(
    weights: list[_Weight], mesh: Mesh, options: TrainingOptions, tokens: float, top: int
) -> float:
    """Return the bytes of the inputs of layers that the backward pass needs, and of the interior of a layer, gathered
    parameters included."""
    itemsize = jnp.dtype(options.dtype).itemsize
    in_layers = [weight for weight in weights if weight.is_in_layers and weight.is_matrix]
    rows = tokens / options.microbatches
    interior = sum(weight.count_activations(rows, top) / weight.layers for weight in in_layers)
    gathered = sum(weight.computed / weight.layers for weight in in_layers)
    layers = max((weight.layers for weight in in_layers), default=1)
    if options.remat == "none":
        saved = layers * interior
    else:
        width = max((weight.sizes[-1] for weight in in_layers if weight.names[-1] == "embed"), default=0)
        over_tensor = mesh.count_shards("tokens") / mesh.count_shards("seq")
        in_flight = min(options.microbatches, mesh.shape["pipe"])
        saved = layers * in_flight * rows * width / over_tensor
    return itemsize * (saved + 2 * interior + 2 * gathered)

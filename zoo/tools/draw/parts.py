"""Description of a drawing: parameters with their shards, and moves between devices, as plain data."""

import dataclasses
import math
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class DrawnParameter:
    """A parameter in one kind of layer, or outside of the layers."""

    name: str
    """`layers.*.attention.query.weight`, as `zoo.models.list_parameter_paths` has it."""
    dims: tuple[str, ...]
    """Names of the dims, except the dim of the layers."""
    shape: tuple[int, ...]
    sharded_axes: tuple[tuple[str, ...], ...]
    """Mesh axes that shard each dim at rest, outermost first."""
    gathered_axes: tuple[tuple[str, ...], ...]
    """The axes among these over which it is all-gathered before use."""
    gradient_axes: tuple[str, ...]
    """Mesh axes over which its gradient is reduce-scattered in the backward pass."""
    size_in_use: int
    """Elements of one layer on a device, as the layer computes with them."""
    dtype: str
    bytes: int
    """Bytes of all layers, over all devices but each shard once."""
    bytes_per_device: int
    trainable: bool = True
    """False for buffers, and for parameters that adapters freeze."""

    def count_shards(self, axis_sizes: Mapping[str, int]) -> int:
        """Return the number of shards of one layer's array."""
        return math.prod(axis_sizes[axis] for axes in self.sharded_axes for axis in axes)


@dataclasses.dataclass(frozen=True)
class Move:
    """Collectives of one kind, at one place of a training step."""

    collective: str
    """all-reduce, all-gather, reduce-scatter, all-to-all or permute."""
    axes: tuple[str, ...]
    subject: str
    """The matrices whose results move, or the parameters: `query, key, value`; `9 parameters`."""
    phase: str
    """"forward", "backward", or "update" for moves after the backward pass."""
    count: int
    """Executions on a device in a step."""
    bytes: int
    """Bytes per device in a step: of each execution the larger of operand and result."""


@dataclasses.dataclass(frozen=True)
class Section:
    """A part of a layer, such as its attention, or of a model."""

    name: str
    parameters: tuple[DrawnParameter, ...]
    moves: tuple[Move, ...] = ()
    """Moves of activations and of their gradients."""


@dataclasses.dataclass(frozen=True)
class Group:
    """All layers of one kind, or a part outside of the layers."""

    name: str
    layers: tuple[int, ...]
    """Numbers of the layers; () outside of them."""
    layer_axes: tuple[str, ...]
    """Mesh axes that deal the layers out, as stages of a pipeline."""
    sections: tuple[Section, ...]
    moves: tuple[Move, ...] = ()
    """Moves of parameters before their use, and of their gradients; for stages also moves from one to the next."""

    @property
    def parameters(self) -> tuple[DrawnParameter, ...]:
        return tuple(parameter for section in self.sections for parameter in section.parameters)

    @property
    def bytes_per_device(self) -> int:
        return sum(parameter.bytes_per_device for parameter in self.parameters)


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
    """Moves once a step, after the backward pass, and between the layers and the loss."""
    batch: str
    """The batch for which the moves are counted, in words."""

    @property
    def num_devices(self) -> int:
        return math.prod(self.axis_sizes.values())

    @property
    def parameters(self) -> tuple[DrawnParameter, ...]:
        return tuple(parameter for group in self.groups for parameter in group.parameters)

    @property
    def bytes(self) -> int:
        return sum(parameter.bytes for parameter in self.parameters)

    @property
    def bytes_per_device(self) -> int:
        return sum(parameter.bytes_per_device for parameter in self.parameters)

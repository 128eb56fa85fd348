"""Collectives of a compiled program (all-reduce, all-gather, reduce-scatter, ...), summed by mesh axes."""

import dataclasses
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Sequence

import jax
import numpy as np

from .executions import Execution
from .hlo import Computation, HloModule, Instruction, count_shape_bytes

COLLECTIVE_OPCODES = (
    *("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all"),
    *("collective-permute", "collective-broadcast"),
)
DeviceGroups = frozenset[frozenset[int]]
"""Replica groups: device numbers in the program that take part in one collective together."""

_EXPLICIT_GROUPS = re.compile(r"replica_groups=\{((?:\{[\d,]*\},?)*)\}")
_IOTA_GROUPS = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH_AXES_GROUPS = re.compile(r"replica_groups=@?mesh\[([^\]]*)\](?:, device_ids=\(([^{]*)\))? \{([^}]*)\}")
_SYNCHRONOUS = re.compile(r'"is_sync":\s*true')
_CHANNEL = re.compile(r"\bchannel_id=\d+")
_SOURCE_TARGET_PAIRS = re.compile(r"source_target_pairs=\{((?:\{[\d,]*\},?)*)\}")


@dataclasses.dataclass(frozen=True)
class Collective:
    """All collectives of one kind along one set of mesh axes."""

    kind: str
    """HLO opcode: all-reduce, all-gather, reduce-scatter, collective-permute, all-to-all."""
    axes: tuple[str, ...] | None
    """Mesh axes of the replica groups; () for groups of one device, None if no set of axes has these groups."""
    groups: str
    """Replica groups in HLO notation if `axes` is None; empty otherwise."""
    count: int
    """Number of executions, loop iterations included."""
    arrays: int
    """Number of arrays transferred: XLA combines several arrays into one collective."""
    bytes: int
    """Bytes per device: the larger of input and output."""
    asynchronous: int = 0
    """Number of executions that are split into a start and a done, between which other instructions may run."""
    link_seconds: float | None = None
    """Seconds on the chip's links, at their nominal rate. None, like the next two, if chip or schedule is unknown."""
    product_seconds: float | None = None
    """Seconds of the matrix products between start and done, at the chip's peak rate
    (`zoo.inspect.exposed_communication`)."""
    exposed_seconds: float | None = None
    """Seconds of the transfers that these products do not cover."""


def sum_collectives(
    module: HloModule, executions: Iterable[Execution], mesh: jax.sharding.Mesh | None, devices: int
) -> tuple[Collective, ...]:
    """Sum the collectives among `executions` by kind and axes; the result is sorted by bytes, largest first."""
    sums: dict[tuple, list[int]] = {}
    for execution in find_collectives(module, executions):
        one = read_collective(execution.instruction, execution.computation, mesh, devices)
        total = sums.setdefault((one.kind, one.axes, one.groups), [0, 0, 0, 0])
        for index, increment in enumerate((one.count, one.arrays, one.bytes, execution.asynchronous)):
            total[index] += execution.times * increment
    rows = [Collective(*key, *total) for key, total in sums.items()]
    return tuple(sorted(rows, key=lambda row: (-row.bytes, row.kind, str(row.axes))))


def read_collective(
    instruction: Instruction, computation: Computation, mesh: jax.sharding.Mesh | None, devices: int
) -> Collective:
    """Return one execution of a collective, which may be its start."""
    kind = instruction.opcode.removesuffix("-start")
    groups = parse_groups(instruction, devices)
    if groups is None:
        axes = None
    else:
        axes = find_mesh_axes(groups, mesh, permute=kind == "collective-permute")
    sizes = [count_shape_bytes(computation[name].shape) for name in instruction.operands if name in computation]
    if kind == "all-gather":
        group_size = max(map(len, groups or ()), default=1)
    else:
        group_size = 1
    moved = sum(sizes) * group_size
    if kind == "all-reduce":  # a TPU's may read bfloat16 and sum in float32
        moved = max(moved, count_shape_bytes(instruction.shape))
    return Collective(kind, axes, _format_groups(instruction) if axes is None else "", 1, len(sizes), moved)


def find_collectives(module: HloModule, executions: Iterable[Execution]) -> Iterator[Execution]:
    """Yield the collectives among `executions`, each marked as asynchronous or not.

    The compiler for GPUs splits each into a `-start` and a `-done`, and marks the ones that it waits for as
    synchronous. The compiler for TPUs cuts an asynchronous collective into pieces (`list_pieces`).
    """
    seen: set[tuple] = set()
    for execution in executions:
        instruction = execution.instruction
        if is_collective(instruction):
            yield dataclasses.replace(execution, asynchronous=execution.asynchronous or is_started(instruction))
        for key, inner, fused in list_pieces(module, instruction):
            key = id(execution.computation), *key
            if key not in seen:
                seen.add(key)
                yield Execution(inner, fused, execution.times, instruction.name.startswith("async"))


def is_collective(instruction: Instruction) -> bool:
    """Return True for a collective and for its start."""
    return instruction.opcode.removesuffix("-start") in COLLECTIVE_OPCODES


def is_started(instruction: Instruction) -> bool:
    """Return True for a start after which other instructions run; after a start marked as synchronous none do."""
    return instruction.opcode.endswith("-start") and not _SYNCHRONOUS.search(instruction.attributes)


def list_pieces(module: HloModule, instruction: Instruction) -> Iterator[tuple[tuple, Instruction, Computation]]:
    """Yield the collectives in a fusion, each with opcode and channel.

    The compiler for TPUs cuts an asynchronous collective into pieces of the same channel, fused with the instructions
    that run at the same time: `async-...` fusions in one computation.
    """
    if instruction.opcode == "fusion":
        for name in instruction.called_computations("calls"):
            fused = module.computations.get(name, {})
            for inner in fused.values():
                if inner.opcode in COLLECTIVE_OPCODES:
                    yield (inner.opcode, *_CHANNEL.findall(inner.attributes)[:1]), inner, fused


def parse_groups(instruction: Instruction, devices: int) -> DeviceGroups | None:
    """Parse the replica groups of a collective; None for an unknown notation. XLA has four:

    - `replica_groups={{0,1},{2,3}}`: explicit; empty braces are all devices in one group.
    - `replica_groups=[2,4]<=[8]`, or `[4,2]<=[2,4]T(1,0)`: iota, reshape, transpose, reshape; each row is a group.
    - `replica_groups=mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'a'}`: a mesh and the axes of a group; `'b':(2)2` is
      the sub-axis of size 2 that follows a sub-axis of size 2.
    - `source_target_pairs={{0,1},{1,0}}`, of a permutation: each pair is a group.
    """
    text = instruction.attributes
    if found := _SOURCE_TARGET_PAIRS.search(text) or _EXPLICIT_GROUPS.search(text):
        sets = frozenset(frozenset(_parse_integers(inner)) for inner in re.findall(r"\{([\d,]*)\}", found[1]))
        return sets or frozenset([frozenset(range(devices))])
    if found := _IOTA_GROUPS.search(text):
        return _rows_to_groups(
            _iota(_parse_integers(found[2]), _parse_integers(found[3] or "")).reshape(_parse_integers(found[1]))
        )
    if found := _MESH_AXES_GROUPS.search(text):
        sizes = {name.strip("'\" "): int(size) for name, size in (part.split("=") for part in found[1].split(","))}
        ids = _parse_device_ids(found[2] or "", math.prod(sizes.values()))
        return _rows_to_groups(
            _group_device_ids(ids, sizes, [part.strip() for part in found[3].split(",") if part.strip()])
        )
    return None


def _parse_integers(text: str) -> list[int]:
    return list(map(int, re.findall(r"\d+", text)))


def _iota(shape: Sequence[int], order: Sequence[int]) -> np.ndarray:
    ids = np.arange(math.prod(shape)).reshape(shape)
    if order:
        ids = ids.transpose(order)
    return ids


def _parse_device_ids(text: str, devices: int) -> np.ndarray:
    """Parse `[4,2]T(1,0)` or a list of device numbers; an empty text means in order."""
    shape, _, order = text.partition("T")
    if order:
        return _iota(_parse_integers(shape), _parse_integers(order))
    if text and not text.startswith("["):
        return np.array(_parse_integers(text))
    return np.arange(devices)


def _group_device_ids(ids: np.ndarray, sizes: dict[str, int], axes: Sequence[str]) -> np.ndarray:
    """Return one row per group: reshape to sub-axes, and move the sub-axes of a group last."""
    sub_axes = [_parse_axis(axis, sizes) for axis in axes]
    shape = []
    last = []
    for name, size in sizes.items():
        ranges = [(start, stop) for axis, start, stop in sub_axes if axis == name]
        for start, stop in itertools.pairwise(sorted({1, size, *itertools.chain(*ranges)})):
            if any(first <= start < end for first, end in ranges):
                last.append(len(shape))
            shape.append(stop // start)
    others = [index for index in range(len(shape)) if index not in last]
    return ids.reshape(shape).transpose(others + last).reshape(-1, math.prod(shape[index] for index in last))


def _parse_axis(axis: str, sizes: dict[str, int]) -> tuple[str, int, int]:
    """Parse a sub-axis: `'b':(2)3` is the factor 3 of axis b after a factor 2, outermost first; `'b'` is all of b."""
    name, _, part = axis.partition(":")
    name = name.strip("'\"")
    if not part:
        return name, 1, sizes[name]
    preceding, size = _parse_integers(part)
    return name, preceding, preceding * size


def _rows_to_groups(ids: np.ndarray) -> DeviceGroups:
    return frozenset(frozenset(row.tolist()) for row in ids)


def find_mesh_axes(
    groups: DeviceGroups, mesh: jax.sharding.Mesh | None, *, permute: bool = False
) -> tuple[str, ...] | None:
    """Return the mesh axes that have these groups; for a permutation, the axes along which its pairs differ. None if no
    set of axes fits: a group can be a part of an axis, or cut across several."""
    if all(len(group) == 1 for group in groups):
        return ()
    if mesh is None or max(itertools.chain(*groups)) >= mesh.size:
        return None
    sizes = {name: size for name, size in mesh.shape.items() if size > 1}
    ids = np.arange(mesh.size).reshape(tuple(sizes.values()))
    if permute:
        pairs = [np.array(np.unravel_index(sorted(group), ids.shape)) for group in groups]
        return tuple(name for index, name in enumerate(sizes) if any(len({*pair[index]}) > 1 for pair in pairs))
    for count in range(1, len(sizes) + 1):
        for axes in itertools.combinations(range(len(sizes)), count):
            others = [axis for axis in range(len(sizes)) if axis not in axes]
            group_size = math.prod(ids.shape[axis] for axis in axes)
            if _rows_to_groups(ids.transpose(*others, *axes).reshape(-1, group_size)) == groups:
                return tuple(list(sizes)[axis] for axis in axes)
    return None


def _format_groups(instruction: Instruction) -> str:
    for pattern in (_EXPLICIT_GROUPS, _IOTA_GROUPS, _MESH_AXES_GROUPS, _SOURCE_TARGET_PAIRS):
        if found := pattern.search(instruction.attributes):
            return found[0].partition("=")[2]
    return "unknown"

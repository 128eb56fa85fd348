"""What devices send one another in a compiled program, by the mesh axes along which they do."""

import dataclasses
import itertools
import math
import re
from collections.abc import Iterable, Sequence

import jax
import numpy as np

from .hlo import Execution, Instruction, count_shape_bytes

_COLLECTIVE_OPCODES = (
    *("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all"),
    *("collective-permute", "collective-broadcast"),
)
_DeviceGroups = frozenset[frozenset[int]]
"""Which devices, by their places in the program's list of them, take part together."""

_EXPLICIT_GROUPS = re.compile(r"replica_groups=\{((?:\{[\d,]*\},?)*)\}")
_IOTA_GROUPS = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH_AXES_GROUPS = re.compile(r"replica_groups=@?mesh\[([^\]]*)\](?:, device_ids=\(([^{]*)\))? \{([^}]*)\}")
_SOURCE_TARGET_PAIRS = re.compile(r"source_target_pairs=\{((?:\{[\d,]*\},?)*)\}")


@dataclasses.dataclass(frozen=True)
class Collective:
    """One kind of collective along one set of axes."""

    kind: str
    """As HLO calls it: all-reduce, all-gather, reduce-scatter, collective-permute, all-to-all."""
    axes: tuple[str, ...] | None
    """The mesh axes along which devices take part; () where each does so alone, None where no axes explain it."""
    groups: str
    """The groups as the program writes them, where no axes explain them; empty otherwise."""
    count: int
    """How often one runs, loops included."""
    arrays: int
    """How many arrays they carry: XLA combines several into one collective."""
    bytes: int
    """On one device, what goes in or what comes out, whichever is more."""


def sum_collectives(
    executions: Iterable[Execution], mesh: jax.sharding.Mesh | None, devices: int
) -> tuple[Collective, ...]:
    """Those among what runs, summed by kind and axes, by bytes, the largest first."""
    sums: dict[tuple, list[int]] = {}
    for one in executions:
        kind = one.instruction.opcode.removesuffix("-start")
        if kind not in _COLLECTIVE_OPCODES:
            continue
        groups = parse_groups(one.instruction, devices)
        axes = None if groups is None else find_mesh_axes(groups, mesh, permute=kind == "collective-permute")
        sizes = [
            count_shape_bytes(one.computation[name].shape)
            for name in one.instruction.operands
            if name in one.computation
        ]
        wide = max(map(len, groups or ()), default=1) if kind == "all-gather" else 1
        key = kind, axes, "" if axes is not None else _format_groups(one.instruction)
        total = sums.setdefault(key, [0, 0, 0])
        for place, more in enumerate((1, len(sizes), sum(sizes) * wide)):
            total[place] += one.times * more
    rows = [Collective(*key, *total) for key, total in sums.items()]
    return tuple(sorted(rows, key=lambda row: (-row.bytes, row.kind, str(row.axes))))


def parse_groups(instruction: Instruction, devices: int) -> _DeviceGroups | None:
    """Who takes part together. XLA writes it in four ways; None where this one is none of them.

    - `replica_groups={{0,1},{2,3}}`: as they are; empty braces are all devices in one group.
    - `replica_groups=[2,4]<=[8]`, or `[4,2]<=[2,4]T(1,0)`: count up, reshape, transpose, reshape; a row is a group.
    - `replica_groups=mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'a'}`: a mesh of its own, and the axes of a group;
      `'b':(2)2` is the part of size 2 of an axis that comes after a part of size 2.
    - `source_target_pairs={{0,1},{1,0}}`, of a permutation: a pair is a group.
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
    return ids.transpose(order) if order else ids


def _parse_device_ids(text: str, devices: int) -> np.ndarray:
    """`[4,2]T(1,0)`, or a list of them, or nothing: in order."""
    shape, _, order = text.partition("T")
    if order:
        return _iota(_parse_integers(shape), _parse_integers(order))
    return np.array(_parse_integers(text)) if text and not text.startswith("[") else np.arange(devices)


def _group_device_ids(ids: np.ndarray, sizes: dict[str, int], axes: Sequence[str]) -> np.ndarray:
    """A row for each group: the named axes, or parts of them, last."""
    chosen = [_parse_axis(axis, sizes) for axis in axes]
    shape, last = [], []
    for name, size in sizes.items():
        own = [(start, stop) for of, start, stop in chosen if of == name]
        for start, stop in itertools.pairwise(sorted({1, size, *itertools.chain(*own)})):
            if any(first <= start < end for first, end in own):
                last.append(len(shape))
            shape.append(stop // start)
    others = [place for place in range(len(shape)) if place not in last]
    return ids.reshape(shape).transpose(others + last).reshape(-1, math.prod(shape[place] for place in last))


def _parse_axis(axis: str, sizes: dict[str, int]) -> tuple[str, int, int]:
    """`'b':(2)3` is the part of axis b between the parts of size 2 and 2 x 3, outermost first; `'b'` is all of it."""
    name, _, part = axis.partition(":")
    name = name.strip("'\"")
    before, own = _parse_integers(part) if part else (1, sizes[name])
    return name, before, before * own


def _rows_to_groups(ids: np.ndarray) -> _DeviceGroups:
    return frozenset(frozenset(row.tolist()) for row in ids)


def find_mesh_axes(
    groups: _DeviceGroups, mesh: jax.sharding.Mesh | None, *, permute: bool = False
) -> tuple[str, ...] | None:
    """The mesh axes whose groups these are; of a permutation, those along which its pairs differ. None where there are
    no such axes: a group may be part of an axis, or cut across several."""
    if all(len(group) == 1 for group in groups):
        return ()
    if mesh is None or max(itertools.chain(*groups)) >= mesh.size:
        return None
    sizes = {name: size for name, size in mesh.shape.items() if size > 1}
    ids = np.arange(mesh.size).reshape(tuple(sizes.values()))
    if permute:
        pairs = [np.array(np.unravel_index(sorted(group), ids.shape)) for group in groups]
        return tuple(name for place, name in enumerate(sizes) if any(len({*pair[place]}) > 1 for pair in pairs))
    for count in range(1, len(sizes) + 1):
        for axes in itertools.combinations(range(len(sizes)), count):
            others = [axis for axis in range(len(sizes)) if axis not in axes]
            wide = math.prod(ids.shape[axis] for axis in axes)
            if _rows_to_groups(ids.transpose(*others, *axes).reshape(-1, wide)) == groups:
                return tuple(list(sizes)[axis] for axis in axes)
    return None


def _format_groups(instruction: Instruction) -> str:
    for pattern in (_EXPLICIT_GROUPS, _IOTA_GROUPS, _MESH_AXES_GROUPS, _SOURCE_TARGET_PAIRS):
        if found := pattern.search(instruction.attributes):
            return found[0].partition("=")[2]
    return "unknown"

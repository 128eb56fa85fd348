"""Buffers of a compiled program that are in memory at its peak, from XLA's buffer assignment.

XLA writes two texts about memory next to a dumped program. `...buffer-assignment.txt` lists allocations and the values
in each, `...live-range.txt` the first and the last instruction at which a value is needed:

    allocation 9: size 4784324, preallocated-temp:
     value: <108 wrapped_tanh @0> (size=524288,offset=3145856): f32[256,512]{1,0}

      BufferLiveRange:
        wrapped_tanh{}:33-36

Arguments, results and constants are allocations of their own, and held from beginning to end. Temporaries share one:
values that are needed at one time and have one offset are one buffer, written in place. The peak is the time at which
the temporaries sum to most. XLA's text has a list for the peak too, in which arrays that are updated in place, as the
residuals of a scan are, count twice.
"""

import dataclasses
import itertools
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from zoo._compile_cache import compile_cache_disabled

from . import hlo
from .format import Rows
from .scopes import find_written_scope

_ALLOCATION = re.compile(r"allocation \d+: size (?P<size>\d+),(?P<attributes>.*)")
_VALUE = re.compile(
    r" value: <\d+ (?P<name>[^\s{]+)(?P<index>\{[\d,]*\})?.* @(?P<space>\d+)> "
    r"\(size=(?P<size>\d+),offset=(?P<offset>\d+)\): (?P<shape>.*)"
)
_LIVE_RANGE = re.compile(r"    (?P<name>[^\s{]+)(?P<index>\{[\d,]*\}):(?P<start>\d+)-(?P<end>\d+)")
_LAYOUT = re.compile(r"\{[^}]*\}|/\*.*?\*/")
_FORWARDING_OPCODES = ("parameter", "while", "conditional", "call", "tuple", "get-tuple-element", "bitcast")
"""Opcodes that write nothing: their values were written by other instructions."""


@dataclasses.dataclass(frozen=True)
class Buffer:
    """A buffer that is in memory at the peak."""

    bytes: int
    """Bytes per device."""
    shape: str
    """Dtype and sizes on one device, as in the HLO: `f32[16,64,256]`."""
    opcode: str
    """HLO opcode of the instruction that wrote it; "parameter" for an argument of the step."""
    instruction: str
    """Name of this instruction in the HLO."""
    phase: str
    """Pass of a gradient: "forward", "backward" or "recomputed"; empty outside of one."""
    scope: str
    """The modules that made it, `Decoder/stack/Block/ffn.GatedMLP/up`; for an argument its name. Empty if unknown."""


@dataclasses.dataclass(frozen=True)
class _Value:
    """A value of the buffer assignment; `start` and `end` count instructions."""

    name: str
    index: str
    bytes: int
    offset: int
    shape: str
    start: int
    end: int


@dataclasses.dataclass(frozen=True)
class _Allocation:
    bytes: int
    attributes: str
    values: Sequence[_Value]

    @property
    def is_temporary(self) -> bool:
        return "preallocated-temp" in self.attributes

    @property
    def is_argument(self) -> bool:
        return " parameter " in self.attributes


def read_buffers(
    stage: Any, compiler_options: Mapping[str, Any], platform: str, parameters: Mapping[int, str]
) -> Rows[Buffer]:
    """Compile a lowered step once more, and list the buffers at its peak, largest first. `parameters` are the names of
    the program's parameters, by number. **Raises** `RuntimeError` if the compiler writes no buffer assignment."""
    # A program out of the compilation cache is not compiled, and nothing is dumped.
    with tempfile.TemporaryDirectory(prefix="zoo-buffers-") as folder, compile_cache_disabled():
        dump = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
        module = hlo.parse_module(stage.compile(compiler_options={**compiler_options, **dump}).as_text())
        assignment = _read_dumped(Path(folder), "buffer-assignment", platform)
        live_ranges = _read_dumped(Path(folder), "live-range", platform)
    allocations = list(parse_assignment(assignment, live_ranges, main_memory_only=platform == "tpu"))
    return list_buffers_at_peak(module, allocations, parameters)


def _read_dumped(folder: Path, name: str, platform: str) -> str:
    """Return the largest dumped text of this name: some compilers compile small programs of their own on the way."""
    files = sorted(folder.glob(f"*{name}.txt"), key=lambda file: file.stat().st_size)
    if not files:
        raise RuntimeError(
            f"the compiler for {platform} wrote no {name}.txt, so the buffers of the program are not known: "
            "program.memory has their sum"
        )
    return files[-1].read_text(encoding="utf-8")


def parse_assignment(assignment: str, live_ranges: str, *, main_memory_only: bool = False) -> Iterator[_Allocation]:
    """Yield the allocations of a buffer assignment, with values that have a live range.

    - `main_memory_only`: leave out values in other memory spaces, on a TPU the memory on the chip.
    """
    ranges = {
        (found["name"], found["index"]): (int(found["start"]), int(found["end"]))
        for found in _LIVE_RANGE.finditer(live_ranges)
    }
    size = 0
    attributes = ""
    values: list[_Value] = []
    for line in [*assignment.splitlines(), "allocation 0: size 0,"]:
        if found := _ALLOCATION.match(line):
            if values:
                yield _Allocation(size, attributes, values)
            size = int(found["size"])
            attributes = found["attributes"]
            values = []
        elif found := _VALUE.match(line):
            key = found["name"], found["index"] or "{}"
            if key in ranges and not (main_memory_only and found["space"] != "0"):
                shape = _LAYOUT.sub("", found["shape"])
                values.append(_Value(*key, int(found["size"]), int(found["offset"]), shape, *ranges[key]))


def list_buffers_at_peak(
    module: hlo.HloModule, allocations: Sequence[_Allocation], parameters: Mapping[int, str]
) -> Rows[Buffer]:
    """List the buffers that are in memory when the temporaries sum to most."""
    instructions = {name: (i, c) for c in module.computations.values() for name, i in c.items()}
    places = [place for allocation in allocations for place in _split_into_places(allocation)]
    peak = _find_peak(places)
    buffers = []
    for allocation, values in places:
        alive = values
        size = allocation.bytes
        if allocation.is_temporary:
            alive = [value for value in values if value.start <= peak <= value.end]
            if not alive:
                continue
            size = max(value.bytes for value in alive)
        if allocation.is_argument:
            value = values[0]  # the next is the result that reuses it
        else:
            value = _find_writer(instructions, values, alive)
        buffers.append(_describe_buffer(module, instructions, value, size, parameters))
    return Rows(sorted(buffers, key=lambda buffer: (-buffer.bytes, buffer.scope, buffer.instruction)))


def _split_into_places(allocation: _Allocation) -> Iterator[tuple[_Allocation, list[_Value]]]:
    """Yield the values of temporaries offset by offset, and of another allocation all, in the order of time."""
    if not allocation.is_temporary:
        yield allocation, sorted(allocation.values, key=lambda value: value.start)
        return
    ordered = sorted(allocation.values, key=lambda value: (value.offset, value.start))
    for _, values in itertools.groupby(ordered, key=lambda value: value.offset):
        yield allocation, list(values)


def _find_peak(places: Sequence[tuple[_Allocation, list[_Value]]]) -> int:
    """Return the time at which the temporaries sum to most."""
    changes: dict[int, int] = {}
    for allocation, values in places:
        if not allocation.is_temporary:
            continue
        for start, end, size in _merge_ranges(values):
            changes[start] = changes.get(start, 0) + size
            changes[end + 1] = changes.get(end + 1, 0) - size
    times = sorted(changes)
    totals = itertools.accumulate(changes[time] for time in times)
    return max(zip(totals, times, strict=True), key=lambda pair: pair[0], default=(0, 0))[1]


def _merge_ranges(values: Sequence[_Value]) -> Iterator[tuple[int, int, int]]:
    """Yield start, end and size of each time in which one of the values of a place is needed."""
    start = end = size = -1
    for value in values:
        if value.start > end:
            if size >= 0:
                yield start, end, size
            start = value.start
            size = 0
        end = max(end, value.end)
        size = max(size, value.bytes)
    if size >= 0:
        yield start, end, size


def _find_writer(instructions: Mapping[str, Any], values: Sequence[_Value], alive: Sequence[_Value]) -> _Value:
    """Return the value that says what is in a buffer: the last of `alive` that an instruction wrote.

    Where only a loop's own values are alive, another instruction wrote the array. It comes later in the loop's body if
    the value is a parameter of the body, and before the value otherwise.
    """

    def is_written(value: _Value) -> bool:
        return value.name in instructions and instructions[value.name][0].opcode not in _FORWARDING_OPCODES

    written = [value for value in alive if is_written(value)]
    if written:
        return written[-1]
    last = alive[-1]
    others = [value for value in values if is_written(value) and value.shape == last.shape]
    later = [value for value in others if value.start >= last.start]
    earlier = [value for value in others if value.start < last.start]
    if later and last.name in instructions and instructions[last.name][0].opcode == "parameter":
        return later[0]
    return earlier[-1] if earlier else last


def _describe_buffer(
    module: hlo.HloModule, instructions: Mapping[str, Any], value: _Value, size: int, parameters: Mapping[int, str]
) -> Buffer:
    if value.name not in instructions:
        return Buffer(size, value.shape, "", value.name, "", "")
    instruction, computation = instructions[value.name]
    if instruction.opcode == "parameter" and computation is module.computations[module.entry]:
        name = parameters.get(int(instruction.operands[0]), "")
        return Buffer(size, value.shape, instruction.opcode, value.name, "", name)
    scope = find_written_scope(module, instruction, computation, value.index)
    return Buffer(size, value.shape, instruction.opcode, value.name, scope.phase, scope.modules)

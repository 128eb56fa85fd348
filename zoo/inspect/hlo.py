"""Reads the text of a compiled program: XLA's HLO, after all its passes, as `compiled.as_text()` gives it.

A module is a list of computations, and a computation a list of instructions, one a line:

    HloModule jit_step, input_output_alias={ {1}: (0, {}, may-alias) }, num_partitions=8

    %body (p: (s32[], f32[4,8])) -> (s32[], f32[4,8]) {
      %sum.1 = f32[4,8]{1,0} all-reduce(%x), replica_groups={{0,1},{2,3}}, to_apply=%add, metadata={op_name="..."}
    }

    ENTRY %main (...) -> ... {
      %while.2 = (s32[], f32[4,8]{1,0}) while(%tuple), condition=%cond, body=%body,
          backend_config={"known_trip_count":{"n":"3"}}              (on one line)
    }

That is `%name = shape opcode(operands), attributes`. A shape is a dtype, sizes and a layout, or a tuple of shapes.
Operands are names, of instructions above in the same computation; some versions write their shapes before them.
Computations are called by attribute: `body` and `condition` of a while, `calls` of a fusion, which is one kernel and
whose instructions touch no memory of their own, `branch_computations` of a conditional. The text is made for people and
its details move; what is not known here is passed over, and an opcode without a rule counts like any other.
"""

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping

_COMPUTATION_HEADER = re.compile(r"(?P<entry>ENTRY )?%?(?P<name>[^\s(]+) .*\{\s*$")
_INSTRUCTION_NAME = re.compile(r"\s+(?P<root>ROOT )?%?(?P<name>\S+) = ")
_ARRAY_SHAPE = re.compile(r"\b([a-z]+\d*[a-z0-9]*)\[([\d,<= ]*)\]")
_TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_INPUT_OUTPUT_ALIAS = re.compile(r"\{[\d, ]*\}: \((\d+), \{[\d, ]*\}, (?:may|must)-alias\)")

_RESHAPE_OPCODES = ("bitcast", "reshape")
_SLICE_OPCODES = ("slice", "dynamic-slice", "gather")
_NO_TRAFFIC_OPCODES = (
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id"),
    *("opt-barrier", "optimization-barrier", "domain", "add-dependency", "token"),
)
"""Opcodes that move nothing: they name what is there already."""


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation."""

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    attributes: str

    def called_computations(self, attribute: str) -> tuple[str, ...]:
        """The computations that an attribute names: `body=%b`, `branch_computations={%a, %b}`."""
        found = re.search(rf"\b{attribute}=(\{{[^}}]*\}}|[^\s,]+)", self.attributes)
        return () if found is None else tuple(name.strip("%") for name in re.split(r"[{},\s]+", found[1]) if name)


_Computation = Mapping[str, Instruction]
"""Its instructions by name, in order; the last is its result, unless one is marked as the root."""


@dataclasses.dataclass(frozen=True)
class HloModule:
    """A compiled program: the first line of its text, its computations by name, and where it begins."""

    header: str
    computations: Mapping[str, _Computation]
    entry: str
    roots: Mapping[str, str]
    """The instruction that is a computation's result, by the computation's name."""


@dataclasses.dataclass(frozen=True)
class Execution:
    """An instruction that runs, and how often: `times` is the product of the trip counts of the loops around it."""

    instruction: Instruction
    computation: _Computation
    times: int


def parse_module(text: str) -> HloModule:
    """**Raises** `ValueError` for a text without an entry computation."""
    computations: dict[str, dict[str, Instruction]] = {}
    roots, header, entry, inside = {}, "", "", None
    for line in text.splitlines():
        if line.startswith("HloModule"):
            header = line
        elif line.startswith("}"):
            inside = None
        elif inside is not None and (found := _INSTRUCTION_NAME.match(line)):
            instruction = parse_instruction(found["name"], line[found.end() :])
            computations[inside][instruction.name] = instruction
            if found["root"] or inside not in roots:
                roots[inside] = instruction.name
        elif not line.startswith(" ") and (found := _COMPUTATION_HEADER.match(line)):
            inside = found["name"]
            computations[inside] = {}
            entry = inside if found["entry"] else entry
    if not entry:
        raise ValueError("this is not the text of an HLO module: no computation is marked ENTRY")
    return HloModule(header, computations, entry, roots)


def parse_instruction(name: str, rest: str) -> Instruction:
    """An instruction, from what stands after its `name = `."""
    end = _find_closing_bracket(rest, 0) if rest.startswith("(") else rest.index(" ")
    shape, rest = rest[:end], rest[end:].lstrip()
    opening = rest.index("(")
    end = _find_closing_bracket(rest, opening)
    inner = re.sub(r"/\*.*?\*/", "", rest[opening + 1 : end - 1])
    operands = tuple(part.split()[-1].lstrip("%") for part in _split_at_commas(inner) if part.strip())
    return Instruction(name, shape, rest[:opening], operands, rest[end:])


def _find_closing_bracket(text: str, start: int) -> int:
    """The place after the bracket that closes the one at `start`; the end where none does."""
    depth = 0
    for found in re.compile(r"[()]").finditer(text, start):
        depth += 1 if found[0] == "(" else -1
        if depth == 0:
            return found.end()
    return len(text)


def _split_at_commas(text: str) -> Iterator[str]:
    """Parts between the commas that stand in no bracket."""
    depth, start = 0, 0
    for found in re.finditer(r"[(){}\[\],]", text):
        if found[0] in "({[":
            depth += 1
        elif found[0] in ")}]":
            depth -= 1
        elif depth == 0:
            yield text[start : found.start()]
            start = found.end()
    yield text[start:]


def count_shape_bytes(shape: str) -> int:
    """Bytes of a shape, or of all in a tuple; tokens and opaque values have none."""
    total = 0
    for dtype, sizes in _ARRAY_SHAPE.findall(shape):
        bits = 8 if dtype == "pred" else int(digits[0]) if (digits := re.findall(r"\d+", dtype)) else 0
        elements = 1
        for size in re.findall(r"\d+", sizes):
            elements *= int(size)
        total += -(-elements * bits // 8)
    return total


def count_parameters(module: HloModule) -> int:
    """How many arguments the program takes."""
    return sum(found.opcode == "parameter" for found in module.computations[module.entry].values())


def count_devices(module: HloModule) -> int:
    """How many devices the program runs on."""
    found = (re.search(rf"\b{word}=(\d+)", module.header) for word in ("num_partitions", "replica_count"))
    return math.prod(int(number[1]) for number in found if number)


def find_aliased_parameters(module: HloModule) -> frozenset[int]:
    """The arguments whose memory an output takes over."""
    return frozenset(map(int, _INPUT_OUTPUT_ALIAS.findall(module.header)))


def list_executions(module: HloModule) -> tuple[list[Execution], list[str]]:
    """What runs, outside fusions, and the names of loops whose length the text does not tell: they count once.

    Of the branches of a conditional, the one that moves most.
    """
    endless: list[str] = []

    def walk(name: str, times: int) -> list[Execution]:
        found = []
        for instruction in module.computations.get(name, {}).values():
            match instruction.opcode:
                case "while":
                    trips = _TRIP_COUNT.search(instruction.attributes)
                    if trips is None:
                        endless.append(instruction.name)
                    for body in instruction.called_computations("body"):
                        found += walk(body, times * (int(trips[1]) if trips else 1))
                case "conditional":
                    names = instruction.called_computations("branch_computations") or (
                        *instruction.called_computations("true_computation"),
                        *instruction.called_computations("false_computation"),
                    )
                    branches = [walk(branch, times) for branch in names]
                    found += max(branches, key=lambda branch: count_bytes_moved(module, branch), default=[])
                case "call" | "async-start":
                    for body in instruction.called_computations("to_apply") or instruction.called_computations("calls"):
                        found += walk(body, times)
                case opcode if not opcode.endswith(("-done", "-update")):
                    found.append(Execution(instruction, module.computations[name], times))
        return found

    return walk(module.entry, 1), endless


def count_bytes_moved(module: HloModule, executions: list[Execution]) -> int:
    """Bytes of main memory that these read and write, at most: every operand is read and every result written, as if
    no cache held anything.

    A slice counts as long as it is and not as what it is taken from, alone and in a fusion, and so does an update in
    place: a loop over stacked layers would else count every layer at each of them.
    """
    return sum(one.times * count_instruction_bytes(module, one.instruction, one.computation) for one in executions)


def count_instruction_bytes(module: HloModule, instruction: Instruction, computation: _Computation) -> int:
    sizes = [count_shape_bytes(computation[name].shape) for name in instruction.operands if name in computation]
    whole = count_shape_bytes(instruction.shape)
    match instruction.opcode:
        case opcode if opcode in _NO_TRAFFIC_OPCODES:
            return 0
        case "fusion" if (called := instruction.called_computations("calls")) and called[0] in module.computations:
            fused = module.computations[called[0]]
            return _count_fusion_reads(fused, sizes) + _count_bytes_written(fused, module.roots[called[0]])
        case opcode if opcode in _SLICE_OPCODES:
            return 2 * whole + sum(sizes[1:])
        case "dynamic-update-slice" if len(sizes) > 1:
            return 2 * sizes[1]
        case opcode if opcode.endswith("-start") and opcode != "all-reduce-start":
            return whole  # a tuple of what is read and what is written
        case _:
            return sum(sizes) + whole


def _count_fusion_reads(fused: _Computation, sizes: list[int]) -> int:
    """What a fusion reads of its operands, whose sizes these are."""
    numbers = {one.name: int(one.operands[0]) for one in fused.values() if one.opcode == "parameter"}
    total = 0
    for name, number in numbers.items():
        parts = [_count_bytes_read(use, source) for use, source in _find_uses(fused, name)]
        size = sizes[number] if number < len(sizes) else 0
        total += size if None in parts else min(size, sum(filter(None, parts)))
    return total


def _find_uses(fused: _Computation, name: str) -> Iterator[tuple[Instruction, str]]:
    """The instructions that use `name`, and the name under which they do: it may have been reshaped on the way."""
    for one in fused.values():
        if name in one.operands:
            if one.opcode in _RESHAPE_OPCODES:
                yield from _find_uses(fused, one.name)
            else:
                yield one, name


def _count_bytes_read(use: Instruction, source: str) -> int | None:
    """How many bytes of `source` this reads; None for all."""
    first_only = use.operands[0] == source and source not in use.operands[1:]
    if use.opcode in _SLICE_OPCODES and first_only:
        return count_shape_bytes(use.shape)
    return 0 if use.opcode == "dynamic-update-slice" and first_only else None


def _count_bytes_written(fused: _Computation, root: str) -> int:
    one = fused[root]
    if one.opcode == "tuple":
        return sum(_count_bytes_written(fused, name) for name in one.operands)
    if one.opcode in _RESHAPE_OPCODES and one.operands[0] in fused:
        return _count_bytes_written(fused, one.operands[0])
    if one.opcode == "dynamic-update-slice" and one.operands[1] in fused:
        return count_shape_bytes(fused[one.operands[1]].shape)
    return count_shape_bytes(one.shape)

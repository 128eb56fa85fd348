"""Parser for the text of a compiled program: XLA's HLO after all passes, from `compiled.as_text()`.

A module is a list of computations, and a computation is a list of instructions, one per line:

    HloModule jit_step, input_output_alias={ {1}: (0, {}, may-alias) }, num_partitions=8

    %body (p: (s32[], f32[4,8])) -> (s32[], f32[4,8]) {
      %sum.1 = f32[4,8]{1,0} all-reduce(%x), replica_groups={{0,1},{2,3}}, to_apply=%add, metadata={op_name="..."}
    }

    ENTRY %main (...) -> ... {
      %while.2 = (s32[], f32[4,8]{1,0}) while(%tuple), condition=%cond, body=%body,
          backend_config={"known_trip_count":{"n":"3"}}              (on one line)
    }

That is `%name = shape opcode(operands), attributes`. A shape is a dtype, sizes and a layout, or a tuple of shapes.
Operands are names of instructions above in the same computation; some versions write their shapes before them.
Attributes call computations: `body` and `condition` of a while, `calls` of a fusion, `branch_computations` of a
conditional. A fusion is one kernel, and instructions inside it access no main memory. The text is not a stable format:
unknown parts are skipped, and an opcode without a rule counts as its operands and results.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Mapping

_COMPUTATION_HEADER = re.compile(r"(?P<entry>ENTRY )?%?(?P<name>[^\s(]+) .*\{\s*$")
_INSTRUCTION_NAME = re.compile(r"\s+(?P<root>ROOT )?%?(?P<name>\S+) = ")
_ARRAY_SHAPE = re.compile(r"\b([a-z]+\d*[a-z0-9]*)\[([\d,<= ]*)\]")
_INPUT_OUTPUT_ALIAS = re.compile(r"\{[\d, ]*\}: \((\d+), \{[\d, ]*\}, (?:may|must)-alias\)")

_RESHAPE_OPCODES = ("bitcast", "reshape")
_SLICE_OPCODES = ("slice", "dynamic-slice", "gather")
_NO_TRAFFIC_OPCODES = (
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id"),
    *("opt-barrier", "optimization-barrier", "domain", "add-dependency", "token"),
)
"""Opcodes that move no data: they name existing buffers."""


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation."""

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    attributes: str

    def called_computations(self, attribute: str) -> tuple[str, ...]:
        """Return the names of the computations in an attribute: `body=%b`, `branch_computations={%a, %b}`."""
        found = re.search(rf"\b{attribute}=(\{{[^}}]*\}}|[^\s,]+)", self.attributes)
        if found is None:
            return ()
        return tuple(name.strip("%") for name in re.split(r"[{},\s]+", found[1]) if name)


Computation = Mapping[str, Instruction]
"""Instructions by name, in order; the result is the one marked ROOT, otherwise the first."""


@dataclasses.dataclass(frozen=True)
class HloModule:
    """A compiled program: the header line, computations by name, and the name of the entry computation."""

    header: str
    computations: Mapping[str, Computation]
    entry: str
    roots: Mapping[str, str]
    """Name of the result instruction of each computation."""

    @functools.cached_property
    def callers(self) -> Mapping[int, tuple[Instruction, Computation]]:
        """The instruction that calls a computation as its body, and the computation of that instruction, by the id of
        the called one."""
        callers = {}
        for computation in self.computations.values():
            for instruction in computation.values():
                for attribute in ("body", "calls", "to_apply", "branch_computations"):
                    for name in instruction.called_computations(attribute):
                        if name in self.computations:
                            callers[id(self.computations[name])] = instruction, computation
        return callers


def parse_module(text: str) -> HloModule:
    """Parse the text of an HLO module. **Raises** `ValueError` for a text without an entry computation."""
    computations: dict[str, dict[str, Instruction]] = {}
    roots = {}
    header = ""
    entry = ""
    current = None
    for line in text.splitlines():
        if line.startswith("HloModule"):
            header = line
        elif line.rstrip() == "}":  # a TPU kernel has lines of its own, "}}, metadata=..." among them
            current = None
        elif current is not None and (match := _INSTRUCTION_NAME.match(line)):
            instruction = parse_instruction(match["name"], line[match.end() :])
            computations[current][instruction.name] = instruction
            if match["root"] or current not in roots:
                roots[current] = instruction.name
        elif not line.startswith(" ") and (match := _COMPUTATION_HEADER.match(line)):
            current = match["name"]
            computations[current] = {}
            if match["entry"]:
                entry = current
    if not entry:
        raise ValueError("this is not the text of an HLO module: no computation is marked ENTRY")
    return HloModule(header, computations, entry, roots)


def parse_instruction(name: str, rest: str) -> Instruction:
    """Parse an instruction from the text after its `name = `."""
    if rest.startswith("("):
        end = _find_closing_bracket(rest, 0)
    else:
        end = rest.index(" ")
    shape = rest[:end]
    rest = rest[end:].lstrip()
    opening = rest.index("(")
    end = _find_closing_bracket(rest, opening)
    inner = re.sub(r"/\*.*?\*/", "", rest[opening + 1 : end - 1])
    operands = tuple(part.split()[-1].lstrip("%") for part in _split_at_commas(inner) if part.strip())
    return Instruction(name, shape, rest[:opening], operands, rest[end:])


def _find_closing_bracket(text: str, start: int) -> int:
    """Return the index after the bracket that closes the one at `start`; the length of the text if none does."""
    depth = 0
    for bracket in re.compile(r"[()]").finditer(text, start):
        if bracket[0] == "(":
            depth += 1
        else:
            depth -= 1
        if depth == 0:
            return bracket.end()
    return len(text)


def _split_at_commas(text: str) -> Iterator[str]:
    """Split at commas that are not inside brackets."""
    depth, start = 0, 0
    for separator in re.finditer(r"[(){}\[\],]", text):
        if separator[0] in "({[":
            depth += 1
        elif separator[0] in ")}]":
            depth -= 1
        elif depth == 0:
            yield text[start : separator.start()]
            start = separator.end()
    yield text[start:]


def count_shape_bytes(shape: str) -> int:
    """Count the bytes of a shape, or of all shapes in a tuple; tokens and opaque values have none."""
    total = 0
    for dtype, sizes in _ARRAY_SHAPE.findall(shape):
        if dtype == "pred":
            bits = 8
        elif digits := re.findall(r"\d+", dtype):
            bits = int(digits[0])
        else:
            bits = 0
        elements = 1
        for size in re.findall(r"\d+", sizes):
            elements *= int(size)
        total += -(-elements * bits // 8)
    return total


def list_dims(shape: str) -> list[int]:
    """Return the sizes of the dims of an array's shape: [4, 8] of `f32[4,8]{1,0}`."""
    found = _ARRAY_SHAPE.search(shape)
    if found is None:
        return []
    return [int(size) for size in re.findall(r"\d+", found[2])]


def count_parameters(module: HloModule) -> int:
    """Count the parameters of the entry computation."""
    return sum(i.opcode == "parameter" for i in module.computations[module.entry].values())


def count_devices(module: HloModule) -> int:
    """Count the devices of the program: partitions times replicas."""
    matches = (re.search(rf"\b{name}=(\d+)", module.header) for name in ("num_partitions", "replica_count"))
    return math.prod(int(match[1]) for match in matches if match)


def find_aliased_parameters(module: HloModule) -> frozenset[int]:
    """Return the numbers of the parameters whose buffers an output reuses (input-output aliasing)."""
    return frozenset(map(int, _INPUT_OUTPUT_ALIAS.findall(module.header)))


def count_instruction_bytes(module: HloModule, instruction: Instruction, computation: Computation) -> int:
    sizes = [count_shape_bytes(computation[name].shape) for name in instruction.operands if name in computation]
    result_size = count_shape_bytes(instruction.shape)
    match instruction.opcode:
        case opcode if opcode in _NO_TRAFFIC_OPCODES:
            return 0
        case "fusion" if (called := instruction.called_computations("calls")) and called[0] in module.computations:
            fused = module.computations[called[0]]
            return _count_fusion_reads(fused, sizes) + _count_bytes_written(fused, module.roots[called[0]])
        case opcode if opcode in _SLICE_OPCODES:
            return 2 * result_size + sum(sizes[1:])
        case "dynamic-update-slice" if len(sizes) > 1:
            return 2 * sizes[1]
        case opcode if opcode.endswith("-start") and opcode != "all-reduce-start":
            return result_size  # a tuple of operands and results
        case _:
            return sum(sizes) + result_size


def _count_fusion_reads(fused: Computation, sizes: list[int]) -> int:
    """Count the bytes of its operands that a fusion reads; `sizes` are the sizes of the full operands."""
    numbers = {i.name: int(i.operands[0]) for i in fused.values() if i.opcode == "parameter"}
    total = 0
    for name, number in numbers.items():
        reads = [_count_bytes_read(use, source) for use, source in _find_uses(fused, name)]
        size = sizes[number] if number < len(sizes) else 0
        if None not in reads:
            size = min(size, sum(filter(None, reads)))
        total += size
    return total


def _find_uses(fused: Computation, name: str) -> Iterator[tuple[Instruction, str]]:
    """Yield the instructions that use `name`, each with the name of the operand: `name`, or a reshape of it."""
    for instruction in fused.values():
        if name in instruction.operands:
            if instruction.opcode in _RESHAPE_OPCODES:
                yield from _find_uses(fused, instruction.name)
            else:
                yield instruction, name


def _count_bytes_read(use: Instruction, source: str) -> int | None:
    """Count the bytes of `source` that an instruction reads; None if it reads all."""
    first_only = use.operands[0] == source and source not in use.operands[1:]
    if use.opcode in _SLICE_OPCODES and first_only:
        return count_shape_bytes(use.shape)
    if use.opcode == "dynamic-update-slice" and first_only:
        return 0
    return None


def _count_bytes_written(fused: Computation, root: str) -> int:
    instruction = fused[root]
    if instruction.opcode == "tuple":
        return sum(_count_bytes_written(fused, name) for name in instruction.operands)
    if instruction.opcode in _RESHAPE_OPCODES and instruction.operands[0] in fused:
        return _count_bytes_written(fused, instruction.operands[0])
    if instruction.opcode == "dynamic-update-slice" and instruction.operands[1] in fused:
        return count_shape_bytes(fused[instruction.operands[1]].shape)
    return count_shape_bytes(instruction.shape)

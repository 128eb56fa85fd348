"""Memory traffic of a compiled program outside fusions: operations that read and write whole arrays by themselves."""

import dataclasses
from collections.abc import Iterator, Sequence

from .collectives import COLLECTIVE_OPCODES
from .executions import Execution
from .format import Rows
from .hlo import HloModule, Instruction, count_instruction_bytes
from .products import is_product, iterate_fused
from .scopes import find_scope


@dataclasses.dataclass(frozen=True)
class UnfusedTraffic:
    """Memory traffic of operations of one kind in one module, which XLA fused with no other."""

    bytes: int
    """Bytes per device that they read and write, loop iterations included: an upper bound without cache hits."""
    times: int
    """Number of executions."""
    opcode: str
    """HLO opcode: copy, transpose, gather, scatter, sort, reduce, ..."""
    phase: str
    """Pass of a gradient: "forward", "backward" or "recomputed"; empty outside of one."""
    scope: str
    """`Decoder/stack/Block/mixer.Attention`; empty outside of all modules."""


def sum_unfused(module: HloModule, executions: Sequence[Execution]) -> Rows[UnfusedTraffic]:
    """Sum the traffic of instructions outside fusions by opcode and scope, largest first.

    A fusion around one instruction is how XLA's CPU and GPU compilers run that instruction, and counts as outside.
    Products, collectives and calls of libraries are left out: fused or not, they are kernels of their own.
    """
    sums: dict[tuple[str, str, str], list[int]] = {}
    for execution in executions:
        instruction = _find_single_instruction(module, execution)
        if instruction is None or _is_kernel(instruction):
            continue
        size = count_instruction_bytes(module, execution.instruction, execution.computation)
        if size == 0:
            continue
        scope = find_scope(module, execution.instruction, execution.computation)
        total = sums.setdefault((instruction.opcode, scope.phase, scope.modules), [0, 0])
        total[0] += execution.times * size
        total[1] += execution.times
    rows = [UnfusedTraffic(size, times, *key) for key, (size, times) in sums.items()]
    return Rows(sorted(rows, key=lambda row: (-row.bytes, row.opcode, row.phase, row.scope)))


def _find_single_instruction(module: HloModule, execution: Execution) -> Instruction | None:
    """Return an instruction, or the only one inside a fusion; None for a fusion of several."""
    inner = list(_iterate_computing(module, execution))
    return inner[0] if len(inner) == 1 else None


def _iterate_computing(module: HloModule, execution: Execution) -> Iterator[Instruction]:
    for instruction, _ in iterate_fused(module, execution.instruction, execution.computation):
        if instruction.opcode not in ("parameter", "constant", "bitcast", "tuple"):
            yield instruction


def _is_kernel(instruction: Instruction) -> bool:
    opcode = instruction.opcode.removesuffix("-start")
    return is_product(instruction) or opcode == "custom-call" or opcode in COLLECTIVE_OPCODES

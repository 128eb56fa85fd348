"""FLOPs of the matrix products of a compiled program on one device, counted in its HLO.

They differ from the FLOPs of the jaxpr (`zoo.inspect.count_flops`) by the products that XLA drops or recomputes.
"""

import dataclasses
import math
import re
from collections.abc import Iterator, Sequence

from .executions import Execution
from .hlo import Computation, HloModule, Instruction, list_dims
from .report import Rows
from .scopes import find_scope

_LIBRARY_CALL = re.compile(r"custom_call_target=\"[^\"]*(gemm|matmul|dot|conv|fmha|tpu_custom_call|triton)")


@dataclasses.dataclass(frozen=True)
class RecomputedProducts:
    """Matrix products of one module that rematerialization computes again in the backward pass."""

    flops: int
    """FLOPs per device, loop iterations included."""
    scope: str
    """`Decoder/stack/Block/ffn.GatedMLP/up`"""


def count_compiled_flops(module: HloModule, executions: Sequence[Execution]) -> int | None:
    """Count the FLOPs of all products that a device executes, 2 m n k each.

    None if one of them is a convolution, as all are on TPUs, or a library kernel, since the HLO does not say what such
    a kernel computes. A loop without a known trip count counts once.
    """
    total = 0
    for execution in executions:
        for instruction, computation in iterate_fused(module, execution.instruction, execution.computation):
            if instruction.opcode == "dot":
                total += execution.times * _count_dot(instruction, computation)
            elif is_product(instruction):
                return None
    return total


def sum_recomputed(module: HloModule, executions: Sequence[Execution]) -> Rows[RecomputedProducts] | None:
    """Sum the FLOPs of recomputed products by scope, largest first. None where `count_compiled_flops` is None."""
    sums: dict[str, int] = {}
    for execution in executions:
        for instruction, computation in iterate_fused(module, execution.instruction, execution.computation):
            if not is_product(instruction):
                continue
            if instruction.opcode != "dot":
                return None
            scope = find_scope(module, instruction, computation)
            if scope.phase == "recomputed":
                flops = execution.times * _count_dot(instruction, computation)
                sums[scope.modules] = sums.get(scope.modules, 0) + flops
    rows = [RecomputedProducts(flops, scope) for scope, flops in sums.items()]
    return Rows(sorted(rows, key=lambda row: (-row.flops, row.scope)))


def is_product(instruction: Instruction) -> bool:
    """Return True for a matrix product, a convolution, and a call of a library that computes one."""
    return instruction.opcode in ("dot", "convolution") or bool(_LIBRARY_CALL.search(instruction.attributes))


def iterate_fused(
    module: HloModule, instruction: Instruction, computation: Computation
) -> Iterator[tuple[Instruction, Computation]]:
    """Yield an instruction; for a fusion, the instructions inside it."""
    if instruction.opcode != "fusion":
        yield instruction, computation
        return
    for name in instruction.called_computations("calls"):
        fused = module.computations[name]
        for inner in fused.values():
            yield from iterate_fused(module, inner, fused)


def _count_dot(dot: Instruction, computation: Computation) -> int:
    contracted = re.search(r"\blhs_contracting_dims=\{([\d,]*)\}", dot.attributes)
    left = list_dims(computation[dot.operands[0]].shape)
    depth = 1
    if contracted:
        depth = math.prod(left[int(dim)] for dim in re.findall(r"\d+", contracted[1]))
    return 2 * math.prod(list_dims(dot.shape)) * depth

"""FLOPs of the matrix products of a compiled program on one device, counted in its HLO.

They differ from the FLOPs of the jaxpr (`zoo.inspect.count_flops`) by the products that XLA drops or recomputes.
"""

import dataclasses
import math
import re
from collections.abc import Iterator, Sequence

import numpy as np

from .executions import Execution
from .format import Rows
from .hlo import Computation, HloModule, Instruction, count_shape_bytes, list_dims
from .scopes import find_scope

_CUBLAS_CONTRACTED = re.compile(r'__cublas.*"lhs_contracting_dimensions":\[([^\]]*)\]')
_DIM_LABELS = re.compile(r"\bdim_labels=(\w+)_(\w+)->(\w+)")
_DTYPES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32", **dict.fromkeys(("s8", "u8", "s4", "u4"), "int8")}
"""Names of dtypes in HLO, and in a data sheet's rates."""
_LIBRARY_CALL = re.compile(r"custom_call_target=\"[^\"]*(gemm|matmul|dot|conv|fmha|tpu_custom_call|triton|mosaic_gpu)")


@dataclasses.dataclass(frozen=True)
class RecomputedProducts:
    """Matrix products of one module that rematerialization computes again in the backward pass."""

    flops: int
    """FLOPs per device, loop iterations included."""
    scope: str
    """`Decoder/stack/Block/ffn.GatedMLP/up`"""


def count_compiled_flops(module: HloModule, executions: Sequence[Execution]) -> int | None:
    """Count the FLOPs of all products that a device executes, 2 m n k each.

    None if one of them is a kernel of another library than cuBLAS, since the HLO does not say what such a kernel
    computes. A loop without a known trip count counts once.
    """
    total = 0
    for execution in executions:
        for instruction, computation in iterate_fused(module, execution.instruction, execution.computation):
            if is_product(instruction):
                flops = count_product_flops(instruction, computation)
                if flops is None:
                    return None
                total += execution.times * flops
    return total


def sum_recomputed(module: HloModule, executions: Sequence[Execution]) -> Rows[RecomputedProducts] | None:
    """Sum the FLOPs of recomputed products by scope, largest first. None where `count_compiled_flops` is None."""
    sums: dict[str, int] = {}
    for execution in executions:
        for instruction, computation in iterate_fused(module, execution.instruction, execution.computation):
            if not is_product(instruction):
                continue
            flops = count_product_flops(instruction, computation)
            if flops is None:
                return None
            scope = find_scope(module, instruction, computation)
            if scope.phase == "recomputed":
                sums[scope.modules] = sums.get(scope.modules, 0) + execution.times * flops
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


def count_product_flops(instruction: Instruction, computation: Computation) -> int | None:
    """Count the FLOPs of one matrix product: a dot, a convolution, or cuBLAS. None for any other kernel."""
    if instruction.opcode == "dot":
        return _count_dot(instruction, computation)
    if instruction.opcode == "convolution":
        return _count_convolution(instruction, computation)
    if contracted := _CUBLAS_CONTRACTED.search(instruction.attributes):
        return _count_contracted(instruction, computation, contracted[1])
    return None


def find_product_dtype(instruction: Instruction, computation: Computation) -> str:
    """Return the dtype of the wider operand of a product, as `zoo.parallel.chips.Chip.rate` names it.

    A dtype without a rate on the data sheets, such as float64, takes the rate of float32 at the highest precision.
    """
    shapes = [computation[name].shape for name in instruction.operands[:2]]
    name = max((shape.partition("[")[0] for shape in shapes), key=lambda dtype: count_shape_bytes(f"{dtype}[8]"))
    if name.startswith(("f8", "f4")):
        return "float8"
    if name == "f32" and "operand_precision={highest" in instruction.attributes:
        return "float32 highest"
    return _DTYPES.get(name, "float32 highest")


def _count_dot(dot: Instruction, computation: Computation) -> int:
    contracted = re.search(r"\blhs_contracting_dims=\{([\d,]*)\}", dot.attributes)
    return _count_contracted(dot, computation, contracted[1] if contracted else "")


def _count_contracted(product: Instruction, computation: Computation, contracted: str) -> int:
    """Count 2 m n k, with the contracted dims of the left operand as numbers in a text."""
    left = list_dims(computation[product.operands[0]].shape)
    depth = math.prod(left[int(dim)] for dim in re.findall(r"\d+", contracted))
    return 2 * math.prod(list_dims(product.shape)) * depth


def _count_convolution(convolution: Instruction, computation: Computation) -> int | None:
    """Count the multiply-adds of input elements, as XLA's `HloCostAnalysis` does.

    A TPU multiplies matrices by convolutions: a batch dim is a window over a dilated input, and most of the products in
    the window are with the zeros of its padding. They are not counted.
    """
    labels = _DIM_LABELS.search(convolution.attributes)
    if labels is None:
        return None
    shapes = [*(computation[name].shape for name in convolution.operands[:2]), convolution.shape]
    left, right, out = (
        dict(zip(names, list_dims(shape), strict=True)) for names, shape in zip(labels.groups(), shapes, strict=True)
    )
    total = 2 * out["b"] * out["f"] * right["i"]
    for number, dim in enumerate(sorted(set(left) - {"b", "f"})):
        step = _read_window(convolution, "stride", number, default=1)
        low = _read_window(convolution, "pad", number, default=0)
        dilation = _read_window(convolution, "lhs_dilate", number, default=1)
        spacing = _read_window(convolution, "rhs_dilate", number, default=1)
        positions = np.arange(out[dim])[:, None] * step - low + np.arange(right[dim]) * spacing
        is_data = (positions >= 0) & (positions < left[dim] * dilation) & (positions % dilation == 0)
        total *= int(is_data.sum())
    return total


def _read_window(convolution: Instruction, name: str, dim: int, *, default: int) -> int:
    """Read an option of a dim in `window={size=3x4 stride=2x1 pad=0_1x1_1}`: of `pad`, the low end."""
    found = re.search(rf"\bwindow=\{{[^}}]*\b{name}=([-\dx_]+)", convolution.attributes)
    if found is None:
        return default
    return int(found[1].split("x")[dim].partition("_")[0])

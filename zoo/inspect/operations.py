"""FLOPs of a program, counted in its jaxpr.

Matrix products (`dot_general`, `ragged_dot`) and convolutions count: two FLOPs per multiply-add, four times as many for
complex numbers. Elementwise operations, reductions, sorts, FFTs and decompositions do not. XLA's `cost_analysis()` is
not used: it counts the body of a loop once, whatever its trip count, and a scan over layers is a loop.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp

OPAQUE_PRIMITIVES = (
    "pallas_call",
    "mpmd_map",
    "ffi_call",
    "pure_callback",
    "io_callback",
    "tpu_custom_call",
    "triton_kernel_call",
)
"""Primitives whose FLOPs are not in the jaxpr, such as Pallas' for TPUs and, `mpmd_map`, for GPUs; cuDNN attention is
another one."""


def is_kernel(equation: Any) -> bool:
    """Return True for a kernel, which has no equations to count: an opaque primitive, or cuDNN attention."""
    name = equation.primitive.name
    return name in OPAQUE_PRIMITIVES or name.startswith("dot_product_attention")


@dataclasses.dataclass(frozen=True)
class Flops:
    """FLOPs of a program, and the operations that they do not include."""

    total: int
    """Sum over all devices."""
    uncounted: tuple[str, ...] = ()
    """Loops of unknown trip count, counted once, and opaque kernels. If there are any, the total is a lower bound."""

    def __add__(self, other: "Flops") -> "Flops":
        return Flops(self.total + other.total, tuple(dict.fromkeys(self.uncounted + other.uncounted)))

    def __mul__(self, times: int) -> "Flops":
        return Flops(self.total * times, self.uncounted)


def count_flops(jaxpr: Any) -> Flops:
    """Count the FLOPs of a jaxpr and its inner jaxprs: a scan's body times its length, the most expensive branch of a
    conditional, a `shard_map`'s body times the number of devices."""
    total = Flops(0)
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        total += _count_equation_flops(equation)
    return total


def _count_equation_flops(equation: Any) -> Flops:
    name = equation.primitive.name
    options = equation.params
    if (flops := count_product_flops(equation)) is not None:
        return Flops(flops)
    match name:
        case "scan":
            return count_flops(options["jaxpr"]) * options["length"]
        case "cond":
            return max(map(count_flops, options["branches"]), key=lambda branch: branch.total)
        case "while":
            body = count_flops(options["body_jaxpr"]) + count_flops(options["cond_jaxpr"])
            if body.total:
                return body + Flops(0, (f"while loop {format_scope(equation)}",))
            return body
        case "shard_map":
            return count_flops(options["jaxpr"]) * _count_devices(options)
        case _ if is_kernel(equation):
            estimate = getattr(options.get("cost_estimate"), "flops", None)
            if estimate is None:
                return Flops(0, (f"{name} {format_scope(equation)}",))
            return Flops(int(estimate))
    total = Flops(0)
    for inner in find_subjaxprs(options):
        total += count_flops(inner)
    return total


def iterate_equations(jaxpr: Any, times: int = 1) -> Iterator[tuple[Any, int]]:
    """Yield the equations of a jaxpr and of its inner jaxprs, except equations that have inner jaxprs, each with how
    often it runs over all devices. Equations of a scan run as often as its length, of a `while` loop once; of a
    conditional all branches are yielded."""
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        inner = list(find_subjaxprs(equation.params))
        repeats = equation.params["length"] if equation.primitive.name == "scan" else 1
        if equation.primitive.name == "shard_map":
            repeats = _count_devices(equation.params)
        for subjaxpr in inner:
            yield from iterate_equations(subjaxpr, times * repeats)
        if not inner:
            yield equation, times


def count_product_flops(equation: Any) -> int | None:
    """Return the FLOPs of a matrix product or a convolution; None for any other equation."""
    match equation.primitive.name:
        case "dot_general":
            return _count_dot_flops(equation)
        case "ragged_dot_general" | "ragged_dot":
            return _count_ragged_dot_flops(equation)
        case "conv_general_dilated":
            return _count_convolution_flops(equation)
    return None


def _count_devices(options: Any) -> int:
    """Return the number of devices on which the body of a `shard_map` runs."""
    sizes = options["mesh"].shape
    axes = options.get("newly_manual_axes", options.get("manual_axes", sizes))  # the name has moved
    return math.prod(sizes[axis] for axis in axes)


def find_subjaxprs(options: Any) -> Iterator[Any]:
    """Yield the jaxprs that an equation calls, such as the jaxprs of jit, remat and custom VJPs."""
    for value in options.values():
        jaxprs = value if isinstance(value, tuple | list) else (value,)
        for jaxpr in jaxprs:
            if hasattr(getattr(jaxpr, "jaxpr", jaxpr), "eqns"):
                yield jaxpr


def _count_dot_flops(equation: Any) -> int:
    left, right = (x.aval for x in equation.invars[:2])
    (_, contracted), (_, batch) = equation.params["dimension_numbers"]
    return 2 * _get_complex_factor(equation) * left.size * _multiply_sizes_except(right.shape, (*contracted, *batch))


def _count_ragged_dot_flops(equation: Any) -> int:
    """Count each row times the matrix of its group, without the masked or padded products of a backend."""
    left, right = (x.aval for x in equation.invars[:2])
    numbers = equation.params["ragged_dot_dimension_numbers"]
    (_, contracted), (_, batch) = numbers.dot_dimension_numbers
    return (
        2
        * _get_complex_factor(equation)
        * left.size
        * _multiply_sizes_except(right.shape, (*contracted, *batch, *numbers.rhs_group_dimensions))
    )


def _count_convolution_flops(equation: Any) -> int:
    """Count, for each output element, the window times the input features of its group; padding counts as data."""
    kernel = equation.invars[1].aval.shape
    features = equation.params["dimension_numbers"].rhs_spec[0]
    return (
        2 * _get_complex_factor(equation) * equation.outvars[0].aval.size * _multiply_sizes_except(kernel, (features,))
    )


def _multiply_sizes_except(shape: tuple[int, ...], excluded: tuple[int, ...]) -> int:
    return math.prod(size for axis, size in enumerate(shape) if axis not in excluded)


def _get_complex_factor(equation: Any) -> int:
    if jnp.issubdtype(equation.outvars[0].aval.dtype, jnp.complexfloating):
        return 4
    return 1


def format_scope(equation: Any) -> str:
    """Format the name scopes that an equation was traced in."""
    stack = str(equation.source_info.name_stack)
    if not stack:
        return "outside any module"
    return f"in {stack}"

"""Work of one device in a step, counted in its jaxpr: products by dtype, main memory traffic, collectives by axis.

Inside `shard_map` shapes are local to one device, and every collective is in the jaxpr, with its mesh axes. Outside of
it XLA adds two kinds: gathers of arrays that a constraint replicates, which are counted, and sums of a few numbers, as
for a global norm, which are not. Operations that XLA removes do not count (`zoo.tools.plan.needed`,
`zoo.tools.plan.combining`).
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import Literal

from zoo.inspect.collectives import Collective
from zoo.inspect.operations import count_flops, count_product_flops, find_subjaxprs, is_kernel

from .combining import find_left_out
from .inlining import Equation, inline_calls
from .needed import NeededValues, is_needed
from .resharding import iterate_gathers

_KINDS = {
    **dict.fromkeys(("psum", "psum2", "psum_invariant", "pmax", "pmin"), "all-reduce"),
    **dict.fromkeys(("all_gather", "all_gather_invariant", "all_gather_reduced"), "all-gather"),
    **dict.fromkeys(("reduce_scatter", "unreduced_reduce_scatter"), "reduce-scatter"),
    "ppermute": "collective-permute",
    "all_to_all": "all-to-all",
    "ragged_all_to_all": "ragged-all-to-all",
}
"""HLO opcodes of the primitives that move data between devices."""


@dataclasses.dataclass(frozen=True)
class DeviceWork:
    """Work of one device in one step."""

    flops: dict[str, int]
    """FLOPs of products, by the dtype of their operands; `float32 highest` if six bfloat16 passes or IEEE products are
    requested."""
    product_bytes: int
    """Bytes of the operands and results of all products and kernels: main memory traffic without any cache."""
    collectives: tuple[Collective, ...]
    """By kind and axes, largest first. `arrays` equals `count`, before XLA combines several."""

    @property
    def total_flops(self) -> int:
        return sum(self.flops.values())


def count_work(jaxpr: Any, shape: Mapping[str, int], specs: Mapping[Any, Any] | None = None) -> DeviceWork:
    """Count the work of one device of a mesh of this shape, loop iterations included; a `while` loop counts once.

    `specs` has the partition specs of the jaxpr's inputs, for the gathers that XLA adds outside of `shard_map`.
    """
    flops: Counter[str] = Counter()
    sums: dict[tuple[str, tuple[str, ...]], list[int]] = {}
    moved = 0
    results = [True] * len(getattr(jaxpr, "jaxpr", jaxpr).outvars)
    for equation, times, local, left_out in _iterate_device_equations(jaxpr, results, NeededValues()):
        if (products := count_product_flops(equation)) is not None:
            share = 1 if local else math.prod(shape.values())
            flops[_find_precision(equation)] += products * times // share
            moved += times * sum(map(count_aval_bytes, (*equation.invars[:2], *equation.outvars))) // share
        elif is_kernel(equation):
            share = 1 if local else math.prod(shape.values())
            moved += times * sum(map(count_aval_bytes, (*equation.invars, *equation.outvars))) // share
        elif equation.name in _KINDS:
            axes = tuple(axis for axis in find_collective_axes(equation) if shape.get(axis, 1) > 1)
            if axes:
                axes = tuple(sorted(axes, key=list(shape).index))
                total = sums.setdefault((_KINDS[equation.name], axes), [0, 0])
                arrays = [max(pair) for pair in _pair_bytes(equation, left_out)]
                total[0] += times * len(arrays)
                total[1] += times * sum(arrays)
    for axes, size in iterate_gathers(inline_calls(jaxpr), specs or {}, shape):
        total = sums.setdefault(("all-gather", axes), [0, 0])
        total[0] += 1
        total[1] += size
    rows = [Collective(kind, axes, "", count, count, size) for (kind, axes), (count, size) in sums.items()]
    return DeviceWork(dict(flops), moved, tuple(sorted(rows, key=lambda row: (-row.bytes, row.kind, row.axes or ()))))


def count_aval_bytes(variable: Any) -> int:
    """Return the bytes of a variable's array; 0 if it is not an array, such as a key or a token."""
    aval = variable.aval
    try:
        return math.prod(aval.shape) * aval.dtype.itemsize
    except (AttributeError, TypeError):
        return 0


def find_collective_axes(equation: Any) -> tuple[str, ...]:
    """Return the mesh axes of a collective, an equation."""
    named = equation.params.get("axes", equation.params.get("axis_name"))
    if not isinstance(named, tuple | list):
        named = (named,)
    return tuple(axis for axis in named if isinstance(axis, str))


def _iterate_device_equations(
    jaxpr: Any, kept: Sequence[bool], values: NeededValues, times: int = 1, local: bool = False
) -> Iterator[tuple[Equation, int, bool, set[Any]]]:
    """Yield the innermost equations that the results in `kept` need, with how often a device runs each, True for those
    whose shapes are its own, and the results of collectives that a compiler leaves out."""
    flat, needed = values.find(jaxpr, kept)
    left_out = find_left_out(flat) | {x for equation in flat.eqns for x in equation.outvars if x not in needed}
    for equation in flat.eqns:
        if not is_needed(equation, needed):
            continue
        if is_kernel(equation):
            inner = []
        else:
            inner = list(find_subjaxprs(equation.params))
        repeats = equation.params["length"] if equation.name == "scan" else 1
        if equation.name == "cond":
            inner = [max(inner, key=lambda branch: count_flops(branch).total)]
        for subjaxpr in inner:
            results = values.find_results(equation, needed, subjaxpr)
            is_local = local or equation.name == "shard_map"
            yield from _iterate_device_equations(subjaxpr, results, values, times * repeats, is_local)
        if not inner:
            yield equation, times, local, left_out


def _pair_bytes(equation: Equation, left_out: set[Any]) -> Iterator[tuple[int, int]]:
    pairs = zip(equation.invars, equation.outvars, strict=False)
    for given, result in pairs:
        if not isinstance(given, Literal) and count_aval_bytes(given) and result not in left_out:
            yield count_aval_bytes(given), count_aval_bytes(result)


def _find_precision(equation: Any) -> str:
    """Return the dtype of a product's wider operand, and the requested precision."""
    dtype = max((x.aval.dtype for x in equation.invars[:2]), key=lambda dtype: dtype.itemsize)
    precision = equation.params.get("precision")
    highest = precision is not None and any("HIGHEST" in str(p) for p in jax.tree.leaves(precision))
    if dtype.name == "float32" and highest:
        return f"{dtype.name} highest"
    return dtype.name

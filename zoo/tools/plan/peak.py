"""Estimate the peak memory of a step from its jaxpr by liveness analysis.

An array is alive from the equation that makes it to the last one that reads it:

- An elementwise result with one reader, elementwise or a reduction, is fused into that reader: its operands stay alive
  instead.
- A reshape shares the memory of its operand.
- A loop has one buffer for each array that it carries, and writes rows of stacked results in place.
- An update of some elements, such as a scatter, is in place if no later equation reads the array.
- Outside of `shard_map` is the optimizer, where all elementwise results are fused. They overwrite donated arguments.

XLA also reorders, copies and pads, for each platform in its own way. `zoo plan --compile` asks it.
"""

import dataclasses
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from jax.extend.core import Literal

from zoo.inspect.operations import find_subjaxprs, is_kernel

from .inlining import ELEMENTWISE, VIEWS, Equation, FlatJaxpr, Scan, inline_calls
from .work import count_aval_bytes

_REDUCTIONS = frozenset(
    "argmax argmin dynamic_slice gather reduce_and reduce_max reduce_min reduce_or reduce_sum".split()
)
"""Primitives that compute an elementwise operand where they read it."""
_UPDATES = frozenset("dynamic_update_slice scatter scatter-add scatter_add".split())
"""Primitives that change some elements of their first operand."""


@dataclasses.dataclass(frozen=True)
class LiveArray:
    """An array of a device at the peak."""

    bytes: int
    shape: tuple[int, ...]
    """Sizes of one device's shard inside `shard_map`, of the whole array outside of it."""
    dtype: str
    primitive: str
    """The operation that made it, as JAX names it."""
    scope: str
    """The modules and transformations in which it was made."""


@dataclasses.dataclass(frozen=True)
class Peak:
    """Arrays that are in memory together when they take most."""

    arrays: tuple[LiveArray, ...] = ()

    @property
    def bytes(self) -> int:
        return sum(x.bytes for x in self.arrays)

    def __add__(self, other: "Peak") -> "Peak":
        return Peak(self.arrays + other.arrays)


def find_peak(jaxpr: Any, sizes: Sequence[int], *, in_place: bool = False) -> Peak:
    """Return the arrays of one device, besides the arguments of a step, at the time when they take most memory.

    - `jaxpr`: of the jitted step, with shapes of whole arrays outside of `shard_map`.
    - `sizes`: bytes per device of each of its inputs.
    - `in_place`: whether its results overwrite donated arguments.
    """
    flat = inline_calls(jaxpr)
    shares = {x: size / max(count_aval_bytes(x), 1) for x, size in zip(flat.invars, sizes, strict=True)}
    fuses_all = any(equation.name == "shard_map" for equation in flat.eqns)
    if in_place:
        return _Liveness(flat, shares, buffers=flat.invars, overwriting=flat.outvars, fuses_all=fuses_all).measure()
    return _Liveness(flat, shares, fuses_all=fuses_all).measure()


class _Liveness:
    """The lives of the arrays of a jaxpr."""

    def __init__(
        self,
        flat: FlatJaxpr,
        shares: Mapping[Any, float],
        *,
        buffers: Iterable[Any] = (),
        overwriting: Iterable[Any] = (),
        rows: Iterable[Any] = (),
        fuses_all: bool = False,
    ):
        """Find the memory that each value keeps alive, and until when.

        - `shares`: the part of each input that a device holds, where shapes are of whole arrays.
        - `buffers`: inputs that may be overwritten, by the results `overwriting`.
        - `rows`: results that are written into stacks, which have their memory.
        - `fuses_all`: fuse elementwise results with any number of readers.
        """
        self.flat = flat
        self.shares = _find_shares(flat, shares)
        self.makers = {x: equation for equation in flat.eqns for x in equation.outvars}
        self.roots = self._find_roots({*buffers, *self.makers}, _drop_literals(overwriting), fuses_all)
        rows = _drop_literals(rows)
        self.written = {root for x in rows for root in self.roots[x] if self.roots[x] == {root}} - set(flat.invars)
        self.ends = self._find_ends(_drop_literals(flat.outvars) - rows)

    def measure(self, owned: Iterable[Any] = ()) -> Peak:
        """Return the arrays at the peak, with the results and the inputs `owned`, which end with their last reader."""
        ending = defaultdict(list)
        for x, index in self.ends.items():
            ending[index].append(x)
        alive = {x: self.count(x) for x in owned}
        peak = self._describe(alive)
        for index, equation in enumerate(self.flat.eqns):
            for x in self._find_carried(equation, ending[index]):
                alive.pop(x, None)  # the loop has it
            inners = () if is_kernel(equation) else find_subjaxprs(equation.params)
            for inner in inners:
                during = self._describe(alive) + self._measure_call(equation, inner)
                peak = max(peak, during, key=lambda peak: peak.bytes)
            made = [x for x in equation.outvars if self.roots[x] == {x}]
            alive.update((x, self.count(x)) for x in made)
            if sum(alive.values()) > peak.bytes:
                peak = self._describe(alive)
            for x in [*ending[index], *(x for x in made if x not in self.ends)]:
                alive.pop(x, None)
        return peak

    def count(self, x: Any) -> int:
        """Count the bytes of a device's part of an array; 0 for a row that is written into a stack."""
        if x in self.written:
            return 0
        return round(count_aval_bytes(x) * self.shares.get(x, 1.0))

    def _describe(self, alive: Mapping[Any, int]) -> Peak:
        arrays = []
        for x, size in alive.items():
            maker = self.makers.get(x)
            if maker is None:
                primitive = "argument"
                scope = ""
            else:
                primitive = maker.name
                scope = maker.scope
            arrays.append(LiveArray(size, x.aval.shape, str(x.aval.dtype), primitive, scope))
        return Peak(tuple(arrays))

    def _measure_call(self, equation: Equation, jaxpr: Any) -> Peak:
        """Return the arrays at the peak of an inner jaxpr, with the results of its equation."""
        flat = inline_calls(jaxpr, equation.scope)
        if equation.name == "shard_map":  # shapes within are of one device
            return _Liveness(flat, {}).measure()
        operands = equation.invars[len(equation.invars) - len(flat.invars) :]
        pairs = zip(flat.invars, operands, strict=False)
        shares = {x: self.shares.get(operand, 1.0) for x, operand in pairs if not isinstance(operand, Literal)}
        if equation.name != "scan":
            return _Liveness(flat, shares).measure()
        scan = Scan.of(equation)
        carry = flat.invars[scan.consts : scan.first_row]
        new_carry = flat.outvars[: scan.carries]
        body = _Liveness(flat, shares, buffers=carry, overwriting=new_carry, rows=flat.outvars[scan.carries :])
        stacks = self._describe({x: self.count(x) for x in equation.outvars[scan.carries :]})
        return stacks + body.measure(carry)

    def _find_carried(self, equation: Equation, ends: Collection[Any]) -> set[Any]:
        """Return the arrays that end with a loop which takes them over as its carry."""
        if equation.name != "scan":
            return set()
        scan = Scan.of(equation)
        carry = _drop_literals(equation.invars[scan.consts : scan.first_row])
        return {root for x in carry for root in self.roots[x] if self.roots[x] == {root} and root in ends}

    def _find_roots(self, buffers: set[Any], overwriting: set[Any], fuses_all: bool) -> dict[Any, frozenset]:
        """Return for each value the arrays that it keeps in memory: itself, or the arrays that it is computed from."""
        readers = defaultdict(list)
        for equation in self.flat.eqns:
            for x in set(equation.operands):
                readers[x].append(equation)
        results = _drop_literals(self.flat.outvars)
        roots: dict[Any, frozenset] = {x: frozenset([x]) for x in self.flat.invars}
        for equation in self.flat.eqns:
            operands = frozenset().union(*(roots.get(x, ()) for x in equation.operands))
            for x in equation.outvars:
                is_temporary = x not in results and (fuses_all or _is_fused_into(readers[x]))
                needs_no_memory = is_temporary or x in overwriting
                is_fused = equation.name in ELEMENTWISE and needs_no_memory and not self._is_gathered(equation)
                roots[x] = operands if is_fused or equation.name in VIEWS else frozenset([x])
            changed = equation.invars[0] if equation.name in _UPDATES else None
            if changed in buffers and changed not in results and readers[changed][-1] is equation:
                roots[equation.outvars[0]] = roots[changed]
        return roots

    def _is_gathered(self, equation: Equation) -> bool:
        """Return True where a device receives more of an array than it holds."""
        if equation.name != "sharding_constraint":
            return False
        return self.shares[equation.outvars[0]] > self.shares.get(equation.invars[0], 1.0)

    def _find_ends(self, results: Collection[Any]) -> dict[Any, int]:
        """Return for each array the position of the last equation that needs it."""
        ends: dict[Any, int] = {}
        for index, equation in enumerate(self.flat.eqns):
            for x in equation.operands:
                ends.update(dict.fromkeys(self.roots.get(x, ()), index))
        for x in results:
            ends.update(dict.fromkeys(self.roots[x], len(self.flat.eqns)))
        return ends


def _is_fused_into(readers: Sequence[Equation]) -> bool:
    """Return True for one reader that computes an elementwise operand itself."""
    return len(readers) == 1 and readers[0].name in ELEMENTWISE | VIEWS | _REDUCTIONS


def _drop_literals(values: Iterable[Any]) -> set[Any]:
    return {x for x in values if not isinstance(x, Literal)}


def _find_shares(flat: FlatJaxpr, given: Mapping[Any, float]) -> dict[Any, float]:
    """Return the part of each value that a device holds: from `shard_map` by the shapes within, from a sharding
    constraint by its spec, otherwise the part of the operands that are as large."""
    shares = dict(given)
    for equation in flat.eqns:
        for number, x in enumerate(equation.outvars):
            if equation.name == "shard_map":
                inner = getattr(equation.params["jaxpr"], "jaxpr", equation.params["jaxpr"])
                shares[x] = count_aval_bytes(inner.outvars[number]) / max(count_aval_bytes(x), 1)
            elif equation.name == "sharding_constraint":
                local = equation.params["sharding"].shard_shape(x.aval.shape)
                shares[x] = math.prod(local) / max(x.aval.size, 1)
            else:
                size = count_aval_bytes(x)
                as_large = (shares.get(y, 1.0) for y in equation.operands if count_aval_bytes(y) >= size)
                shares[x] = min(as_large, default=1.0)
    return shares

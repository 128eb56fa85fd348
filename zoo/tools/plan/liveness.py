"""Peak memory of a step by liveness analysis of its jaxpr, before any compiler has seen it.

An array lives from the equation that makes it to the last one that reads it. Of what XLA does, this follows:

- results of elementwise operations are fused into their readers, and keep alive what they are made of;
- reshapes are the array that they reshape, and equal residuals of a loop are one;
- a loop has one buffer for its carry, in which it adds up, and writes stacked results in place;
- sums over devices, and donated arguments, are updated in place;
- order, copies and padding of each compiler, as `compilers.py` describes them.

It does not know the order that XLA schedules in beyond that, nor buffers of collectives.
"""

import dataclasses
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from jax.extend.core import Literal

from zoo.inspect.operations import find_subjaxprs
from zoo.ops.platform import Platform

from .compilers import RULES, CompilerRules
from .copies import copy_rows, copy_stacks, find_copies_for_loops, find_initial_constants, find_whole_sums
from .fusion import IN_PLACE, count_partial_sums, find_roots
from .inlining import ELEMENTWISE, Equation, FlatJaxpr, Scan, inline_calls, name_values
from .peeling import find_pipelined
from .scheduling import order_as_compiled
from .work import count_aval_bytes

_SUMS_IN_PLACE = frozenset("psum psum2 psum_invariant".split())
_LAYOUT_TILE = 8, 128


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

    bytes: int = 0
    arrays: tuple[LiveArray, ...] = ()

    def __add__(self, other: "Peak") -> "Peak":
        return Peak(self.bytes + other.bytes, self.arrays + other.arrays)


def find_peak(jaxpr: Any, sizes: Sequence[int], *, platform: Platform = "cpu", in_place: bool = False) -> Peak:
    """Return the arrays that one device has beside the arguments of a step, when they take most.

    - `jaxpr`: that of the jitted step, whose shapes are of whole arrays outside of `shard_map`.
    - `sizes`: bytes per device of each of its inputs.
    - `platform`: that of the compiler.
    - `in_place`: whether its results take the place of donated arguments.
    """
    inner = getattr(jaxpr, "jaxpr", jaxpr)
    pairs = zip(inner.invars, sizes, strict=True)
    shares = {variable: size / max(count_aval_bytes(variable), 1) for variable, size in pairs}
    return _Analysis(RULES[platform], shares).measure(inline_calls(inner), (), in_place=in_place)


class _Analysis:
    """Liveness of jaxprs whose variables may be of whole arrays: `shares` has the part of each that a device holds, or
    is None inside `shard_map`, where shapes are of one device."""

    def __init__(
        self, rules: CompilerRules, shares: dict[Any, float] | None = None, *, invariant: Collection[Any] = ()
    ):
        """`invariant` are the inputs of a loop's body that are the same in each iteration."""
        self.rules = rules
        self.shares = shares
        self.invariant = set(invariant)
        self.makers: dict[Any, Equation] = {}
        self.partial_sums: dict[Any, int] = {}

    def count(self, variable: Any) -> int:
        if isinstance(variable, Literal):
            return 0
        return self.partial_sums[variable] if variable in self.partial_sums else self.count_whole(variable)

    def count_whole(self, variable: Any) -> int:
        """Count the bytes of an array, which for a product may be made of several partial sums."""
        if self.shares is not None:
            return round(count_aval_bytes(variable) * self.shares.get(variable, 1.0))
        return _count_padded_bytes(variable) if self.rules.pads else count_aval_bytes(variable)

    def measure(
        self, flat: FlatJaxpr, owned: Iterable[Any], *, carry: Mapping[Any, Any] | None = None, in_place: bool = False
    ) -> Peak:
        """Return the peak of a jaxpr, its results and the `owned` among its inputs included.

        Owned inputs are freed after their last use. `carry` has for each carried result of a loop's body the input
        whose place it takes. With `in_place`, elementwise results overwrite arguments.
        """
        flat = order_as_compiled(flat, self.rules) if self.shares is None else flat
        for equation in flat.eqns:
            self._share_outputs(equation)
        self.partial_sums = count_partial_sums(flat, self.rules)
        roots = find_roots(flat, self.rules, self.count, in_place=in_place)
        last = self._find_last_uses(flat, roots)
        copies = find_copies_for_loops(flat, roots, last) if self.rules.copies_for_loops else {}
        live = {variable: self.count(variable) for variable in owned} | self._make_early(flat, roots)
        dying: dict[int, list[Any]] = {}
        for variable, index in [*last.items(), *(copy for found in copies.values() for copy in found)]:
            dying.setdefault(index, []).append(variable)
        total = sum(live.values())
        peak = self.describe(live)
        for index, equation in enumerate(flat.eqns):
            self.makers.update((x, equation) for x in equation.outvars)
            ends = {variable for variable in dying.get(index, ()) if variable in live}
            made = [x for x in equation.outvars if roots.get(x) == frozenset([x])]
            if inner := list(find_subjaxprs(equation.params)):
                taken = {root: x for x in equation.operands for root in roots.get(x, ()) if _is_view(x, root, ends)}
                found = [self._measure_call(equation, getattr(x, "jaxpr", x), taken) for x in inner]
                extra = max(found, key=lambda peak: peak.bytes)
                if total - sum(live[x] for x in taken) + extra.bytes > peak.bytes:
                    peak = self.describe({x: size for x, size in live.items() if x not in taken}) + extra
            copied = [copy for x in made for copy, _ in copies.get(x, ())]
            self.makers.update(dict.fromkeys(copied, equation))
            for variable in [*made, *copied]:
                if variable not in live:
                    live[variable] = self.count(variable)
                    total += live[variable]
            reused = self._reuse(equation, made, ends, carry or {})
            if not inner and total - sum(live[x] for x in reused) > peak.bytes:  # that of a call has its results
                peak = self.describe({x: size for x, size in live.items() if x not in reused})
            for variable in ends.union(x for x in made if last.get(x, index) <= index):
                total -= live.pop(variable)
        return peak

    def _make_early(self, flat: FlatJaxpr, roots: Mapping[Any, frozenset]) -> dict[Any, int]:
        """Return the arrays that a compiler makes before the first equation."""
        early: dict[Any, int] = {}
        if self.rules.early_zeros:
            for x, maker in find_initial_constants(flat, roots):
                early[x], self.makers[x] = self.count(x), maker
        inputs, copies = set(flat.invars), {}
        for loop in flat.eqns:
            if loop.name == "scan" and (self.rules.transposes_gathered or self.rules.casts_before_loops):
                body = inline_calls(loop.params["jaxpr"], loop.scope)
                found = copy_stacks(loop, body, self.rules, self.invariant)
                copies = {x: copy for x, copy in found.items() if x in inputs} | copies
        for stacked, (copy, ratio) in copies.items():
            early[copy.outvars[0]] = round(self.count(stacked) * ratio)
            self.makers[copy.outvars[0]] = copy
        return early

    def _reuse(
        self, equation: Equation, made: Sequence[Any], ends: Collection[Any], carry: Mapping[Any, Any]
    ) -> list[Any]:
        """Return the array whose place the result of an equation takes: one that ends, of the size of its result, if
        the equation changes it, sums it over devices or adds to the carry of a loop.

        Other elementwise results could take the place of an operand too. It is not assumed: compilers do so for fewer
        than the trace would allow.
        """
        if not made:
            return []
        if equation.name in IN_PLACE or equation.name in _SUMS_IN_PLACE:
            return [x for x in ends if self.count(x) == self.count(made[0])][:1]
        carried = carry.get(made[0])
        return [carried] if equation.name in ELEMENTWISE and carried in ends else []

    def describe(self, live: Mapping[Any, int]) -> Peak:
        """Return the arrays of these variables."""
        arrays = []
        for variable, size in live.items():
            maker = self.makers.get(variable)
            primitive, scope = (maker.name, maker.scope) if maker else ("argument", "")
            arrays.append(LiveArray(size, variable.aval.shape, str(variable.aval.dtype), primitive, scope))
        return Peak(sum(live.values()), tuple(arrays))

    def _find_last_uses(self, flat: FlatJaxpr, roots: dict[Any, frozenset]) -> dict[Any, int]:
        """Return for each array the index of the last equation that needs it."""
        for equation in flat.eqns:
            if equation.name == "scan":
                roots.update((x, frozenset([first])) for x, first in _match_repeats(equation))
        last: dict[Any, int] = {}
        for index, equation in enumerate(flat.eqns):
            for x in equation.operands:
                last.update(dict.fromkeys(roots.get(x, ()), index))
        for x in flat.outvars:
            if not isinstance(x, Literal):
                last.update(dict.fromkeys(roots[x], len(flat.eqns)))
        return last

    def _share_outputs(self, equation: Equation) -> None:
        """Record which part of its results a device holds: of `shard_map` as the shapes within say, of a sharding
        constraint as it says, of others that of the operand of their size."""
        if self.shares is None:
            return
        if equation.name == "shard_map":
            inner = getattr(equation.params["jaxpr"], "jaxpr", equation.params["jaxpr"])
            for x, local in zip(equation.outvars, inner.outvars, strict=True):
                self.shares[x] = count_aval_bytes(local) / max(count_aval_bytes(x), 1)
            return
        if equation.name == "sharding_constraint":
            (x,) = equation.outvars
            local = equation.params["sharding"].shard_shape(x.aval.shape)
            self.shares[x] = math.prod(local) / max(x.aval.size, 1)
            return
        known = [(count_aval_bytes(x), self.shares[x]) for x in equation.operands if x in self.shares]
        for x in equation.outvars:
            share = min((share for size, share in known if size >= count_aval_bytes(x)), default=1.0)
            self.shares.setdefault(x, share)

    def _measure_call(self, equation: Equation, inner: Any, taken: Mapping[Any, Any]) -> Peak:
        """Return the peak of an equation with an inner jaxpr, its results and the arrays `taken` included, which are
        the operands that it reads last."""
        if equation.name == "scan":
            return self._measure_scan(equation, inner, taken)
        if equation.name == "pallas_call":  # its body is of blocks on the chip
            return self.describe({x: self.count(x) for x in (*taken, *equation.outvars)})
        operands = equation.invars[len(equation.invars) - len(inner.invars) :]
        given = set(map(id, taken.values()))
        owned = [x for operand, x in zip(operands, inner.invars, strict=False) if id(operand) in given]
        flat = inline_calls(inner, equation.scope)
        if equation.name == "shard_map" or self.shares is None:
            return _Analysis(self.rules).measure(flat, owned)
        pairs = zip(operands, inner.invars, strict=False)
        shares = {x: self.shares.get(operand, 1.0) for operand, x in pairs if not isinstance(operand, Literal)}
        return _Analysis(self.rules, shares).measure(flat, owned)

    def _measure_scan(self, equation: Equation, inner: Any, taken: Mapping[Any, Any]) -> Peak:
        """Stacked results are whole from the first iteration on; a row of them is written where it belongs."""
        scan = Scan.of(equation)
        carry = equation.invars[scan.consts : scan.first_row]
        stacked = {x: self.count(x) for x, first in _match_repeats(equation) if x is first}
        flat = inline_calls(inner, equation.scope)
        flat = copy_rows(flat, scan.first_row) if self.rules.copies_rows else flat
        carried_in = inner.invars[scan.consts : scan.first_row]
        places = {x: given for x, given in zip(flat.outvars, carried_in, strict=False) if not isinstance(x, Literal)}
        analysis = _Analysis(self.rules, None if self.shares is None else {}, invariant=inner.invars[: scan.consts])
        body = analysis.measure(flat, carried_in, carry=places)
        rows = sum(analysis.count_whole(x) for x in flat.outvars[scan.carries :] if not isinstance(x, Literal))
        carried = set(map(id, carry))
        kept = {root: self.count(root) for root, x in taken.items() if id(x) not in carried}
        at_rest = self.describe({x: self.count(x) for x in carry if not isinstance(x, Literal)})
        inside = Peak(body.bytes - rows, body.arrays) + analysis.describe(self._find_carried(equation, flat))
        return self.describe({**stacked, **kept}) + max(inside, at_rest, key=lambda peak: peak.bytes)

    def _find_carried(self, loop: Equation, body: FlatJaxpr) -> dict[Any, int]:
        """Return what a compiled loop carries beside the carry of the trace, which is yet to be scattered."""
        if self.rules.scatters_after_loops:
            return {x: self.count(x) - self.count(y) for x, y in find_whole_sums(loop, body)}
        if not loop.params.get("is_pipelined"):
            return {}
        pipelined = find_pipelined(body, Scan.of(loop).carries)
        return {x: self.count(x) for equation in pipelined for x in equation.operands}


def _is_view(x: Any, root: Any, arrays: Collection[Any]) -> bool:
    """Return True if a variable is one of these arrays, or another shape of it."""
    return root in arrays and x.aval.size == root.aval.size and x.aval.dtype == root.aval.dtype


def _match_repeats(scan: Equation) -> list[tuple[Any, Any]]:
    """Return each stacked result of a scan with the first one that is equal to it."""
    flat, carries = inline_calls(scan.params["jaxpr"]), Scan.of(scan).carries
    names, first = name_values(flat), {}
    rows = zip(flat.outvars[carries:], scan.outvars[carries:], strict=True)
    return [(x, first.setdefault(names.get(id(row), id(row)), x)) for row, x in rows]


def _count_padded_bytes(variable: Any) -> int:
    """Return the bytes of an array whose last two dims, but for those of size 1, are padded to tiles of 8 x 128."""
    size, shape = count_aval_bytes(variable), [x for x in getattr(variable.aval, "shape", ()) if x != 1]
    if len(shape) < 2 or not size:
        return size
    (rows, columns), (tile_rows, tile_columns) = shape[-2:], _LAYOUT_TILE
    padded = -(-rows // tile_rows) * tile_rows * -(-columns // tile_columns) * tile_columns
    return size // (rows * columns) * padded

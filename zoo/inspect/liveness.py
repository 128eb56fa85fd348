"""Peak memory of a step by liveness analysis of its jaxpr, before any compiler has seen it.

An array lives from the equation that makes it to the last one that reads it. Of what XLA does, this follows:

- results of elementwise operations are fused into their readers, and keep alive what they are made of;
- reshapes are the array that they reshape, and equal residuals of a loop are one;
- a loop has one buffer for its carry, writes stacked results in place, and reads slices of its inputs where they lie;
- donated arguments are updated in place.

It does not know the order that XLA schedules in, copies for layouts, nor buffers of collectives.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from jax.extend.core import Literal

from .operations import find_subjaxprs
from .work import count_aval_bytes

_VIEWS = frozenset(
    """
    copy copy_p drop_varying expand_dims name optimization_barrier pbroadcast pvary reshape squeeze stop_gradient
    """.split()
)
"""Primitives whose result is their operand, in other words."""

_ELEMENTWISE = frozenset(
    """
    abs add add_any and atan2 bitcast_convert_type broadcast_in_dim cbrt ceil clamp convert_element_type cos div eq erf
    erf_inv exp exp2 expm1 floor ge gt integer_pow iota is_finite le log log1p logistic lt max min mul ne neg not or pad
    pow real reduce_precision rem rev round rsqrt select_n sharding_constraint shift_left shift_right_logical sign sin
    slice split sqrt square sub tan tanh transpose xor
    """.split()
)
_FUSING_READERS = (
    _ELEMENTWISE | _VIEWS | {"dot_general", "reduce_sum", "reduce_max", "argmax", "reduce_and", "reduce_or"}
)
"""Primitives into which XLA fuses an elementwise operand."""


def count_peak_bytes(jaxpr: Any, sizes: Sequence[int], *, in_place: bool = False) -> int:
    """Return the largest number of bytes that the arrays of one device take beside the arguments of a step.

    - `jaxpr`: that of the jitted step, whose shapes are of whole arrays outside of `shard_map`.
    - `sizes`: bytes per device of each of its inputs.
    - `in_place`: whether its results take the place of donated arguments.
    """
    inner = getattr(jaxpr, "jaxpr", jaxpr)
    pairs = zip(inner.invars, sizes, strict=True)
    analysis = _Analysis({variable: size / max(count_aval_bytes(variable), 1) for variable, size in pairs})
    return analysis.measure(inner, (), in_place=in_place)


class _Analysis:
    """Liveness of jaxprs whose variables may be of whole arrays: `shares` has the part of each that a device holds, or
    is None inside `shard_map`, where shapes are of one device."""

    def __init__(self, shares: dict[Any, float] | None = None):
        self.shares = shares

    def count(self, variable: Any) -> int:
        if isinstance(variable, Literal):
            return 0
        share = 1.0 if self.shares is None else self.shares.get(variable, 1.0)
        return round(count_aval_bytes(variable) * share)

    def measure(self, jaxpr: Any, owned: Iterable[Any], *, in_place: bool = False) -> int:
        """Return the peak of a jaxpr, its results and the `owned` among its inputs included.

        Owned inputs are freed after their last use. With `in_place`, elementwise results overwrite arguments.
        """
        roots, last = self._find_lifetimes(jaxpr, in_place)
        live = {variable: self.count(variable) for variable in owned}
        dying: dict[int, list[Any]] = {}
        for variable, index in last.items():
            dying.setdefault(index, []).append(variable)
        total = peak = sum(live.values())
        for index, equation in enumerate(jaxpr.eqns):
            ends = {variable for variable in dying.get(index, ()) if variable in live}
            made = [x for x in equation.outvars if roots.get(x) == frozenset([x])]
            if inner := list(find_subjaxprs(equation.params)):
                taken = ends.intersection(x for x in equation.invars if not isinstance(x, Literal))
                extra = max(self._measure_call(equation, getattr(x, "jaxpr", x), taken) for x in inner)
                peak = max(peak, total - sum(live[x] for x in taken) + extra)
            for variable in made:
                live[variable] = self.count(variable)
                total += live[variable]
            peak = max(peak, total)
            for variable in ends.union(x for x in made if last.get(x, index) <= index):
                total -= live.pop(variable)
        return peak

    def _find_lifetimes(self, jaxpr: Any, in_place: bool) -> tuple[dict[Any, frozenset], dict[Any, int]]:
        """Return for each variable the arrays in memory that it is made of: itself, or those that its fused operation
        reads; and for each array the index of the last equation that needs it."""
        readers: dict[Any, list[str]] = {}
        for equation in jaxpr.eqns:
            for x in {x for x in equation.invars if not isinstance(x, Literal)}:
                readers.setdefault(x, []).append(equation.primitive.name)
        results = Counter(x for x in jaxpr.outvars if not isinstance(x, Literal))
        roots = {x: frozenset([x]) for x in (*jaxpr.invars, *jaxpr.constvars)}
        for equation in jaxpr.eqns:
            self._share_outputs(equation)
            name = equation.primitive.name
            made_of = frozenset().union(*(roots.get(x, ()) for x in equation.invars if not isinstance(x, Literal)))
            for x in equation.outvars:
                uses = readers.get(x, [])
                is_fused = name in _ELEMENTWISE and (len(uses) <= 1 or len(made_of) <= 1)
                is_fused = is_fused and (in_place or x not in results) and _FUSING_READERS.issuperset(uses)
                roots[x] = made_of if is_fused or name in _VIEWS else frozenset([x])
            if name == "scan":
                roots.update((x, frozenset([first])) for x, first in _match_repeats(equation))
        last: dict[Any, int] = {}
        for index, equation in enumerate(jaxpr.eqns):
            for x in equation.invars:
                if not isinstance(x, Literal):
                    last.update(dict.fromkeys(roots.get(x, ()), index))
        for x in results:
            last.update(dict.fromkeys(roots[x], len(jaxpr.eqns)))
        return roots, last

    def _share_outputs(self, equation: Any) -> None:
        """Record which part of its results a device holds: of `shard_map` as the shapes within say, of others that of
        the operand of their size."""
        if self.shares is None:
            return
        if equation.primitive.name == "shard_map":
            inner = getattr(equation.params["jaxpr"], "jaxpr", equation.params["jaxpr"])
            for x, local in zip(equation.outvars, inner.outvars, strict=True):
                self.shares[x] = count_aval_bytes(local) / max(count_aval_bytes(x), 1)
            return
        operands = [x for x in equation.invars if not isinstance(x, Literal) and x in self.shares]
        known = [(count_aval_bytes(x), self.shares[x]) for x in operands]
        for x in equation.outvars:
            share = min((share for size, share in known if size >= count_aval_bytes(x)), default=1.0)
            self.shares.setdefault(x, share)

    def _measure_call(self, equation: Any, inner: Any, taken: Iterable[Any]) -> int:
        """Return the peak of an equation with an inner jaxpr, its results and the operands `taken` included."""
        name = equation.primitive.name
        if name == "scan":
            return self._measure_scan(equation, inner, taken)
        if name == "pallas_call":  # its body is of blocks on the chip
            return sum(map(self.count, (*taken, *equation.outvars)))
        operands = equation.invars[len(equation.invars) - len(inner.invars) :]
        owned = [x for operand, x in zip(operands, inner.invars, strict=False) if any(operand is y for y in taken)]
        if name == "shard_map" or self.shares is None:
            return _Analysis().measure(inner, owned)
        pairs = zip(operands, inner.invars, strict=False)
        shares = {x: self.shares.get(operand, 1.0) for operand, x in pairs if not isinstance(operand, Literal)}
        return _Analysis(shares).measure(inner, owned)

    def _measure_scan(self, equation: Any, inner: Any, taken: Iterable[Any]) -> int:
        """Stacked results are whole from the first iteration on; a row of them is written where it belongs."""
        consts, carries = equation.params["num_consts"], equation.params["num_carry"]
        carry = equation.invars[consts : consts + carries]
        stacked = sum(self.count(x) for x, first in _match_repeats(equation) if x is first)
        body = _Analysis(None if self.shares is None else {}).measure(inner, inner.invars[consts : consts + carries])
        rows = sum(map(count_aval_bytes, inner.outvars[carries:]))
        kept = sum(self.count(x) for x in taken if not any(x is y for y in carry))
        return stacked + kept + max(body - rows, sum(map(self.count, carry)))


def _name_values(jaxpr: Any) -> dict[int, Any]:
    """Return a name for the value of each variable, by its id: one for all that are equal, as XLA finds, which keeps
    each once."""
    names: dict[int, Any] = {}
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        operands = tuple(str(x.val) if isinstance(x, Literal) else names.get(id(x), id(x)) for x in equation.invars)
        if name in _VIEWS and len(operands) == 1:
            names[id(equation.outvars[0])] = operands[0]
        elif name in _ELEMENTWISE and len(equation.outvars) == 1:
            options = str(sorted(equation.params.items(), key=lambda item: item[0]))
            names[id(equation.outvars[0])] = hash((name, operands, options))
    return names


def _match_repeats(scan: Any) -> list[tuple[Any, Any]]:
    """Return each stacked result of a scan with the first one that is equal to it."""
    inner, carries = scan.params["jaxpr"].jaxpr, scan.params["num_carry"]
    names, first = _name_values(inner), {}
    rows = zip(inner.outvars[carries:], scan.outvars[carries:], strict=True)
    return [(x, first.setdefault(names.get(id(row), id(row)), x)) for row, x in rows]

"""The arrays that a compiler keeps in memory: values of a jaxpr that no kernel computes where it reads them."""

import math
from collections.abc import Callable
from typing import Any

from jax.extend.core import Literal

from .compilers import CompilerRules
from .inlining import ELEMENTWISE, VIEWS, Equation, FlatJaxpr, name_values

_REDUCTIONS = frozenset("argmax argmin reduce_and reduce_max reduce_min reduce_or reduce_sum".split())
IN_PLACE = frozenset("dynamic_update_slice scatter scatter-add scatter_add".split())
"""Primitives that change some elements of their first operand."""
_PICKS = frozenset(("gather", "dynamic_slice"))
"""Primitives that compute of an operand only the elements that they pick."""
_LAYOUT = frozenset("broadcast_in_dim convert_element_type slice transpose".split())
"""Elementwise primitives that a GPU's kernel of products applies to what it loads."""


_TILE, _LEAST_DEPTH = 128 * 128, 256


def count_partial_sums(flat: FlatJaxpr, rules: CompilerRules) -> dict[Any, int]:
    """Return for each result of a matrix product that is split into partial sums the bytes of these.

    Products that share an operand, as those of queries, keys and values, are one product.
    """
    products = [equation for equation in flat.eqns if rules.tiles and equation.name == "dot_general"]
    if not products:
        return {}
    names = name_values(flat)
    merged: dict[Any, int] = {}
    for equation in products:
        for key in _name_sides(equation, names):
            merged[key] = merged.get(key, 0) + equation.outvars[0].aval.size
    found = {}
    for equation in products:
        (contracted, _), (batch, _) = equation.params["dimension_numbers"]
        results = max(merged[key] for key in _name_sides(equation, names))
        depth = math.prod(equation.invars[0].aval.shape[dim] for dim in contracted)
        splits = min(rules.tiles * _TILE // results, depth // _LEAST_DEPTH)
        if splits > 1 and not batch:
            found[equation.outvars[0]] = 4 * 2 ** (splits.bit_length() - 1) * equation.outvars[0].aval.size
    return found


def _name_sides(equation: Equation, names: dict[int, Any]) -> list[tuple]:
    """Name each operand of a product, with the dims that it contracts: equal for products that can be one."""
    contracted = equation.params["dimension_numbers"][0]
    return [(names.get(id(x), id(x)), side, contracted[side]) for side, x in enumerate(equation.invars)]


def find_roots(
    flat: FlatJaxpr, rules: CompilerRules, count: Callable[[Any], int], *, in_place: bool = False
) -> dict[Any, frozenset]:
    """Return for each variable the arrays in memory that it is made of: itself, or those that its fused operation
    reads.

    An elementwise result is fused into its readers, which compute it again each, if that moves no more bytes than
    writing it once and reading it from each. With `in_place`, so is one that is a result of the jaxpr.
    """
    readers, results = find_readers(flat)
    roots: dict[Any, frozenset] = {x: frozenset([x]) for x in flat.invars}
    for equation in flat.eqns:
        made_of = frozenset().union(*(roots.get(x, ()) for x in equation.operands))
        for x in equation.outvars:
            uses = readers.get(x, [])
            is_fused = equation.name in ELEMENTWISE and (in_place or x not in results)
            is_fused = is_fused and all(_can_fuse(equation, reader, made_of, rules) for reader in uses)
            is_fused = is_fused and not _is_gathered(equation, count)
            if is_fused and len(uses) > 1:
                kept = count(x)
                again = sum(min(count(root), kept * _get_width(root) // _get_width(x)) for root in made_of)
                is_fused = (len(uses) - 1) * again <= (len(uses) + 1) * kept
            roots[x] = made_of if is_fused or equation.name in VIEWS else frozenset([x])
    return roots


def find_readers(flat: FlatJaxpr) -> tuple[dict[Any, list[Equation]], set[Any]]:
    """Return the equations that read each variable, or a view of it, and the variables that are results or have a view
    that is one."""
    readers: dict[Any, list[Equation]] = {}
    results = {x for x in flat.outvars if not isinstance(x, Literal)}
    for equation in reversed(flat.eqns):
        is_view = equation.name in VIEWS and len(equation.outvars) == 1
        for x in set(equation.operands):
            found = readers.setdefault(x, [])
            found += readers.get(equation.outvars[0], []) if is_view else [equation]
            if is_view and equation.outvars[0] in results:
                results.add(x)
    return readers, results


def _can_fuse(equation: Equation, reader: Equation, made_of: frozenset, rules: CompilerRules) -> bool:
    if reader.name in ("dot_general", "conv_general_dilated"):
        return rules.arithmetic_into_products or (equation.name in _LAYOUT and len(made_of) <= 1)
    return any(reader.name in names for names in (ELEMENTWISE, VIEWS, _REDUCTIONS, _PICKS))


def _is_gathered(equation: Equation, count: Callable[[Any], int]) -> bool:
    """Return True where a device gets more of an array than it has."""
    return equation.name == "sharding_constraint" and count(equation.outvars[0]) > count(equation.invars[0])


def _get_width(x: Any) -> int:
    """Return the bytes of an element."""
    return getattr(getattr(x.aval, "dtype", None), "itemsize", 1)

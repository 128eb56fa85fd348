"""Dtypes of a step: the precision of every matrix product, and of every sum."""

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from zoo.parallel.mesh import is_array_or_shape

from . import lowering
from .operations import count_product_flops, format_scope, iterate_equations

_SUMS = {
    **dict.fromkeys(("reduce_sum", "reduce_window_sum", "cumsum", "cumlogsumexp"), "sum"),
    **dict.fromkeys(("psum", "psum_invariant", "psum2", "reduce_scatter"), "sum over devices"),
    **dict.fromkeys(("scatter-add", "scatter_add"), "scatter-add"),
}
_MAX_SCOPES = 6


@dataclasses.dataclass(frozen=True)
class DtypeGroup:
    """Operations of a step with the same dtypes."""

    kind: str
    """`product`, `sum`, `sum over devices` or `scatter-add`."""
    operands: str
    """Dtypes of the operands: `bfloat16 x bfloat16`."""
    result: str
    """Dtype of the result: sums accumulate in it; matrix units round to it once."""
    count: int
    """Operations in the program; each may run often."""
    flops: int
    """FLOPs of matrix products, over all devices; 0 for sums."""
    scopes: tuple[str, ...]
    """Name scopes of the operations: the modules that they are in."""

    @property
    def is_low_precision_sum(self) -> bool:
        """True for sums in 16 bits or fewer, which lose addends below the last of their bits."""
        dtype = jnp.dtype(self.result)
        return self.kind != "product" and jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4


@dataclasses.dataclass(frozen=True)
class DtypeAudit:
    """Report of `audit_dtypes`. `print(audit)` prints a table."""

    groups: tuple[DtypeGroup, ...]

    @property
    def low_precision_sums(self) -> tuple[DtypeGroup, ...]:
        """Sums in 16 bits or fewer."""
        return tuple(group for group in self.groups if group.is_low_precision_sum)

    def share(self, operands: str) -> float:
        """Return the share of the FLOPs of products with these operands: `audit.share("bfloat16 x bfloat16")`."""
        total = sum(group.flops for group in self.groups)
        return sum(group.flops for group in self.groups if group.operands == operands) / max(total, 1)

    def __str__(self) -> str:
        total = max(sum(group.flops for group in self.groups), 1)
        rows = [("", "operands", "result", "operations", "FLOPs")]
        for group in self.groups:
            flops = f"{group.flops / total:.1%}" if group.kind == "product" else ""
            rows.append((group.kind, group.operands, group.result, f"{group.count:,}", flops))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        for group in self.low_precision_sums:
            if len(group.scopes) > _MAX_SCOPES:
                more = f" and {len(group.scopes) - _MAX_SCOPES} more"
            else:
                more = ""
            lines.append(f"{group.kind} in {group.result}: {'; '.join(group.scopes[:_MAX_SCOPES])}{more}")
        return "\n".join(lines)


def audit_dtypes(step: Callable, *args: Any, **kwargs: Any) -> DtypeAudit:
    """List the dtypes of all matrix products and sums of `step(*args, **kwargs)`, which is traced, not compiled.

        print(zoo.inspect.audit_dtypes(step, batch, model, opt_state))

    It answers which products run in which precision, and whether sums are float32: sums of norms, softmaxes and losses,
    and of gradients over devices. Sums of a single value and of integers are left out. Not seen: operations inside a
    kernel of Pallas or cuDNN, and additions of two arrays, such as residuals and carries of loops.

    `step` and its arguments are as for `zoo.inspect.compiled`.
    """
    if not hasattr(step, "lower"):
        step = eqx.filter_jit(step)
    leaves = [x for x in jax.tree.leaves((args, kwargs)) if is_array_or_shape(x)]
    closed, _ = lowering.trace(step, args, kwargs, leaves)
    found: dict[tuple[str, str, str], list[tuple[int, str]]] = {}
    for equation, times in iterate_equations(closed):
        for key, flops in _classify(equation):
            found.setdefault(key, []).append((flops * times, format_scope(equation)))
    groups = [
        DtypeGroup(
            *key, len(items), sum(flops for flops, _ in items), tuple(dict.fromkeys(scope for _, scope in items))
        )
        for key, items in found.items()
    ]
    return DtypeAudit(tuple(sorted(groups, key=lambda group: (group.kind, -group.flops, group.operands))))


def _classify(equation: Any) -> list[tuple[tuple[str, str, str], int]]:
    """Return kind, operands and result of a product or of each sum of an equation, with its FLOPs; [] for any other."""
    if (flops := count_product_flops(equation)) is not None:
        operands = " x ".join(x.aval.dtype.name for x in equation.invars[:2])
        return [(("product", operands, equation.outvars[0].aval.dtype.name), flops)]
    kind = _SUMS.get(equation.primitive.name)
    if kind is None:
        return []
    pairs = zip(equation.invars, equation.outvars, strict=False)
    if kind == "scatter-add":
        pairs = [(equation.invars[-1], equation.outvars[0])]
    return [((kind, x.aval.dtype.name, y.aval.dtype.name), 0) for x, y in pairs if _adds_floats(kind, x.aval, y.aval)]


def _adds_floats(kind: str, x: Any, y: Any) -> bool:
    is_several = kind != "sum" or x.size > y.size or x.shape == y.shape
    return is_several and jnp.issubdtype(x.dtype, jnp.floating)

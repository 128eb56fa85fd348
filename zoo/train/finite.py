"""Numbers that are not finite: found in metrics once they are fetched, and in a state before it is saved."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Inexact, PyTree

from .array_names import flatten_with_names


def find_nonfinite_metrics(records: Iterable[Mapping[str, Any]], *, max_skipped: int = 0) -> str | None:
    """Return the step and the metrics of the first record with a NaN or infinity, in words; None without one.

    An array counts if no entry is finite: in a sweep, other runs go on when one diverges. A record of a skipped step
    (`zoo.train.count_skips`) may hold any, until more than `max_skipped` in a row were skipped.
    """
    for record in records:
        if skipped := record.get("skipped_in_a_row", 0):
            if skipped > max_skipped:
                return f"{skipped} steps in a row were skipped, up to step {record['step']}"
            continue
        found = [f"{name} is {_flatten(value)[0]}" for name, value in record.items() if not _has_finite(value)]
        if found:
            return f"{', '.join(found)} in step {record['step']}"
    return None


def find_nan_arrays(state: PyTree, *, step: int) -> str | None:
    """Name the arrays of `state` after `step` that hold NaN, found by a reduction on the devices; None without one.

    If all arrays have the same leading dim, they are the stacked runs of a sweep: NaN is reported only once every run
    has one.
    """
    arrays = {name: x for name, x in flatten_with_names(state).items() if eqx.is_array(x)}
    stacked = len({x.shape[:1] for x in arrays.values()}) == 1 and all(x.ndim for x in arrays.values())
    arrays = {name: x for name, x in arrays.items() if eqx.is_inexact_array(x)}
    # One program per array, as they may be on different devices.
    found = jax.device_get([_has_nan(x, stacked=stacked) for x in arrays.values()])
    if stacked and not np.logical_or.reduce(found).all():
        return None
    names = [name for name, has_nan in zip(arrays, found, strict=True) if has_nan.any()]
    if not names:
        return None
    more = f" and {len(names) - 3} more arrays" if len(names) > 3 else ""
    return f"NaN in {', '.join(names[:3])}{more} of the state after step {step}"


def describe_retry(steps: Sequence[int]) -> str:
    """Suggest how to go on after a run became NaN, from the checkpoints of `steps`."""
    if not steps:
        return "the run stopped and saved nothing: start again with another learning rate"
    if steps[1:]:
        earlier = f", or from {' or '.join(map(str, steps[:-1]))} by --resume STEP"
    else:
        earlier = ""
    return (
        f"the run stopped and saved nothing after step {steps[-1]}: with another learning rate, go on from there by "
        f"--resume{earlier}"
    )


@eqx.filter_jit
def _has_nan(x: Inexact[Array, "..."], *, stacked: bool) -> Bool[Array, "..."]:
    axes = range(1, x.ndim) if stacked else None
    return jnp.isnan(x).any(axis=axes)


def _has_finite(value: Any) -> bool:
    """Return True for a value with a finite entry, and for an empty one."""
    entries = _flatten(value)
    return not entries or any(entry not in _NONFINITE for entry in entries)


_NONFINITE = ("nan", "inf", "-inf")  # as records hold them


def _flatten(value: Any) -> list[Any]:
    if isinstance(value, list):
        return [entry for item in value for entry in _flatten(item)]
    return [value]

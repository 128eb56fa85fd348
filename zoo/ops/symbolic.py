"""Comparisons of sizes that may be symbolic, as the batch of a program for `jax.export` is."""

from collections.abc import Callable

from jax.errors import InconclusiveDimensionOperation


def always_holds(condition: Callable[[], bool]) -> bool:
    """Return `condition()`, a comparison of sizes; False if it holds for some values of symbolic sizes only.

    For choices between implementations that compute the same: `always_holds(lambda: rows >= 64)`.
    """
    try:
        return bool(condition())
    except InconclusiveDimensionOperation:
        return False

"""Parametrize a test with many values, of which a few are quick enough for every run."""

from collections.abc import Callable, Iterable

import pytest


def mark_slow(values: Iterable, *, but: Iterable, name: Callable = lambda value: value) -> list:
    """Return `values`, of which all whose `name(value)` is not in `but` are marked slow.

    **Raises** ValueError if no value has one of the names in `but`: a test that says it is quick would not run at all.
    """
    values, quick = list(values), set(but)
    if missing := quick - {name(value) for value in values}:
        raise ValueError(f"no value is named {missing}")
    as_tuple = lambda value: value if isinstance(value, tuple) else (value,)
    return [
        value if name(value) in quick else pytest.param(*as_tuple(value), marks=pytest.mark.slow) for value in values
    ]

"""Pair the results of two functions: arrays, sequences, and fields by name."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any


def pair_results(theirs: Any, ours: Any) -> tuple[list[tuple[str, Any, Any]], list[str]]:
    """Return name, theirs and ours of each array, and a note on each field that only one of the two has.

    **Raises** `ValueError` if the structures differ, or if no field is shared.
    """
    pairs: list[tuple[str, Any, Any]] = []
    notes: list[str] = []
    _pair("", theirs, ours, pairs, notes)
    return pairs, notes


def _pair(name: str, theirs: Any, ours: Any, pairs: list[tuple[str, Any, Any]], notes: list[str]) -> None:
    fields = _get_fields(theirs)
    our_fields = _get_fields(ours)
    if fields is not None and our_fields is not None:
        shared = [key for key in fields if key in our_fields]
        if not shared:
            raise ValueError(f"{_describe_both(name, theirs, ours)}: no field is shared")
        for word, only in (("theirs", fields.keys() - our_fields.keys()), ("ours", our_fields.keys() - fields.keys())):
            notes += [f"{_join_names(name, key)} is in {word} only, and not compared" for key in sorted(only)]
        for key in shared:
            _pair(_join_names(name, key), fields[key], our_fields[key], pairs, notes)
    elif _is_sequence(theirs) and _is_sequence(ours) and len(theirs) == len(ours):
        for number, (x, y) in enumerate(zip(theirs, ours, strict=True)):
            _pair(f"{name or 'result'}[{number}]", x, y, pairs, notes)
    elif _is_array_or_number(theirs) and _is_array_or_number(ours):
        pairs.append((name or "result", theirs, ours))
    elif theirs is not None or ours is not None:
        raise ValueError(f"{_describe_both(name, theirs, ours)}: {_suggest_structure(fields)}")


def _suggest_structure(fields: Mapping[str, Any] | None) -> str:
    if fields:
        return f"return a dict of ours, such as lambda *args: {{{next(iter(fields))!r}: ours(*args)}}"
    return "return the same structure in both"


def _get_fields(x: Any) -> dict[str, Any] | None:
    """Return the fields of a mapping, a dataclass or a named tuple that are not None."""
    if isinstance(x, Mapping):
        found = dict(x)
    elif hasattr(x, "_asdict"):
        found = x._asdict()
    elif dataclasses.is_dataclass(x) and not isinstance(x, type):
        found = {field.name: getattr(x, field.name) for field in dataclasses.fields(x)}
    else:
        return None
    return {str(key): value for key, value in found.items() if value is not None}


def _is_sequence(x: Any) -> bool:
    return isinstance(x, Sequence) and not isinstance(x, str)


def _is_array_or_number(x: Any) -> bool:
    return hasattr(x, "shape") or isinstance(x, int | float | complex)


def _join_names(name: str, key: str) -> str:
    return f"{name}.{key}" if name else key


def _describe_both(name: str, theirs: Any, ours: Any) -> str:
    return f"{name or 'the result'} of theirs is {_describe_result(theirs)}, and of ours {_describe_result(ours)}"


def _describe_result(x: Any) -> str:
    fields = _get_fields(x)
    if fields is not None:
        return f"{type(x).__name__} with {', '.join(fields) or 'no fields'}"
    if _is_sequence(x):
        return f"a {type(x).__name__} of {len(x)}"
    if _is_array_or_number(x):
        return f"an array of {list(getattr(x, 'shape', ()))}"
    return type(x).__name__

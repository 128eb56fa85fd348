"""Kinds of values in a config: read by their JSON type, never by their truth.

`"false"`, `[0]` and `1` are true to Python; where a bool is expected, each of them is an error. A kind is composed of
smaller ones:

    LAYERS = optional(list_of(integer(minimum=0)))
    LAYERS.find_error([True])  # "should be null or a list of whole numbers not below 0, and not beyond 2 ** 31"
"""

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Any

MAX_NUMBER = 1e30  # larger values are mistakes, and float32 overflows at 3e38
MAX_INTEGER = 2**31


@dataclasses.dataclass(frozen=True)
class ValueKind:
    """The values that a config key accepts."""

    words: str
    """The kind in words, to follow "should be"."""
    fits: Callable[[Any], bool]

    def find_error(self, value: Any) -> str:
        """Return "should be ..." for a value of another kind, "" for one of this kind."""
        if self.fits(value):
            return ""
        return f"should be {self.words}"


def is_number(value: Any) -> bool:
    """Return True for an int or a float, and not a bool."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_positive_number(value: Any) -> bool:
    """Return True for a finite number above 0, and not a bool."""
    return is_number(value) and 0 < value < MAX_NUMBER


def is_any_of(value: Any, allowed: Collection[Any]) -> bool:
    """Return True if `value` equals one of `allowed` in type, too: 0 is not False. An int equals the same float."""
    return any(isinstance(value, bool) == isinstance(other, bool) and value == other for other in allowed)


def integer(*, minimum: int = -MAX_INTEGER, words: str = "") -> ValueKind:
    """Return the kind of whole numbers from `minimum` to 2 ** 31."""
    if minimum < 0:
        default = "a whole number"
    elif minimum == 0:
        default = "a whole number not below 0, and not beyond 2 ** 31"
    elif minimum == 1:
        default = "a whole number above 0, and not beyond 2 ** 31"
    else:
        default = f"a whole number of at least {minimum}"
    return ValueKind(
        words or default,
        lambda value: isinstance(value, int) and not isinstance(value, bool) and minimum <= value <= MAX_INTEGER,
    )


def list_of(kind: ValueKind) -> ValueKind:
    """Return the kind of lists, possibly empty, with elements of one kind."""
    return ValueKind(
        f"a list of {_to_plural(kind)}", lambda value: isinstance(value, list | tuple) and all(map(kind.fits, value))
    )


def table_of(kind: ValueKind) -> ValueKind:
    """Return the kind of JSON objects with values of one kind."""
    return ValueKind(
        f"a table of names and {_to_plural(kind)}",
        lambda value: isinstance(value, Mapping) and all(map(kind.fits, value.values())),
    )


def _to_plural(kind: ValueKind) -> str:
    return kind.words.removeprefix("a ").replace("number", "numbers", 1).replace("word", "words", 1)


def optional(kind: ValueKind) -> ValueKind:
    """Return the kind that is null or `kind`."""
    return ValueKind(f"null or {kind.words}", lambda value: value is None or kind.fits(value))


BOOL = ValueKind("true or false", lambda value: isinstance(value, bool))
NUMBER = ValueKind("a number", lambda value: is_number(value) and abs(value) < MAX_NUMBER)
POSITIVE_NUMBER = ValueKind("a number above 0", is_positive_number)
NON_NEGATIVE_NUMBER = ValueKind("a number, and not below 0", lambda value: NUMBER.fits(value) and value >= 0)
WORD = ValueKind("a word", lambda value: isinstance(value, str))

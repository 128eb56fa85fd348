"""The error for an invalid config.json, and suggestions in its message."""

import difflib
import heapq
import itertools
from collections.abc import Iterable
from typing import Any

from zoo._keywords import find_synonym


class ConfigError(ValueError):
    """Invalid or unsupported config.json; the message names the key."""


def suggest_nearest(word: str, known: Iterable[str]) -> str:
    """Return "; did you mean ...?" with a known word for the same thing, else the closest, or "" if none is close."""
    known = sorted(known)
    if synonym := find_synonym(word, known):
        return f"; did you mean {synonym!r}?"
    if len(known) > 300:  # tensor names of a checkpoint: difflib would take a second per word
        known = heapq.nlargest(30, known, key=lambda other: _count_shared_ends(word, other))
    matches = difflib.get_close_matches(word, known, n=1, cutoff=0.75)
    if not matches:
        return ""
    return f"; did you mean {matches[0]!r}?"


def _count_shared_ends(first: str, second: str) -> int:
    """Return the length of the common prefix plus the length of the common suffix."""
    return _count_equal(first, second) + _count_equal(reversed(first), reversed(second))


def _count_equal(first: Iterable[str], second: Iterable[str]) -> int:
    """Return the number of equal letters before the first that differ."""
    pairs = zip(first, second, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def shorten_repr(value: Any) -> str:
    """Return the repr of a value, cut to 60 characters."""
    text = repr(value)
    if len(text) > 60:
        return text[:57] + "..."
    return text

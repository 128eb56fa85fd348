"""The error for an invalid config.json, and suggestions in its message."""

import difflib
import heapq
import itertools
from collections.abc import Iterable
from typing import Any


class ConfigError(ValueError):
    """Invalid or unsupported config.json; the message names the key."""


def suggest_nearest(word: str, known: Iterable[str]) -> str:
    """Return "; did you mean ...?" with the closest known word, or "" if none is close."""
    known = sorted(known)
    if len(known) > 300:  # tensor names of a checkpoint: difflib would take a second per word
        known = heapq.nlargest(30, known, key=lambda other: _count_shared_ends(word, other))
    matches = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return f"; did you mean {matches[0]!r}?" if matches else ""


def _count_shared_ends(first: str, second: str) -> int:
    """Return the length of the common prefix plus the length of the common suffix."""
    count_equal = lambda pairs: sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    prefix = count_equal(zip(first, second, strict=False))
    return prefix + count_equal(zip(reversed(first), reversed(second), strict=False))


def shorten_repr(value: Any) -> str:
    """Return the repr of a value, cut to 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."

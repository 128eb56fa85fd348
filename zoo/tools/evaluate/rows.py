"""Rows of tokens: windows of a long text, and batches of a fixed shape."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int


def split_rolling(tokens: Sequence[int], prefix: int, length: int) -> list[tuple[Sequence[int], Sequence[int]]]:
    """Split a text into pairs of context and continuation whose continuations tile it.

    The first window reads the prefix and `length - 1` tokens. Each window behind it reads `length` tokens and scores as
    many as are left, so the last has the tokens before it for context, and the others one. They are the windows of
    lm_eval with a `context_len` of 1.
    """
    windows: list[tuple[Sequence[int], Sequence[int]]] = []
    if tokens:
        windows.append(([prefix], tokens[:length]))
    for start in range(length, len(tokens), length):
        stop = min(start + length, len(tokens))
        windows.append((tokens[stop - length - 1 : start], tokens[start:stop]))
    return windows


def pad_rows(rows: Sequence[Sequence[int]], count: int, length: int) -> dict[str, Int[np.ndarray, "..."]]:
    """Return inputs and targets of rows, padded on the right, where causal attention hides the padding."""
    tokens = np.zeros((count, length), np.int32)
    targets = np.full((count, length), -1, np.int32)
    for i, row in enumerate(rows):
        tokens[i, : len(row) - 1] = row[:-1]
        targets[i, : len(row) - 1] = row[1:]
    return {"tokens": tokens, "targets": targets, "numbers": np.arange(count, dtype=np.int32)}

"""Operands of the kernels of gated linear attention."""

from typing import Any, NamedTuple


class GatedOperands(NamedTuple):
    """Operands of the kernels, or references to their blocks in a core's memory."""

    query: Any
    """Queries, keys and values: [batch, heads, seq, dim], a multiple of the chunk size long."""
    key: Any
    value: Any
    log_decay: Any
    """One decay per head: [batch, heads, chunks, 1, size], a row per chunk. One per channel: as keys."""
    count: Any
    """Segments that start in a chunk up to each token: [batch, chunks, 1, size]."""
    bonus: Any
    """[heads, 1, key_dim], or None."""
    state: Any
    """[batch, heads, key_dim, value_dim], before the first chunk. The backward kernel has the state before each
    chunk."""

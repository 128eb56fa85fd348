"""Pairs of a source and a target, one to a row, for a model with an encoder and a decoder."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Shaped

from zoo.text.records.token_store import TokenStore


class PairRows:
    """Right-padded pairs: a `Dataset` whose rows are a batch of `zoo.cross_entropy` for an `EncoderDecoder`.

    A row has `source` and `source_mask`, "source_len", and `tokens`, `targets` (-1 for padding) and `weights`,
    "seq_len". `tokens` are `start` and the target without its last token; each has the next one as its target.

    - `num_items`: pairs. `num_dropped`: pairs with a source or a target longer than a row, which are left out.
    """

    num_cut = 0

    def __init__(
        self,
        store: TokenStore,
        seq_len: int,
        *,
        source_len: int,
        start: Sequence[int],
        items: Bool[np.ndarray, "items"],
    ):
        """`start`: tokens that every target begins with (`EncoderDecoder.start`)."""
        self._store = store
        self._seq_len = seq_len
        self._source_len = source_len
        self._start = np.asarray(start, np.int32)
        sources, targets = np.diff(store.starts).reshape(-1, 2).T
        targets = targets + len(start) - 1
        self.num_items = int(np.count_nonzero(items))
        self._items = np.flatnonzero(items & (sources <= source_len) & (targets <= seq_len))
        self.num_dropped = self.num_items - len(self._items)
        self.num_targets = int(targets[self._items].sum())
        self.num_trained = self.num_targets

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> dict[str, Shaped[np.ndarray, "..."]]:
        first = 2 * self._items[index]
        begin, middle, end = self._store.starts[first : first + 3]
        source = self._store.tokens[begin:middle]
        target = np.concatenate([self._start, self._store.tokens[middle:end]])
        return {
            "source": _pad(source, self._source_len, 0),
            "source_mask": np.arange(self._source_len) < len(source),
            "tokens": _pad(target[:-1], self._seq_len, 0),
            "targets": _pad(target[1:], self._seq_len, -1),
            "weights": (np.arange(self._seq_len) < len(target) - 1).astype(np.float32),
        }


def _pad(tokens: Shaped[np.ndarray, "tokens"], length: int, value: int) -> Shaped[np.ndarray, "length"]:
    padded = np.full(length, value, np.int32)
    padded[: len(tokens)] = tokens
    return padded

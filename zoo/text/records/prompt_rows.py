"""Prompts to complete, one to a row."""

from typing import Any

import numpy as np
from jaxtyping import Bool, Shaped

from zoo.text.records.token_store import TokenStore


class PromptRows:
    """Left-padded prompts: a `Dataset` with rows of `seq_len` positions, as `zoo.generate` takes them.

    A row has `tokens`, `mask` (False for padding) and `record` (int32), with which `read_fields` finds what else the
    record holds, such as the answer that a reward compares with.

    - `num_items`: prompts. `num_dropped`: prompts longer than a row, which are left out.
    """

    num_cut = 0
    num_trained = 0

    def __init__(self, store: TokenStore, seq_len: int, *, items: Bool[np.ndarray, "items"]):
        self._store = store
        self._seq_len = seq_len
        lengths = np.diff(store.starts)
        self.num_items = int(np.count_nonzero(items))
        self._items = np.flatnonzero(items & (lengths <= seq_len))
        self.num_dropped = self.num_items - len(self._items)
        self.num_targets = int(lengths[self._items].sum())

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> dict[str, Shaped[np.ndarray, "..."]]:
        item = self._items[index]
        prompt = self._store.tokens[self._store.starts[item] : self._store.starts[item + 1]]
        tokens = np.zeros(self._seq_len, np.int32)
        tokens[self._seq_len - len(prompt) :] = prompt
        mask = np.arange(self._seq_len) >= self._seq_len - len(prompt)
        return {"tokens": tokens, "mask": mask, "record": np.array(item, np.int32)}

    def read_fields(self, record: int) -> dict[str, Any]:
        """Return the further fields of the record with the number that a row has as `record`."""
        return self._store.read_fields(int(record))

"""From memory-mapped tokens to batches: fixed windows, shuffled, shared out over processes, resumed from one integer.

    batches = corpus.train.batches(seq=256, batch=8, seed=0)       # without end
    for batch in corpus.validation.ordered(seq=256, batch=8): ...  # once, always the same

A batch is a mapping of "batch seq" arrays. `tokens` and `targets` (int32) are the same text one token apart. `weights`
(float32) is 0 where the target is a separator, that is on a document's last token, and 1 elsewhere: every target that
counts is text. On request `segment_ids` (int32) numbers the documents within a window from 1, and `positions` (int32)
counts from 0 in each. With several processes every one gets the rows that are its own, a contiguous block.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np
from jaxtyping import Array, Float, Int, Integer, Shaped

from zoo._optional import import_optional

from .tokenizers import SEPARATOR

_Row = dict[str, Shaped[np.ndarray, "..."]]
_Batch = dict[str, Shaped[np.ndarray, "batch ..."]]


@runtime_checkable
class Dataset(Protocol):
    """Rows by number: `Windows` of a text, or any other examples, each a mapping of arrays."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> _Row: ...


@runtime_checkable
class BatchIterator(Protocol):
    """What a run draws its batches from: an iterator without end that can say where it stands, in JSON's terms."""

    state: Any

    def __next__(self) -> Any: ...

    def restore(self, state: Any) -> None: ...


class TokenWindows:
    """The stream of tokens cut every `seq` tokens: window `i` is `tokens[i * seq :][: seq + 1]`, targets included.

    Past the end of the text lie separators, whose weight is 0: the last window may be short, later ones are empty.
    """

    def __init__(
        self,
        tokens: Integer[np.ndarray, "tokens"],
        seq_len: int,
        *,
        with_segments: bool = False,
        separator: int = SEPARATOR,
    ):
        self.tokens = tokens
        self.seq_len = seq_len
        self.with_segments = with_segments
        self.separator = separator

    def __len__(self) -> int:
        return math.ceil(max(len(self.tokens) - 1, 0) / self.seq_len)

    def __getitem__(self, index: int) -> _Row:
        start = index * self.seq_len
        window = np.asarray(self.tokens[start : start + self.seq_len + 1], np.int32)
        window = np.pad(window, (0, self.seq_len + 1 - len(window)), constant_values=self.separator)
        tokens, targets = window[:-1], window[1:]
        row = dict(tokens=tokens, targets=targets, weights=(targets != self.separator).astype(np.float32))
        return row | compute_segments(tokens, self.separator) if self.with_segments else row


def compute_segments(tokens: Integer[np.ndarray, "seq"], separator: int = SEPARATOR) -> _Row:
    """`segment_ids` and `positions` of a window: a separator is a document's first token."""
    starts = tokens == separator
    starts[0] = True
    place = np.arange(len(tokens), dtype=np.int32)
    first = np.maximum.accumulate(np.where(starts, place, 0))
    return dict(segment_ids=np.cumsum(starts, dtype=np.int32), positions=(place - first).astype(np.int32))


@dataclass(frozen=True)
class CorpusSplit:
    """One part of a corpus: documents one after another, a separator before each.

    `lengths` says how many bytes each token stands for, `text_bytes` how many all of them do, and `text_tokens` how
    many of the tokens are text: separators are not counted.
    """

    name: str
    tokens: Integer[np.ndarray, "tokens"]
    token_bytes: Int[np.ndarray, "vocab"]
    text_bytes: int
    text_tokens: int
    separator: int = SEPARATOR

    def batches(
        self,
        seq_len: int,
        batch_size: int,
        *,
        seed: int = 0,
        with_segments: bool = False,
        process: tuple[int, int] | None = None,
    ) -> "ShuffledBatches":
        """Batches without end: every pass over the text visits each whole window once, in an order of its own.

        **Arguments:** `seq` tokens a window, `batch` windows in all processes together, `documents` to have segments
        and positions, `process` (index, count) where it is not JAX's.

        **Raises** `ValueError` for text that fills no window, or a batch that the processes cannot share evenly.
        """
        whole = (len(self.tokens) - 1) // seq_len
        if whole < 1:
            raise ValueError(
                f"the {self.name} text has {len(self.tokens)} tokens, too few for one window of {seq_len} and its last "
                "target: take a shorter seq, or more text"
            )
        windows = TokenWindows(
            self.tokens[: whole * seq_len + 1], seq_len, with_segments=with_segments, separator=self.separator
        )
        # A pass is shuffled by itself, so a text of fewer windows than a batch repeats them within one.
        return ShuffledBatches(windows, batch_size, seed=seed, process=process, bytes_per_token=self.bytes_per_token)

    def ordered(
        self,
        seq_len: int,
        batch_size: int,
        *,
        limit: int | None = None,
        with_segments: bool = False,
        process: tuple[int, int] | None = None,
    ) -> "OrderedBatches":
        """The text in order, the last batch padded with weight 0; or `limit` batches of windows spread evenly over it.

        **Raises** `ValueError` for an empty text, or a batch that the processes cannot share evenly.
        """
        windows = TokenWindows(self.tokens, seq_len, with_segments=with_segments, separator=self.separator)
        if not len(windows):
            raise ValueError(f"the {self.name} text is empty: take more text")
        whole = math.ceil(len(windows) / batch_size)
        # The first windows alone would be those of a file or two.
        chosen = np.arange(min(limit or whole, whole) * batch_size)
        if limit is not None and limit < whole:
            chosen = chosen * len(windows) // len(chosen)
        return OrderedBatches(windows, batch_size, chosen, token_bytes=self.token_bytes, process=process)

    @property
    def bytes_per_token(self) -> float:
        """Mean bytes of text that a counted token stands for; 1 for bytes."""
        return self.text_bytes / max(self.text_tokens, 1)


class ShuffledBatches(Iterator):
    """Shuffled batches without end.

    `state` is one integer, the rows that all processes together have drawn. Restored, also on another number of
    processes, the batches go on as if never interrupted: the global batch has the same rows in the same order.
    """

    def __init__(
        self,
        dataset: Dataset,
        batch_size: int,
        *,
        seed: int = 0,
        process: tuple[int, int] | None = None,
        bytes_per_token: float = 1.0,
    ):
        self._process, self._rows = _assign_rows(batch_size, process)
        self.batch_size = batch_size
        self.bytes_per_token = bytes_per_token
        self.state = 0
        self._grain = import_optional("grain", "pip install 'equizoo[train]'")
        self._endless = self._grain.MapDataset.source(dataset).seed(seed).shuffle().repeat(None)
        self._iterator = None

    def __next__(self) -> _Batch:
        if self._iterator is None:
            index, count = self._process
            # Batched by this process's rows first, strided over the processes after: rows of a process are contiguous
            # in the global batch, as `zoo.place_batch` puts them together again.
            rows = self._endless[self.state :].batch(self._rows, drop_remainder=True)[index::count]
            reading = self._grain.ReadOptions(num_threads=2, prefetch_buffer_size=8)
            self._iterator = iter(rows.to_iter_dataset(reading))
        batch = next(self._iterator)
        self.state += self.batch_size
        return batch

    def restore(self, state: int) -> None:
        """Go on from where another had `state`."""
        self.close()
        self.state = state

    def close(self) -> None:
        """End the threads that read ahead; the next batch starts them again."""
        if self._iterator is not None:
            self._iterator.close()
            self._iterator = None


class OrderedBatches:
    """The same batches each time it is iterated. `bytes_per_token` is exactly that of their targets that count."""

    def __init__(
        self,
        windows: TokenWindows,
        batch_size: int,
        indices: Int[np.ndarray, "windows"],
        *,
        token_bytes: Int[np.ndarray, "vocab"],
        process: tuple[int, int] | None = None,
    ):
        self._process, self._rows = _assign_rows(batch_size, process)
        self._windows = windows
        self._chosen = indices
        self.batch_size = batch_size
        targets = np.concatenate([windows[int(index)]["targets"] for index in indices])
        self.bytes_per_token = float(
            token_bytes[targets].sum() / max(np.count_nonzero(targets != windows.separator), 1)
        )

    def __len__(self) -> int:
        return len(self._chosen) // self.batch_size

    def __iter__(self) -> Iterator[_Batch]:
        for number in range(len(self)):
            first = number * self.batch_size + self._process[0] * self._rows
            rows = [self._windows[int(index)] for index in self._chosen[first : first + self._rows]]
            yield {name: np.stack([row[name] for row in rows]) for name in rows[0]}


def bits_per_byte(
    nats: float | Float[Array, ""], text: CorpusSplit | ShuffledBatches | OrderedBatches
) -> float | Float[Array, ""]:
    """A mean loss in nats per token of `text` as bits per byte, which is comparable between vocabularies."""
    return nats / (math.log(2) * text.bytes_per_token)


def _assign_rows(batch_size: int, process: tuple[int, int] | None) -> tuple[tuple[int, int], int]:
    """This process (index, count) and its rows of each batch."""
    index, count = process or (jax.process_index(), jax.process_count())
    if batch_size < 1 or batch_size % count:
        raise ValueError(
            f"a batch of {batch_size} windows cannot be shared evenly by {count} processes: take a multiple"
        )
    return (index, count), batch_size // count

"""Batches of fixed windows over memory-mapped tokens: shuffled, sharded over processes, resumable from one integer.

    batches = corpus.train.batches(seq_len=256, batch_size=8, seed=0)       # infinite
    for batch in corpus.validation.ordered(seq_len=256, batch_size=8): ...  # one pass, deterministic

A batch is a mapping of "batch seq" arrays. `tokens` and `targets` (int32) are the same text shifted by one token.
`weights` (float32) is 0 where the target is a separator, i.e. on the last token of a document, and 1 elsewhere. With
`with_segments`, `segment_ids` (int32) numbers the documents of a window from 1, and `positions` (int32) counts from 0
within each. With several processes, each gets the rows that its devices in `mesh` hold.
Rows of whole texts and mixtures of datasets are in `packing.py` and `mixture.py`.
"""

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Integer, Shaped

from zoo._optional import import_optional
from zoo._terminal import format_count
from zoo.parallel import Mesh, reader

from .tokenizers import SEPARATOR

_Row = dict[str, Shaped[np.ndarray, "..."]]
_Batch = dict[str, Shaped[np.ndarray, "batch ..."]]


@runtime_checkable
class Dataset(Protocol):
    """A random-access source of examples, each a mapping of arrays: `TokenWindows`, or any other."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> _Row: ...


@runtime_checkable
class EndlessRows(Protocol):
    """A source of shuffled rows without an end, in which row n is a function of n: `zoo.text.mixture.Mixture`."""

    def rows_forever(self, seed: int, batch_size: int) -> Any: ...


@runtime_checkable
class BatchIterator(Protocol):
    """An infinite iterator over batches whose position is a JSON-serializable `state`.

    If it has a `digest` of its data, a run saves it, and does not resume with other data.
    """

    state: Any

    def __next__(self) -> Any: ...

    def restore(self, state: Any) -> None: ...


def stack_rows(dataset: Dataset, rows: int) -> dict[str, Shaped[Array, "batch ..."]]:
    """Stack the first `rows` examples of a dataset into one batch."""
    return jax.tree.map(lambda *examples: jnp.stack(examples), *(dataset[index] for index in range(rows)))


class TokenWindows:
    """Windows of a token stream: window `i` is `tokens[i * seq_len :][: seq_len + 1]`, targets included.

    The end of the last window is padded with separators, whose weight is 0.
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
        tokens = window[:-1]
        targets = window[1:]
        row = dict(tokens=tokens, targets=targets, weights=(targets != self.separator).astype(np.float32))
        if self.with_segments:
            return row | compute_segments(tokens, self.separator)
        return row


def compute_segments(tokens: Integer[np.ndarray, "seq"], separator: int = SEPARATOR) -> _Row:
    """Compute `segment_ids` and `positions` of a window whose documents each start with a separator."""
    starts = tokens == separator
    starts[0] = True
    index = np.arange(len(tokens), dtype=np.int32)
    first = np.maximum.accumulate(np.where(starts, index, 0))
    return dict(segment_ids=np.cumsum(starts, dtype=np.int32), positions=(index - first).astype(np.int32))


def pad_left(
    rows: Sequence[Sequence[int] | Integer[np.ndarray, "seq"]],
) -> tuple[Integer[np.ndarray, "batch seq"], Bool[np.ndarray, "batch seq"]]:
    """Pad rows of tokens on the left, as `zoo.generate` takes prompts; return them with their padding mask."""
    lengths = np.array([len(row) for row in rows])
    mask = np.arange(lengths.max())[::-1] < lengths[:, None]
    tokens = np.zeros(mask.shape, int)
    tokens[mask] = np.concatenate(rows)
    return tokens, mask


def spread_rows(num_rows: int, batch_size: int, limit: int | None = None) -> Int[np.ndarray, "rows"]:
    """Return the indices of whole batches of rows in order, the last ones beyond `num_rows`; or of `limit` batches,
    spread evenly over the rows: the first ones would come from only one or two files."""
    num_batches = math.ceil(num_rows / batch_size)
    if not limit or limit >= num_batches:
        return np.arange(num_batches * batch_size)
    indices = np.arange(limit * batch_size)
    return indices * num_rows // len(indices)


@dataclass(frozen=True)
class CorpusSplit:
    """The training or validation split of a corpus: concatenated documents, each preceded by a separator.

    - `token_bytes`: bytes of text per token of the vocabulary.
    - `text_bytes`, `text_tokens`: size of the split in bytes and in tokens, separators excluded.
    - `digest`: a hash of the tokens of the whole corpus, which batches carry to the run's configuration.
    """

    name: str
    tokens: Integer[np.ndarray, "tokens"]
    token_bytes: Int[np.ndarray, "vocab"]
    text_bytes: int
    text_tokens: int
    separator: int = SEPARATOR
    digest: str | None = None

    def batches(
        self,
        seq_len: int,
        batch_size: int,
        *,
        seed: int = 0,
        with_segments: bool = False,
        mesh: Mesh | None = None,
        process: tuple[int, int] | None = None,
    ) -> "ShuffledBatches":
        """Iterate over shuffled batches, infinitely. Each epoch visits every full window once, in a new order.

        - `seq_len`: tokens per window; `batch_size`: windows per batch, over all processes.
        - `with_segments`: add `segment_ids` and `positions`.
        - `mesh`: of which this process reads its rows. Without it each process reads different rows, which a mesh
          refuses if its `tensor`, `context` or `pipe` spans processes.
        - `process`: (index, count) of the rows to read instead.

        **Raises** `ValueError` if the text is shorter than a window, or the number of processes does not divide
        `batch_size`.
        """
        num_windows = (len(self.tokens) - 1) // seq_len
        if num_windows < 1:
            raise ValueError(
                f"the {self.name} text has {len(self.tokens)} tokens, too few for one window of {seq_len} and its last "
                "target: take a shorter seq, or more text"
            )
        windows = TokenWindows(
            self.tokens[: num_windows * seq_len + 1], seq_len, with_segments=with_segments, separator=self.separator
        )
        # Epochs are shuffled separately, so a text with fewer windows than a batch repeats them within one.
        options = {"bytes_per_token": self.bytes_per_token, "digest": self.digest}
        return ShuffledBatches(windows, batch_size, seed=seed, mesh=mesh, process=process, **options)

    def ordered(
        self,
        seq_len: int,
        batch_size: int,
        *,
        limit: int | None = None,
        with_segments: bool = False,
        process: tuple[int, int] | None = None,
    ) -> "OrderedBatches":
        """Iterate once over the text in order, the last batch padded with weight 0; or over `limit` batches of windows
        spread evenly over the text.

        **Raises** `ValueError` if the text is empty, or the number of processes does not divide `batch_size`.
        """
        windows = TokenWindows(self.tokens, seq_len, with_segments=with_segments, separator=self.separator)
        if not len(windows):
            raise ValueError(f"the {self.name} text is empty: take more text")
        indices = spread_rows(len(windows), batch_size, limit)
        return OrderedBatches(windows, batch_size, indices, token_bytes=self.token_bytes, process=process)

    @property
    def bytes_per_token(self) -> float:
        """Mean bytes of text per token, separators excluded; 1 for the byte tokenizer."""
        return self.text_bytes / max(self.text_tokens, 1)


class ShuffledBatches(Iterator):
    """Infinite iterator over shuffled batches.

    `state` is one integer: the number of rows drawn by all processes. After `restore`, also on another number of
    processes, the global batches continue with the same rows in the same order. `num_rows` is the number of rows in one
    pass, None for a mixture.
    """

    def __init__(
        self,
        dataset: Dataset | EndlessRows,
        batch_size: int,
        *,
        seed: int = 0,
        mesh: Mesh | None = None,
        process: tuple[int, int] | None = None,
        bytes_per_token: float = 1.0,
        digest: str | None = None,
        counts: Mapping[str, Any] | None = None,
        chosen: Mapping[str, Any] | None = None,
        threads: int = 2,
    ):
        """- `dataset`: shuffled anew for every pass over it; or a `Mixture`, which shuffles each of its parts so.
        - `mesh`, `process`: as in `CorpusSplit.batches`.
        - `digest`: identifies the data, if given: a run that was saved with it is not resumed on other data.
        - `counts`: what is in the data, and was left out of it: a run keeps it in its configuration.
        - `chosen`: values that loading chose, by the names of their flags: a run keeps them, and `--resume` takes them.
        - `threads`: read ahead, up to four batches each.

        **Raises** `ValueError` if the dataset has no rows, or the number of processes does not divide `batch_size`.
        """
        if mesh is not None:
            process = reader(mesh)
        self._process, self._rows = assign_rows(batch_size, process)
        self.batch_size = batch_size
        self.bytes_per_token = bytes_per_token
        self.digest = digest
        self.counts = counts
        self.chosen = chosen or {}
        self._threads = threads
        self.state = 0
        self._grain = import_optional("grain", "pip install 'equizoo[train]'")
        if isinstance(dataset, EndlessRows):
            self.num_rows = None
            self._rows_forever = dataset.rows_forever(seed, batch_size)
        else:
            self.num_rows = len(dataset)
            if not self.num_rows:
                raise ValueError("the dataset has no rows: take more data")
            self._rows_forever = self._grain.MapDataset.source(dataset).seed(seed).shuffle().repeat(None)
        self._iterator = None

    def __next__(self) -> _Batch:
        if self._iterator is None:
            index, count = self._process
            # Batch by this process's rows first, then stride over the processes: the rows of a process are contiguous
            # in the global batch, which is how `zoo.place_batch` assembles it.
            rows = self._rows_forever[self.state :].batch(self._rows, drop_remainder=True)[index::count]
            reading = self._grain.ReadOptions(num_threads=self._threads, prefetch_buffer_size=4 * self._threads)
            self._iterator = iter(rows.to_iter_dataset(reading))
        batch = next(self._iterator)
        self.state += self.batch_size
        return batch

    def count_steps(self, epochs: float | int) -> int:
        """Return the number of batches that hold so many passes over the rows, the last one rounded up.

        **Raises** `ValueError` for a mixture, which never ends.
        """
        if self.num_rows is None:
            raise ValueError(f"{epochs} epochs of a mixture: it has no end, so give a number of steps (--steps)")
        return math.ceil(round(epochs * self.num_rows / self.batch_size, 6))

    def __str__(self) -> str:
        if self.num_rows is None:
            return "a mixture, without an end"
        return f"{format_count(self.num_rows, 'row')}: a pass is {format_count(self.count_steps(1), 'step')}"

    def restore(self, state: int) -> None:
        """Continue from a saved `state`."""
        self.close()
        self.state = state

    def close(self) -> None:
        """Stop the prefetch threads; the next batch starts them again."""
        if self._iterator is not None:
            self._iterator.close()
            self._iterator = None


class OrderedBatches:
    """Re-iterable, deterministic batches of a dataset with `weights`.

    The last batch is filled with rows of zeros, with targets of -1; for `TokenWindows`, of separators.
    """

    def __init__(
        self,
        dataset: Dataset,
        batch_size: int,
        indices: Int[np.ndarray, "rows"] | None = None,
        *,
        token_bytes: Int[np.ndarray, "vocab"] | None = None,
        process: tuple[int, int] | None = None,
    ):
        """- `indices`: of the rows to read, all by default; see `spread_rows`.
        - `token_bytes`: bytes of text per token of the vocabulary, which only `bytes_per_token` needs.

        **Raises** `ValueError` if the number of processes does not divide `batch_size`.
        """
        self._process, self._rows = assign_rows(batch_size, process)
        self._dataset = dataset
        self._indices = np.arange(len(dataset)) if indices is None else indices
        self._token_bytes = token_bytes
        self.batch_size = batch_size
        self.vocab = None if token_bytes is None else len(token_bytes)

    @cached_property
    def bytes_per_token(self) -> float:
        """Mean bytes of text per target of nonzero weight, exactly.

        **Raises** `ValueError` if `token_bytes` is not known.
        """
        if self._token_bytes is None:
            raise ValueError("bytes per token are not known: these batches need `token_bytes` of the tokenizer")
        text_bytes = 0
        tokens = 0
        for index in self._indices[self._indices < len(self._dataset)]:
            row = self._dataset[int(index)]
            targets = row["targets"][row["weights"] > 0]
            text_bytes += int(self._token_bytes[targets].sum())
            tokens += len(targets)
        return text_bytes / max(tokens, 1)

    def __len__(self) -> int:
        return math.ceil(len(self._indices) / self.batch_size)

    def with_process(self, process: tuple[int, int]) -> "OrderedBatches":
        """Return the same batches, of which this process reads part `index` of `count`."""
        batches = copy.copy(self)
        batches._process, batches._rows = assign_rows(self.batch_size, process)
        return batches

    def __iter__(self) -> Iterator[_Batch]:
        for number in range(len(self)):
            first = number * self.batch_size + self._process[0] * self._rows
            rows = [self._read(number) for number in range(first, first + self._rows)]
            yield jax.tree.map(lambda *arrays: np.stack(arrays), *rows)

    def _read(self, number: int) -> _Row:
        """Read a row, or make one of padding beyond the last."""
        num_rows = len(self._dataset)
        index = int(self._indices[number]) if number < len(self._indices) else num_rows
        if index < num_rows or isinstance(self._dataset, TokenWindows):  # which end with windows of separators
            return self._dataset[index]
        padding = jax.tree.map(np.zeros_like, self._dataset[0])
        if "targets" in padding:
            padding["targets"] -= 1
        return padding


def bits_per_byte(
    nats: float | Float[Array, ""], text: CorpusSplit | ShuffledBatches | OrderedBatches
) -> float | Float[Array, ""]:
    """Convert a mean loss in nats per token of `text` to bits per byte, which is comparable across vocabularies."""
    return nats / (math.log(2) * text.bytes_per_token)


def assign_rows(batch_size: int, process: tuple[int, int] | None) -> tuple[tuple[int, int], int]:
    """Return (index, count) of this process, and its number of rows per batch."""
    index, count = process or (jax.process_index(), jax.process_count())
    if batch_size < 1 or batch_size % count:
        raise ValueError(
            f"a batch of {batch_size} windows cannot be shared evenly by {count} processes: take a multiple"
        )
    return (index, count), batch_size // count

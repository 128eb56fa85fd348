"""Rows packed with whole texts, by a plan that is made from the lengths before the first step.

    rows = PackedRows(tokens, mask, starts, seq_len=2048)
    batches = ShuffledBatches(rows, batch_size=8, seed=0)

Every row is found by its number. Packed rows are therefore shuffled, mixed and resumed like any other `Dataset`: the
position in them is one integer, on any number of processes.
"""

import copy
from functools import cached_property
from typing import Literal, get_args

import numpy as np
from jaxtyping import Bool, Float, Int, Integer, Shaped

TooLong = Literal["cut", "drop"]
_Row = dict[str, Shaped[np.ndarray, "..."]]
_MASK_CHUNK = 2**18


def plan_rows(
    lengths: Integer[np.ndarray, "items"], capacity: int
) -> tuple[Int[np.ndarray, "items"], Int[np.ndarray, "rows_and_one"]]:
    """Plan rows by best fit decreasing: the longest item first, each into the fullest row with room for it.

    Returns `(order, first)`: row r holds the items `order[first[r] : first[r + 1]]`, longest first. The plan depends
    only on the lengths and the capacity. Best fit for texts: Ding et al., arXiv:2404.10830, section 3.

    **Raises** `ValueError` for an item longer than `capacity` or shorter than 1.
    """
    if len(lengths) and lengths.max() > capacity:
        longest = int(lengths.argmax())
        raise ValueError(
            f"item {longest} has length {lengths[longest]}, but a row holds {capacity}: cut it, or leave it out"
        )
    if len(lengths) and lengths.min() < 1:
        shortest = int(lengths.argmin())
        raise ValueError(f"item {shortest} has length {lengths[shortest]}, expected at least 1: leave it out")
    ascending, counts = np.unique(lengths, return_counts=True)
    row_of_item: list[int] = []  # of the items by decreasing length
    num_rows = 0
    rows_by_room: list[list[int]] = [[] for _ in range(capacity + 1)]
    rooms = 0  # a bit for each room that some row has: the lowest bit from a length upward is its best fit
    for length, count in zip(ascending[::-1].tolist(), counts[::-1].tolist(), strict=True):
        while count:
            if not rooms >> length:
                num_new = -(-count // (capacity // length))
                rows_by_room[capacity] += range(num_rows, num_rows + num_new)
                rooms |= 1 << capacity
                num_rows += num_new
            fitting = rooms >> length
            room = length + (fitting & -fitting).bit_length() - 1
            # A row that still fits an item of this length is again its best fit, and is filled before the next row.
            items_per_row = min(room // length, count)
            rows = rows_by_room[room][-(count // items_per_row) :]
            del rows_by_room[room][-len(rows) :]
            if not rows_by_room[room]:
                rooms ^= 1 << room
            row_of_item += rows * items_per_row
            count -= len(rows) * items_per_row
            room -= items_per_row * length
            rows_by_room[room] += rows
            rooms |= 1 << room
    rows_of_items = np.array(row_of_item, np.int64)
    by_length = np.argsort(-lengths.astype(np.int64), kind="stable")
    order = by_length[np.argsort(rows_of_items, kind="stable")]
    first = np.concatenate([[0], np.cumsum(np.bincount(rows_of_items, minlength=num_rows))])
    return order, first


class PackedRows:
    """Rows of whole texts: a `Dataset` with rows of `seq_len` positions, as full as a plan can make them.

    A text of n tokens takes n - 1 positions of a row: each of its tokens but the last, with the next one as its target.
    A row has `tokens`, `targets` (-1 where there is none), `weights` (float32, the mask of the target), `segment_ids`
    (from 1 in each row, 0 for padding), `positions` (from 0 in each segment) and, if they are given, `labels`.

    `zoo.models.SequenceScore` reads a text at its last token. In `whole` rows a text of n tokens takes n positions: the
    last has no target, and `weights` are 1 there and 0 elsewhere.

    - `num_items`: items in the texts. `num_dropped`: items left out, too long or with a text of fewer than 2 tokens (in
      whole rows, of none).
    - `most_segments`: number of labels of a row.
    - `num_cut`: texts that were cut. Each part begins with the last token of the part before it, which is only a target
      there: every target of a text occurs exactly once.

    The first rows hold the longest texts: shuffle packed rows to train.
    """

    def __init__(
        self,
        tokens: Integer[np.ndarray, "tokens"],
        mask: Shaped[np.ndarray, "tokens"],
        starts: Integer[np.ndarray, "texts_and_one"],
        seq_len: int,
        *,
        items: Bool[np.ndarray, "items"] | None = None,
        texts_per_item: int = 1,
        too_long: TooLong = "cut",
        pack: bool = True,
        whole: bool = False,
        labels: Float[np.ndarray, "items"] | None = None,
    ):
        """- `tokens`, `mask`: of all texts, one after the other, such as memory-mapped files. They are not copied.
        - `starts`: text t is `tokens[starts[t] : starts[t + 1]]`.
        - `items`: the items to take, all by default.
        - `texts_per_item`: consecutive texts that stay together in a row, each a segment: 2 for pairs.
        - `too_long`: "cut" a text of more than `seq_len` targets, or "drop" the item.
        - `whole`: keep the last token of each text, for a score there.
        - `pack`: if False, every item, or part of a cut text, has a row of its own, in the order of the texts.
        - `labels`: of each item. The labels of a row, "texts", are the labels of its segments, parts of a cut text
          included, and 0 beyond the last segment. Their number is the largest number of segments in a row.

        **Raises** `ValueError` for texts that do not fit to tokens, mask or labels, and for `too_long="cut"` with items
        of several texts or with `whole`.
        """
        starts = np.asarray(starts, np.int64)
        _check_texts(tokens, mask, starts)
        num_texts = len(starts) - 1
        if seq_len < 1:
            raise ValueError(f"seq_len is {seq_len}: a row has at least 1 position")
        if too_long not in get_args(TooLong):
            raise ValueError(f"too_long is {too_long!r}: expected 'cut' or 'drop'")
        if texts_per_item < 1 or num_texts % texts_per_item:
            raise ValueError(f"{num_texts:,} texts do not make items of {texts_per_item} texts each")
        if texts_per_item > 1 and too_long == "cut":
            raise ValueError(f"an item of {texts_per_item} texts is not cut: take too_long='drop'")
        if whole and too_long == "cut":
            raise ValueError("a whole text is not cut: take too_long='drop'")
        self.seq_len = seq_len
        num_items = num_texts // texts_per_item
        for name, values in {"labels": labels, "items": items}.items():
            if values is not None and len(values) != num_items:
                raise ValueError(f"{len(values):,} {name} for {num_items:,} items: expected one for each")
        is_asked = np.ones(num_items, bool) if items is None else items
        self.num_items = int(np.count_nonzero(is_asked))

        sizes = np.diff(starts)  # in positions
        if not whole:
            sizes = np.maximum(sizes - 1, 0)
        item_sizes = sizes.reshape(-1, texts_per_item)
        is_kept = is_asked & (item_sizes > 0).all(axis=1)
        if too_long == "drop":
            is_kept &= item_sizes.sum(axis=1) <= seq_len
        self.num_dropped = int(np.count_nonzero(is_asked & ~is_kept))
        texts = np.flatnonzero(np.repeat(is_kept, texts_per_item))
        self.num_cut = int(np.count_nonzero(sizes[texts] > seq_len))
        texts, offsets = _cut_texts(texts, sizes[texts], seq_len)
        sizes = np.minimum(sizes[texts] - offsets, seq_len)

        item_sizes = sizes.reshape(-1, texts_per_item).sum(axis=1)
        if pack:
            order, first = plan_rows(item_sizes, seq_len)
        else:
            order = np.arange(len(item_sizes))
            first = np.arange(len(item_sizes) + 1)
        order = (order[:, None] * texts_per_item + np.arange(texts_per_item)).ravel()
        # Row r has the segments first[r] to first[r + 1]. A segment begins at a token, and has a size.
        self._first = first * texts_per_item
        self._starts = (starts[texts] + offsets)[order]
        self._sizes = sizes[order]
        self._items = texts[order] // texts_per_item
        self._labels = None
        if labels is not None:
            self._labels = labels[self._items].astype(np.float32)
        self._is_whole = whole
        self.most_segments = int(np.diff(self._first).max(initial=0))
        # Still the same files: every index into a `np.memmap` would make another one of its result.
        self._tokens = np.asarray(tokens)
        self._mask = np.asarray(mask)

    def pad_labels(self, segments: int) -> "PackedRows":
        """Return the same rows with labels of `segments` segments each, at least `most_segments`."""
        padded = copy.copy(self)
        padded.most_segments = segments
        return padded

    def list_items(self, index: int) -> list[int]:
        """Return the item of each segment of a row."""
        number = range(len(self))[index]
        return self._items[self._first[number] : self._first[number + 1]].tolist()

    def sum_items(self, values: Integer[np.ndarray, "items n"]) -> Integer[np.ndarray, "rows n"]:
        """Return the sum of the values of the items of each row, one for each segment."""
        if not len(self):
            return values[:0]
        return np.add.reduceat(values[self._items], self._first[:-1], axis=0)

    @property
    def num_targets(self) -> int:
        """Number of targets in all rows."""
        return self._num_positions - len(self._sizes) * self._is_whole

    @property
    def _num_positions(self) -> int:
        return int(self._sizes.sum())

    @cached_property
    def num_trained(self) -> int:
        """Number of targets with a weight other than 0, which reads the whole mask, once; in whole rows the number of
        texts."""
        if self._is_whole:
            return len(self._sizes)
        begins = np.sort(self._starts) + 1  # of the targets of each segment, which do not overlap
        ends = np.sort(self._starts + self._sizes) + 1
        trained = 0
        for start in range(0, len(self._mask), _MASK_CHUNK):
            chunk = np.append(self._mask[start : start + _MASK_CHUNK] != 0, False)
            stop = start + len(chunk) - 1
            overlapping = slice(np.searchsorted(ends, start, "right"), np.searchsorted(begins, stop))
            bounds = np.stack([begins[overlapping], ends[overlapping]], axis=1).clip(start, stop) - start
            trained += int(np.add.reduceat(chunk, bounds.ravel(), dtype=np.int64)[::2].sum())
        return trained

    @property
    def fill(self) -> float:
        """Share of the positions of all rows that hold a token."""
        return self._num_positions / max(len(self) * self.seq_len, 1)

    def __len__(self) -> int:
        return len(self._first) - 1

    def __getitem__(self, index: int) -> _Row:
        number = range(len(self))[index]
        segments = slice(self._first[number], self._first[number + 1])
        starts = self._starts[segments]
        sizes = self._sizes[segments]
        ends = np.cumsum(sizes)
        used = int(ends[-1])
        source = np.repeat(starts - (ends - sizes), sizes) + np.arange(used)
        row = {
            "tokens": np.zeros(self.seq_len, np.int32),
            "targets": np.full(self.seq_len, -1, np.int32),
            "weights": np.zeros(self.seq_len, np.float32),
            "segment_ids": np.zeros(self.seq_len, np.int32),
            "positions": np.zeros(self.seq_len, np.int32),
        }
        row["tokens"][:used] = self._tokens[source]
        if self._is_whole:
            following = np.minimum(source + 1, len(self._tokens) - 1)
            row["targets"][:used] = self._tokens[following]
            row["targets"][ends - 1] = -1
            row["weights"][ends - 1] = 1
        else:
            row["targets"][:used] = self._tokens[source + 1]
            row["weights"][:used] = self._mask[source + 1]
        row["segment_ids"][:used] = np.repeat(np.arange(1, len(sizes) + 1), sizes)
        row["positions"][:used] = source - np.repeat(starts, sizes)
        if self._labels is not None:
            row["labels"] = np.zeros(self.most_segments, np.float32)
            row["labels"][: len(sizes)] = self._labels[segments]
        return row


def _check_texts(
    tokens: Integer[np.ndarray, "tokens"], mask: Shaped[np.ndarray, "mask"], starts: Int[np.ndarray, "texts_and_one"]
) -> None:
    """**Raises** `ValueError` if the texts do not tile a part of the tokens, or the mask has another size."""
    if len(mask) != len(tokens):
        raise ValueError(f"the mask has {len(mask):,} values for {len(tokens):,} tokens: expected one for each")
    if not len(starts):
        raise ValueError("starts is empty: expected the start of each text and the end of the last")
    is_before = starts[1:] < starts[:-1]
    if is_before.any():
        text = int(is_before.argmax())
        raise ValueError(f"text {text} starts at {starts[text]:,} and ends at {starts[text + 1]:,}, before its start")
    if starts[0] < 0 or starts[-1] > len(tokens):
        raise ValueError(
            f"the texts are tokens {starts[0]:,} to {starts[-1]:,} of {len(tokens):,}: "
            "do starts and tokens come from the same data?"
        )


def _cut_texts(
    texts: Int[np.ndarray, "texts"], sizes: Int[np.ndarray, "texts"], seq_len: int
) -> tuple[Int[np.ndarray, "parts"], Int[np.ndarray, "parts"]]:
    """Return the text of each part of at most `seq_len` targets, and the offset of the part in its text."""
    num_parts = -(-sizes // seq_len)
    first_part = np.cumsum(num_parts) - num_parts
    part_in_text = np.arange(num_parts.sum()) - np.repeat(first_part, num_parts)
    return np.repeat(texts, num_parts), part_in_text * seq_len

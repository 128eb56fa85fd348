"""Packed rows: every target once, rows that fit, a plan that is the best fit, and losses as of separate texts."""

import itertools
import math
from functools import cache, partial

import equinox as eqx
import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import zoo
from tests.text.global_batches import are_same, read_rows
from zoo.text import packing
from zoo.text.batches import Dataset, OrderedBatches
from zoo.text.packing import PackedRows, plan_rows

KINDS = {"tokens": np.int32, "targets": np.int32, "weights": np.float32, "segment_ids": np.int32, "positions": np.int32}
lengths_of_texts = st.lists(st.integers(0, 40), max_size=30)
few_examples = settings(max_examples=40, deadline=None)


def make_texts(lengths, seed: int = 0, vocab: int = 1000):
    """Tokens, mask and starts of texts, behind three tokens of another one."""
    random = np.random.default_rng(seed)
    starts = 3 + np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    tokens = random.integers(0, vocab, starts[-1] + 2).astype(np.uint16)
    return tokens, random.integers(0, 2, len(tokens)).astype(np.uint8), starts


def list_segments(rows) -> list[list[dict[str, list]]]:
    """The segments of each row, after a check of the row itself."""
    found = []
    for row in rows:
        assert {name: x.dtype for name, x in row.items() if name != "labels"} == KINDS
        segment_ids = row["segment_ids"]
        used = np.count_nonzero(segment_ids)
        assert 0 < used <= rows.seq_len == len(segment_ids)
        padding = {name: set(row[name][used:].tolist()) for name in KINDS}
        assert all(values <= {-1 if name == "targets" else 0} for name, values in padding.items())
        count = segment_ids.max()
        assert segment_ids[:used].tolist() == sorted(segment_ids[:used]) and len(set(segment_ids[:used])) == count
        found.append([{name: row[name][segment_ids == i + 1].tolist() for name in KINDS} for i in range(count)])
    return found


def fill_slowly(lengths, capacity: int) -> list[int]:
    """The sizes of rows by best fit decreasing: the longest item first, each into the fullest row with room for it."""
    rows: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [row for row, size in enumerate(rows) if size + length <= capacity]
        if fitting:
            rows[max(fitting, key=lambda row: rows[row])] += length
        else:
            rows.append(length)
    return sorted(rows)


@given(st.data(), st.integers(1, 60))
@settings(max_examples=200, deadline=None)
def test_plan_is_best_fit_decreasing(data, capacity):
    lengths = np.array(data.draw(st.lists(st.integers(1, capacity), max_size=60)), np.int64)
    order, first = plan_rows(lengths, capacity)
    assert sorted(order.tolist()) == list(range(len(lengths)))
    assert first[0] == 0 and first[-1] == len(lengths) and (np.diff(first) > 0).all()
    rows = [lengths[order[start:stop]].tolist() for start, stop in itertools.pairwise(first)]
    assert all(row == sorted(row, reverse=True) for row in rows)
    assert sorted(map(sum, rows)) == fill_slowly(lengths.tolist(), capacity)


def test_plan_of_many_lengths_is_full_and_deterministic():
    lengths = np.minimum(np.random.default_rng(0).lognormal(6, 1, 100_000).astype(np.int32) + 1, 4096)
    order, first = plan_rows(lengths, 4096)
    sizes = np.add.reduceat(lengths[order], first[:-1])
    assert sizes.max() <= 4096 and sizes.mean() > 0.999 * 4096
    again = plan_rows(lengths.astype(np.uint16), 4096)
    assert np.array_equal(order, again[0]) and np.array_equal(first, again[1])


@pytest.mark.parametrize(
    ("length", "message"), [(9, "item 1 has length 9, but a row holds 8"), (0, "item 1 has length 0")]
)
def test_plan_refuses_lengths_that_no_row_holds(length, message):
    with pytest.raises(ValueError, match=message):
        plan_rows(np.array([8, length, 3]), 8)


@given(lengths_of_texts, st.integers(1, 20), st.booleans(), st.sampled_from(["cut", "drop"]), st.integers(0, 9))
@few_examples
def test_every_target_occurs_once(lengths, seq_len, pack, too_long, seed):
    tokens, mask, starts = make_texts(lengths, seed)
    # Tokens that tell their place: a target is found by its value.
    tokens = np.arange(len(tokens)).astype(np.uint16)
    rows = PackedRows(tokens, mask, starts, seq_len, pack=pack, too_long=too_long)
    segments = [segment for row in list_segments(rows) for segment in row]
    is_long = [length > seq_len + 1 for length in lengths]
    kept = [length > 1 and not (long and too_long == "drop") for length, long in zip(lengths, is_long, strict=True)]
    expected = [
        target
        for start, stop, keep in zip(starts[:-1], starts[1:], kept, strict=True)
        for target in range(start + 1, stop)
        if keep
    ]
    assert sorted(target for segment in segments for target in segment["targets"]) == expected
    assert isinstance(rows, Dataset) and len(rows) == len(list_segments(rows))
    assert rows.num_items == len(lengths) and rows.num_dropped == kept.count(False)
    assert rows.num_cut == (sum(is_long) if too_long == "cut" else 0)
    assert rows.num_targets == len(expected) and rows.num_trained == np.count_nonzero(mask[expected])
    assert rows.fill == len(expected) / max(len(rows) * seq_len, 1)
    for segment in segments:
        # The token before each target; so a part begins with the token that ended the one before.
        assert segment["tokens"] == [target - 1 for target in segment["targets"]]
        assert segment["weights"] == mask[segment["targets"]].tolist()
        assert segment["positions"] == list(range(len(segment["tokens"])))
        text = np.searchsorted(starts, segment["tokens"][0], "right")
        assert (segment["tokens"][0] - starts[text - 1]) % seq_len == 0 and segment["targets"][-1] < starts[text]
    if not pack:
        assert len(rows) == len(segments)
        assert [target for segment in segments for target in segment["targets"]] == expected


@given(lengths_of_texts, st.integers(1, 3), st.integers(2, 60), st.booleans())
@few_examples
def test_items_of_several_texts_are_not_split(lengths, texts_per_item, seq_len, pack):
    lengths = lengths[: len(lengths) // texts_per_item * texts_per_item]
    tokens, mask, starts = make_texts(lengths)
    tokens = np.arange(len(tokens)).astype(np.uint16)
    labels = np.arange(1, len(lengths) // texts_per_item + 1).astype(np.float32)
    options = {"texts_per_item": texts_per_item, "pack": pack, "labels": labels}
    rows = PackedRows(tokens, mask, starts, seq_len, too_long="drop", **options)
    items = []
    most = 0
    for row, segments in zip(rows, list_segments(rows), strict=True):
        texts = [int(np.searchsorted(starts, segment["tokens"][0], "right")) - 1 for segment in segments]
        for text, segment in zip(texts, segments, strict=True):
            assert segment["tokens"] == list(range(starts[text], starts[text + 1] - 1))
        for first in range(0, len(texts), texts_per_item):
            item, rest = divmod(texts[first], texts_per_item)
            assert rest == 0 and texts[first : first + texts_per_item] == [
                *range(texts[first], texts[first] + texts_per_item)
            ]
            items.append(item)
        assert row["labels"].dtype == np.float32
        assert row["labels"][: len(texts)].tolist() == [text // texts_per_item + 1 for text in texts]
        assert not row["labels"][len(texts) :].any()
        most = max(most, len(texts))
    assert {len(row["labels"]) for row in rows} <= {most}
    by_item = np.reshape(lengths, (-1, texts_per_item)).astype(int) - 1
    fits = (by_item >= 1).all(1) & (by_item.sum(1) <= seq_len)
    assert sorted(items) == np.flatnonzero(fits).tolist()
    assert rows.num_items == len(fits) and rows.num_dropped == np.count_nonzero(~fits)
    if not pack:
        assert items == sorted(items) and len(rows) == len(items)


@given(lengths_of_texts, st.integers(1, 2), st.integers(1, 60), st.booleans())
@few_examples
def test_whole_texts_end_with_a_weight_and_without_a_target(lengths, texts_per_item, seq_len, pack):
    lengths = lengths[: len(lengths) // texts_per_item * texts_per_item]
    tokens, mask, starts = make_texts(lengths)
    tokens = np.arange(len(tokens)).astype(np.uint16)[: starts[-1]]  # the last text ends with the tokens
    options = {"texts_per_item": texts_per_item, "too_long": "drop", "whole": True, "pack": pack}
    rows = PackedRows(tokens, mask[: starts[-1]], starts, seq_len, **options)
    segments = [segment for row in list_segments(rows) for segment in row]
    texts = [list(range(start, stop)) for start, stop in itertools.pairwise(starts.tolist())]
    items = [texts[i : i + texts_per_item] for i in range(0, len(texts), texts_per_item)]
    kept = [item for item in items if all(item) and sum(map(len, item)) <= seq_len]
    assert sorted(segment["tokens"] for segment in segments) == sorted(text for item in kept for text in item)
    for segment in segments:
        size = len(segment["tokens"])
        assert segment["targets"] == [*segment["tokens"][1:], -1]
        assert segment["weights"] == [0] * (size - 1) + [1] and segment["positions"] == list(range(size))
    positions = sum(len(segment["tokens"]) for segment in segments)
    assert rows.num_trained == len(segments) and rows.num_targets == positions - len(segments)
    assert rows.num_dropped == len(items) - len(kept) and rows.num_cut == 0
    assert rows.fill == pytest.approx(positions / max(len(rows) * seq_len, 1))


def test_parts_of_a_text_have_its_label():
    tokens, mask, starts = make_texts([3, 12])
    rows = PackedRows(tokens, mask, starts, 4, pack=False, labels=np.array([7.0, 9.0], np.float32))
    assert [row["labels"].tolist() for row in rows] == [[7], [9], [9], [9]]


@pytest.mark.parametrize("chunk", [1, 7, 50])
def test_trained_targets_are_counted_in_chunks(monkeypatch, chunk):
    tokens, mask, starts = make_texts([3, 0, 1, 30, 12, 2])
    monkeypatch.setattr(packing, "_MASK_CHUNK", chunk)
    rows = PackedRows(tokens, mask, starts, 8)
    assert rows.num_trained == sum(np.count_nonzero(row["weights"]) for row in rows) > 0


def test_files_are_not_read_before_a_row_is(tmp_path):
    (tmp_path / "tokens.bin").write_bytes(np.arange(100, dtype=np.uint16).tobytes())
    (tmp_path / "mask.bin").write_bytes(np.ones(100, np.uint8).tobytes())
    tokens = np.memmap(tmp_path / "tokens.bin", np.uint16, "r+")
    mask = np.memmap(tmp_path / "mask.bin", np.uint8, "r")
    rows = PackedRows(tokens, mask, np.array([0, 60, 100]), 64)
    tokens += 7
    assert [row["tokens"][0] for row in rows] == [7, 67]


def test_rows_are_found_by_number_only():
    rows = PackedRows(*make_texts([5, 6, 7]), 8)
    assert all(np.array_equal(rows[-1][name], rows[len(rows) - 1][name]) for name in KINDS)
    with pytest.raises(IndexError):
        rows[len(rows)]


@pytest.mark.usefixtures("no_type_checks")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seq_len": 0}, "seq_len is 0"),
        ({"too_long": "crop"}, "too_long is 'crop': expected 'cut' or 'drop'"),
        ({"texts_per_item": 2, "too_long": "drop"}, "3 texts do not make items of 2 texts each"),
        ({"texts_per_item": 3}, "an item of 3 texts is not cut: take too_long='drop'"),
        ({"whole": True}, "a whole text is not cut: take too_long='drop'"),
        ({"labels": np.ones(2, np.float32)}, "2 labels for 3 items"),
        ({"mask": np.ones(4, np.uint8)}, "the mask has 4 values for 20 tokens"),
        ({"starts": np.array([0, 5, 4, 20])}, "text 1 starts at 5 and ends at 4, before its start"),
        ({"starts": np.array([0, 5, 9, 21])}, "the texts are tokens 0 to 21 of 20"),
        ({"starts": np.array([], np.int64)}, "starts is empty"),
    ],
)
def test_bad_arguments_are_named(change, message):
    given = {"tokens": np.arange(20), "mask": np.ones(20, np.uint8), "starts": np.array([0, 5, 9, 20]), "seq_len": 8}
    with pytest.raises(ValueError, match=message):
        PackedRows(**(given | change))


SIZES = {"vocab": 32, "embed": 16, "layers": 2, "key": jax.random.key(0)}
MODELS = {
    "Transformer": partial(zoo.models.Transformer, **SIZES, heads=2, mlp=16),
    "Mamba2": partial(zoo.models.Mamba2, **SIZES, head_dim=8, state_dim=8),
    "GLA": partial(zoo.models.GLA, **SIZES, heads=2, mlp=16),
    "MixtureOfExperts": partial(zoo.models.MixtureOfExperts, **SIZES, heads=2, mlp=8, experts=4, top=2),
}


@eqx.filter_jit
def sum_losses(model, batch):
    def total_loss(model):
        return zoo.cross_entropy(model, batch)

    return eqx.filter_value_and_grad(total_loss, has_aux=True)(model)


@pytest.mark.parametrize("name", MODELS)
def test_packed_rows_give_the_loss_of_separate_texts(name):
    """One program sums packed and separate rows, the last batch of either filled with rows of weight 0."""
    model = MODELS[name]()
    texts = make_texts([9, 2, 30, 5, 1, 14, 7, 3, 40, 6], vocab=32)
    sums = []
    for pack in (True, False):
        rows = PackedRows(*texts, 16, pack=pack)
        results = [sum_losses(model, batch) for batch in OrderedBatches(rows, 5, process=(0, 1))]
        assert len(results) == math.ceil(len(rows) / 5) and len(rows) % 5
        sums.append(jax.tree.map(lambda *x: np.sum(np.stack(x), axis=0, dtype=np.float64), *results))
    ((packed_loss, packed_count), packed_grads), ((loss, count), grads) = sums
    assert packed_count == count == PackedRows(*texts, 16).num_trained > 20
    assert packed_loss == pytest.approx(loss, rel=1e-5)
    for packed, separate in zip(jax.tree.leaves(packed_grads), jax.tree.leaves(grads), strict=True):
        np.testing.assert_allclose(packed, separate, atol=1e-5 * np.linalg.norm(separate), rtol=0)


@cache
def read_whole(seed: int) -> tuple[PackedRows, list[dict]]:
    """Packed rows, and those of the first batches that one process reads: almost two passes."""
    rows = PackedRows(*make_texts(np.arange(60) % 17), 16)
    return rows, read_rows(rows, 6, seed=seed, processes=1, start=0, steps=8)


@given(st.integers(0, 36), st.sampled_from([1, 2, 3]), st.integers(0, 1))
@settings(max_examples=8, deadline=None)
def test_rows_resume_on_another_number_of_processes(start, processes, seed):
    rows, expected = read_whole(seed)
    assert len(rows) < 30
    found = read_rows(rows, 6, seed=seed, processes=processes, start=start, steps=2)
    assert are_same(found, expected[start : start + 12])

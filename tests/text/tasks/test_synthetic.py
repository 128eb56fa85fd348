"""Synthetic tasks: recall and needles against a dictionary, word problems against composed permutations."""

import itertools

import numpy as np
import pytest

from zoo.text.batches import Dataset
from zoo.text.tasks.synthetic import GROUPS, AssociativeRecall, GroupWords, NeedleRetrieval
from zoo.train import stack_rows


@pytest.mark.parametrize(("vocab", "seq", "pairs"), [(16, 16, 3), (64, 32, 8), (9, 24, 2)])
def test_associative_recall_targets_are_the_values_of_queries(vocab, seq, pairs):
    """Compare with a dictionary filled from the pairs."""
    task = AssociativeRecall(vocab, seq, pairs, seed=3)
    for index in range(50):
        row = task[index]
        tokens, targets, weights = (row[name].tolist() for name in ("tokens", "targets", "weights"))
        stored = dict(zip(tokens[: 2 * pairs : 2], tokens[1 : 2 * pairs : 2], strict=True))
        assert len(stored) == pairs and all(0 < key < vocab // 2 <= value < vocab for key, value in stored.items())
        queries = [position for position, token in enumerate(tokens) if token and position >= 2 * pairs]
        assert sorted(tokens[position] for position in queries) == sorted(stored)
        assert [position for position, weight in enumerate(weights) if weight] == queries
        assert all(targets[position] == stored[tokens[position]] for position in queries)
        assert {weights[position] for position in queries} == {1.0}


def test_associative_recall_rows_depend_on_index_and_seed_alone():
    rows = [
        AssociativeRecall(64, 32, 4, seed=seed)[index]["tokens"] for seed, index in ((0, 0), (0, 0), (0, 1), (1, 0))
    ]
    assert (rows[0] == rows[1]).all() and (rows[0] != rows[2]).any() and (rows[0] != rows[3]).any()


def test_associative_recall_short_gaps_are_likelier():
    task = AssociativeRecall(64, 64, 1, gap_exponent=0.01, seed=0)
    gaps = [np.flatnonzero(task[index]["weights"])[0] // 2 - 1 for index in range(500)]
    counts = np.bincount(gaps, minlength=31)
    assert counts[0] > counts[1] > counts[3] and counts[0] / 500 == pytest.approx(task.gap_probabilities[0], abs=0.06)


@pytest.mark.parametrize(("vocab", "seq", "pairs", "queries"), [(32, 16, 1, 1), (64, 64, 8, 3), (16, 32, 4, 8)])
def test_needle_retrieval_asks_for_values_hidden_in_filler(vocab, seq, pairs, queries):
    """Compare with a dictionary read from the haystack; depths with the places of its keys."""
    task, half, found = NeedleRetrieval(vocab, seq, pairs, queries, seed=3), vocab // 2, set()
    for row in (task[index] for index in range(50)):
        tokens, end = row["tokens"].tolist(), seq - 2 * queries
        places = [place for place, token in enumerate(tokens[:end]) if half <= token < half + vocab // 4]
        stored = {tokens[place]: tokens[place + 1] for place in places}
        assert len(stored) == pairs and all(value >= 3 * (vocab // 4) for value in stored.values())
        assert sum(token >= half for token in tokens) == 2 * pairs + queries  # the rest is filler
        asked = list(range(end + 1, seq, 2))
        assert np.flatnonzero(row["weights"]).tolist() == asked and asked[-1] == seq - 1
        assert [row["targets"][place] for place in asked] == [stored[tokens[place]] for place in asked]
        depths = task.measure_depths(row["tokens"][None], queries)[0]
        assert depths.tolist() == [tokens.index(tokens[place]) / end for place in asked]
        found |= set(places)
    assert len(found) > min(pairs, 8) * 2 and (row["tokens"] == task[49]["tokens"]).all()


@pytest.mark.parametrize(
    ("pairs", "queries", "message"),
    [
        (0, 1, "at least one pair and one query, not 0 and 1"),
        (4, 5, "4 pairs and 5 queries want documents of at least 18 tokens, not 16"),
        (5, 1, "a vocabulary of at least 20, not 16"),
    ],
)
def test_needle_retrieval_refuses_rows_that_do_not_fit(pairs, queries, message):
    with pytest.raises(ValueError, match=message):
        NeedleRetrieval(16, 16, pairs, queries)
    with pytest.raises(ValueError, match="rows hold 16 tokens times a power of two, not 48"):
        NeedleRetrieval(16, 48, 1, min_seq_len=16)


def test_needle_retrieval_packs_documents_of_every_length():
    task = NeedleRetrieval(32, 64, 2, 3, min_seq_len=16, seed=1)
    for index, length in enumerate((16, 32, 64, 16)):
        row = task[index]
        assert row["segment_ids"].tolist() == [place // length for place in range(64)]
        assert row["positions"].tolist() == [place % length for place in range(64)]
        for first in range(0, 64, length):
            tokens, targets = (row[name][first : first + length].tolist() for name in ("tokens", "targets"))
            values = dict(itertools.pairwise(tokens[: length - 6]))
            assert targets[-5::2] == [values[token] for token in tokens[-5::2]] and not any(targets[:-5])


@pytest.mark.parametrize(("group", "order", "points"), [("parity", 2, 2), ("s3", 6, 3), ("a4", 12, 4), ("s5", 120, 5)])
def test_group_words_targets_are_products_of_permutations(group, order, points):
    elements = GROUPS[group]
    assert len(set(elements)) == order and elements[0] == tuple(range(points))
    task = GroupWords(group, 20, seed=1)
    for index in range(20):
        row, things = task[index], list(range(points))
        for token, target in zip(row["tokens"], row["targets"], strict=True):
            moved = elements[token]
            things = [moved[thing] for thing in things]
            assert tuple(things) == elements[target]


def test_group_words_parity_counts_ones():
    row = GroupWords("parity", 30, seed=0)[7]
    assert row["targets"].tolist() == (np.cumsum(row["tokens"]) % 2).tolist() and 0 < row["tokens"].sum() < 30


@pytest.mark.parametrize("seed", [0, 5])
def test_group_words_rows_depend_on_index_and_seed_alone(seed):
    first, again, other = (GroupWords("a4", 12, seed=number) for number in (seed, seed, seed + 1))
    assert (first[3]["tokens"] == again[3]["tokens"]).all()
    assert (first[3]["tokens"] != first[4]["tokens"]).any() and (first[3]["tokens"] != other[3]["tokens"]).any()


def test_synthetic_tasks_are_datasets_of_int32_tokens():
    for task in (AssociativeRecall(16, 16, 3, rows=7), GroupWords("s3", 16, rows=7)):
        assert isinstance(task, Dataset) and len(task) == 7
        batch = stack_rows(task, 3)
        assert batch["tokens"].shape == (3, 16) and (batch["targets"][2] == task[2]["targets"]).all()
        assert all(task[0][name].dtype == np.int32 and task[0][name].shape == (16,) for name in ("tokens", "targets"))


def test_synthetic_tasks_reject_impossible_arguments():
    with pytest.raises(ValueError, match="5 pairs and as many queries want rows of at least 20 tokens, not 16"):
        AssociativeRecall(16, 16, 5)
    with pytest.raises(ValueError, match="name one of the groups parity, s3, a4, s5, not s4"):
        GroupWords("s4", 8)

"""Mixtures: rows in proportion, phases at their steps, and the same global batches for any number of processes."""

import itertools
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.text.global_batches import are_same, read_rows
from zoo.text.batches import Dataset, EndlessRows, TokenWindows
from zoo.text.mixture import Mixture
from zoo.text.packing import PackedRows

weight = st.floats(1e-6, 1e6)


class Numbered:
    """Rows that tell the number of their part and their own."""

    def __init__(self, part: int, rows: int):
        self.part = part
        self.rows = rows

    def __len__(self):
        return self.rows

    def __getitem__(self, index):
        return {"tokens": np.array([self.part, range(self.rows)[index]], np.int32)}


def make_mixture(lengths, *phases, batch_size: int = 1) -> tuple[Mixture, list[tuple[int, dict]]]:
    parts = {f"part {i}": Numbered(i, length) for i, length in enumerate(lengths)}
    phases = [(step, dict(zip(parts, weights, strict=True))) for step, weights in phases]
    return Mixture(parts, phases)


@given(st.lists(weight, min_size=1, max_size=6), st.integers(1, 400))
@settings(max_examples=60, deadline=None)
def test_rows_are_drawn_in_proportion(weights, rows):
    names = [f"part {i}" for i in range(len(weights))]
    mixture = Mixture({name: Numbered(i, 5) for i, name in enumerate(names)}, dict(zip(names, weights, strict=True)))
    shares = np.array(weights) / sum(weights)
    counts = np.array(list(mixture.count_rows(rows, 1).values()))
    assert counts.sum() == rows and (abs(counts - rows * shares) < len(weights) + 1e-3).all()
    many = np.array(list(mixture.count_rows(10**14, 1).values()))
    assert abs(many / 10**14 - shares).max() < 1e-8 and (many > 0).all()


def test_a_tiny_weight_gets_rows():
    parts = {"most": Numbered(0, 5), "least": Numbered(1, 5)}
    assert Mixture(parts, {"most": 1, "least": 1e-300}).count_rows(10**10, 1) == {"most": 10**10 - 9, "least": 9}


phase_weights = st.lists(st.integers(0, 3), min_size=3, max_size=3).filter(any)


@given(st.lists(st.tuples(st.integers(1, 9), phase_weights), min_size=1, max_size=3), st.integers(1, 3), st.data())
@settings(max_examples=15, deadline=None)
def test_parts_are_read_in_passes_over_all_phases(later, batch_size, data):
    steps = [0, *np.cumsum([steps for steps, _ in later]).tolist()]
    all_weights = [[1, 2, 3], *(weights for _, weights in later)]
    lengths = data.draw(st.lists(st.integers(5, 30), min_size=3, max_size=3))
    mixture = make_mixture(lengths, *zip(steps, all_weights, strict=True))
    rows = mixture.rows_forever(3, batch_size)
    total = (steps[-1] + 10) * batch_size
    drawn = [tuple(rows[n]["tokens"].tolist()) for n in range(total)]
    for part, length in enumerate(lengths):
        indices = [index for found, index in drawn if found == part]
        for first in range(0, len(indices), length):
            pass_over_part = indices[first : first + length]
            assert len(set(pass_over_part)) == len(pass_over_part)
    counts = dict.fromkeys(mixture.parts, 0)
    for n, (part, _) in enumerate(drawn):
        assert mixture.count_rows(n, batch_size) == counts
        counts[f"part {part}"] += 1
    for (start, stop), weights in zip(itertools.pairwise([*steps, steps[-1] + 10]), all_weights, strict=True):
        within = [part for part, _ in drawn[start * batch_size : stop * batch_size]]
        for part, share in enumerate(np.array(weights) / sum(weights)):
            assert abs(within.count(part) - len(within) * share) < 3 and (share or part not in within)


def test_orders_differ_by_seed_and_by_pass():
    mixture = make_mixture([40, 40], (0, [1, 1]))
    orders = []
    for seed in (0, 1):
        rows = mixture.rows_forever(seed, 1)
        orders += [[rows[n]["tokens"].tolist() for n in range(start, start + 80)] for start in (0, 80)]
    assert all(sorted(order) == sorted(orders[0]) for order in orders)
    assert all(a != b for a, b in itertools.combinations(orders, 2))


@cache
def read_whole() -> tuple[Mixture, list[dict]]:
    """A mixture of packed rows in three phases, and the rows of its first eleven steps."""
    parts: dict[str, Dataset] = {}
    for number, name in enumerate(("web", "code")):
        lengths = np.random.default_rng(number).integers(2, 30, 20 + 30 * number)
        starts = np.concatenate([[0], np.cumsum(lengths)])
        tokens = 1000 * number + np.arange(starts[-1])
        parts[name] = PackedRows(tokens, np.ones(len(tokens), np.uint8), starts, 32)
    phases = ((0, {"web": 0.7, "code": 0.3}), (3, {"web": 0.0, "code": 1.0}), (5, {"web": 5, "code": 3}))
    mixture = Mixture(parts, phases)
    return mixture, read_rows(mixture, 6, seed=4, processes=1, start=0, steps=11)


@given(st.integers(0, 54), st.sampled_from([1, 2, 3]))
@settings(max_examples=10, deadline=None)
def test_batches_resume_on_another_number_of_processes(start, processes):
    mixture, expected = read_whole()
    assert isinstance(mixture, EndlessRows)
    found = read_rows(mixture, 6, seed=4, processes=processes, start=start, steps=2)
    assert are_same(found, expected[start : start + 12])


def test_phases_begin_at_their_steps():
    mixture, rows = read_whole()
    is_code = np.array([row["tokens"][0] >= 1000 for row in rows])
    assert is_code[18:30].all() and 4 <= is_code[:18].sum() <= 7 and 12 <= is_code[30:].sum() <= 15
    assert mixture.count_rows(len(rows), 6) == {"web": np.count_nonzero(~is_code), "code": np.count_nonzero(is_code)}


ONE_OF_EACH = {"web": Numbered(0, 4), "code": Numbered(1, 5)}


@pytest.mark.usefixtures("no_type_checks")
@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"web": 1.0}, "the weights from step 0 name 'web': expected one for each part, 'web', 'code'"),
        ({"web": 1.0, "code": 1.0, "math": 1.0}, "name 'web', 'code', 'math': expected one for each part"),
        ({"web": 1.0, "code": -1.0}, "the weight of 'code' from step 0 is -1.0: expected a positive number"),
        ({"web": 1.0, "code": float("nan")}, "the weight of 'code' from step 0 is nan"),
        ({"web": 1.0, "code": float("inf")}, "the weight of 'code' from step 0 is inf"),
        ({"web": 1.0, "code": 0.0}, "the weight of 'code' is 0 at every step: leave that part out"),
        (((0, {"web": 1, "code": 1}), (5, {"web": 0, "code": 0})), "all weights from step 5 are 0"),
        (((1, {"web": 1, "code": 1}),), r"the phases begin at steps \[1\]: expected 0"),
        (((0, {"web": 1, "code": 1}), (0, {"web": 1, "code": 1})), r"begin at steps \[0, 0\]"),
        ((), r"weights are \(\): expected \{part: weight\} or phases"),
        ([0.7, 0.3], r"weights are \[0.7, 0.3\]: expected \{part: weight\} or phases"),
        (((0.0, {"web": 1, "code": 1}),), "weights are .* or phases"),
    ],
)
def test_bad_weights_are_named(weights, message):
    with pytest.raises((ValueError, TypeError), match=message):
        Mixture(ONE_OF_EACH, weights)


@pytest.mark.usefixtures("no_type_checks")
@pytest.mark.parametrize(
    ("part", "message"),
    [
        (
            TokenWindows(np.arange(1, 9), 2),
            r"'tokens' of a row is int32\[3\] in part 'web' and int32\[2\] in part 'code'",
        ),
        ([{"tokens": np.zeros(3, np.int32)}], "'targets' of a row is .* in part 'web' and nothing in part 'code'"),
        (TokenWindows(np.arange(0), 3), "part 'code' has no rows: leave it out"),
        (iter(()), "part 'code' is a tuple_iterator: expected a dataset with a length"),
    ],
)
def test_parts_with_other_rows_are_named(part, message):
    with pytest.raises((ValueError, TypeError), match=message):
        Mixture({"web": TokenWindows(np.arange(1, 9), 3), "code": part}, {"web": 1, "code": 1})


def test_a_mixture_has_parts_and_whole_batches():
    with pytest.raises(ValueError, match="the mixture has no parts"):
        Mixture({}, {})
    mixture = Mixture(ONE_OF_EACH, {"web": 1, "code": 1})
    with pytest.raises(ValueError, match="batch_size is 0"):
        mixture.rows_forever(0, 0)
    with pytest.raises(ValueError, match="-1 rows were asked for"):
        mixture.count_rows(-1, 1)

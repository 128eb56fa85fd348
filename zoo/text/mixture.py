"""Mixtures of datasets, with weights that may change at given steps.

    mixture = Mixture({"web": web, "code": code}, {"web": 0.7, "code": 0.3})
    mixture = Mixture(parts, ((0, {"web": 0.7, "code": 0.3}), (10_000, {"web": 0.2, "code": 0.8})))
    batches = ShuffledBatches(mixture, batch_size=8, seed=0)

The part that row n comes from, and its index in the part, depend only on n. The position in a mixture is therefore one
integer, as in a dataset, on any number of processes.
"""

import bisect
import copy
import itertools
import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from zoo._optional import import_optional

from .batches import Dataset

_Weights = Mapping[str, float | int]
_LARGEST_SHARE = 10**9


class Mixture:
    """Rows of several datasets, shuffled and drawn in proportion to weights.

    All parts have rows of the same keys, shapes and dtypes. A part is repeated forever, in a new order for each pass. A
    weight is a share of rows, hence of tokens too where all rows are full. Among the first rows of a phase, however
    many, each part has its share to within the number of parts.
    """

    def __init__(self, parts: Mapping[str, Dataset], weights: _Weights | Sequence[tuple[int, _Weights]]):
        """- `weights`: one for each part, on any scale; or phases `(step, weights)`, each of which holds from its step
          on, the first from step 0. In a phase a weight may be 0 if another phase gives rows to that part.

        **Raises** `ValueError` for weights that do not match the parts, for phases that are not in order, and for parts
        without rows or with different rows; `TypeError` for anything else than a mapping or phases.
        """
        self.parts = dict(parts)
        _check_rows(self.parts)
        phases = _list_phases(weights)
        for step, phase_weights in phases:
            _check_weights(phase_weights, self.parts, step)
        for name in self.parts:
            if not any(phase_weights[name] for _, phase_weights in phases):
                raise ValueError(f"the weight of {name!r} is 0 at every step: leave that part out")
        self._phases = [(step, _round_shares([w[name] for name in self.parts])) for step, w in phases]

    def with_parts(self, parts: Mapping[str, Dataset]) -> "Mixture":
        """Return the same mixture of other datasets, with as many rows each."""
        mixture = copy.copy(self)
        mixture.parts = dict(parts)
        return mixture

    def rows_forever(self, seed: int, batch_size: int) -> Any:
        """Return a `grain.MapDataset` without an end: the rows of step s are `batch_size * s` and those that follow.

        Part i is shuffled with the seed `seed + i`.
        """
        grain = import_optional("grain", "pip install 'equizoo[train]'")
        parts = [
            grain.MapDataset.source(part).seed(seed + number).shuffle().repeat(None)
            for number, part in enumerate(self.parts.values())
        ]
        return grain.MapDataset.select_from_datasets(parts, _Selection(self._phases, len(parts), batch_size))

    def count_rows(self, rows: int, batch_size: int) -> dict[str, int]:
        """Count the rows of each part among the first `rows`. Divided by the length of the part: the passes over it."""
        counts = _Selection(self._phases, len(self.parts), batch_size).count_rows(rows)
        return dict(zip(self.parts, counts, strict=True))


class _Phase(NamedTuple):
    """Rows from `first_row` on, after `counts` rows of each part, with integer `shares`."""

    first_row: int
    counts: list[int]
    shares: list[int]

    def count_rows(self, rows: int) -> list[int]:
        """Count the rows of each part among the first `rows` of the mixture.

        The first part gets its share of the rows, rounded up; the second part its share of the rest, and so on. With
        one row more exactly one of the counts is larger by one: that row's part, and the count before is its index.
        """
        counts = list(self.counts)
        rest = rows - self.first_row
        rest_share = sum(self.shares)
        for part, share in enumerate(self.shares):
            if share:
                later = rest * (rest_share - share) // rest_share
                counts[part] += rest - later
                rest = later
                rest_share -= share
        return counts


class _Selection:
    """A `grain.transforms.DatasetSelectionMap`: from the number of a row to its part, and its index in the part."""

    def __init__(self, phases: list[tuple[int, list[int]]], num_parts: int, batch_size: int):
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}: expected at least 1 row")
        counts = [0] * num_parts
        self._phases: list[_Phase] = []
        for step, shares in phases:
            if self._phases:
                counts = self._phases[-1].count_rows(step * batch_size)
            self._phases.append(_Phase(step * batch_size, counts, shares))
        self._first_rows = [phase.first_row for phase in self._phases]

    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, row: int) -> tuple[int, int]:
        phase = self._find_phase(row)
        before = phase.count_rows(row)
        after = phase.count_rows(row + 1)
        part = next(part for part, count in enumerate(before) if after[part] > count)
        return part, before[part]

    def count_rows(self, rows: int) -> list[int]:
        return self._find_phase(rows).count_rows(rows)

    def _find_phase(self, row: int) -> _Phase:
        if row < 0:
            raise ValueError(f"{row} rows were asked for: expected at least 0")
        return self._phases[bisect.bisect_right(self._first_rows, row) - 1]


def _check_rows(parts: Mapping[str, Dataset]) -> None:
    """**Raises** `ValueError` for no parts, a part without rows, or rows that cannot be stacked into one batch."""
    if not parts:
        raise ValueError("the mixture has no parts: expected at least one dataset")
    described = {}
    for name, part in parts.items():
        if not isinstance(part, Dataset):
            raise TypeError(f"part {name!r} is a {type(part).__name__}: expected a dataset with a length")
        if not len(part):
            raise ValueError(f"part {name!r} has no rows: leave it out")
        row = part[0]
        described[name] = {key: _describe(x) for key, x in row.items()}
    first, *others = described
    for name in others:
        for key in {**described[first], **described[name]}:
            expected = described[first].get(key, "nothing")
            found = described[name].get(key, "nothing")
            if found != expected:
                raise ValueError(
                    f"{key!r} of a row is {expected} in part {first!r} and {found} in part {name!r}: "
                    "rows of all parts must have the same keys, shapes and dtypes"
                )


def _describe(value: Any) -> str:
    """Return dtype and shape of an array, or of each of several."""
    return ", ".join(f"{np.asarray(x).dtype}{list(np.shape(x))}" for x in jax.tree.leaves(value))


def _list_phases(weights: _Weights | Sequence[tuple[int, _Weights]]) -> list[tuple[int, _Weights]]:
    """**Raises** `TypeError` or `ValueError` if the weights are neither a mapping nor phases in order."""
    if isinstance(weights, Mapping):
        return [(0, weights)]
    try:
        phases = [(step, phase_weights) for step, phase_weights in weights]
    except (TypeError, ValueError):
        phases = []
    if not phases or not all(isinstance(step, int) and isinstance(w, Mapping) for step, w in phases):
        raise TypeError(f"weights are {weights!r}: expected {{part: weight}} or phases ((step, {{part: weight}}), ...)")
    steps = [step for step, _ in phases]
    if steps[0] != 0 or any(later <= step for step, later in itertools.pairwise(steps)):
        raise ValueError(f"the phases begin at steps {steps}: expected 0, and then increasing steps")
    return phases


def _check_weights(weights: _Weights, parts: Mapping[str, Dataset], step: int) -> None:
    """**Raises** `ValueError` for missing or unknown parts, and weights that are negative, not finite, or all 0."""
    if set(weights) != set(parts):
        raise ValueError(
            f"the weights from step {step} name {', '.join(map(repr, weights)) or 'nothing'}: "
            f"expected one for each part, {', '.join(map(repr, parts))}"
        )
    for name, weight in weights.items():
        if not 0 <= weight < math.inf:
            raise ValueError(f"the weight of {name!r} from step {step} is {weight}: expected a positive number")
    if not any(weights.values()):
        raise ValueError(f"all weights from step {step} are 0: expected at least one positive weight")


def _round_shares(weights: Sequence[float | int]) -> list[int]:
    """Round weights to integers in the same proportion: exact, so that counting rows is. A positive one stays so."""
    largest = max(weights)
    return [max(round(weight / largest * _LARGEST_SHARE), int(weight > 0)) for weight in weights]

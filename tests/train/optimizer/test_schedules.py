"""Warmup, stable and decay: each value by the formula, the same stable part for every length, and errors."""

import math

import numpy as np
import pytest

from zoo import train

REMAINING = {
    "sqrt": lambda x: 1 - math.sqrt(x),
    "linear": lambda x: 1 - x,
    "cosine": lambda x: (1 + math.cos(math.pi * x)) / 2,
}


@pytest.mark.parametrize("shape", REMAINING)
@pytest.mark.parametrize(("warmup", "decay", "end"), [(4, 8, 0.0), (0, 20, 1e-4), (4, 1, 0.0)])
def test_values_follow_the_formula(shape, warmup, decay, end):
    schedule = train.warmup_stable_decay(3e-3, warmup, 20, decay, shape, end=end)

    def compute(step):
        if step < warmup:
            return 3e-3 * step / warmup
        return end + (3e-3 - end) * REMAINING[shape](min(1, max(0, (step - 20 + decay) / decay)))

    steps = range(23)
    np.testing.assert_allclose([schedule(step) for step in steps], [compute(step) for step in steps], atol=1e-9)


def test_warmup_cosine_follows_the_formula():
    schedule = train.warmup_cosine(2.0, 100, 8)
    expected = [0.0, 0.5, 1.0, 1.5, *(0.2 + 0.9 * (1 + np.cos(np.pi * x / 4)) for x in range(5))]
    np.testing.assert_allclose([schedule(step) for step in range(9)], expected, rtol=1e-6)
    assert float(train.warmup_cosine(1.0, 2, 8, end=0.0)(8)) == 0


def test_branches_share_the_stable_part():
    stable = train.warmup_stable_decay(1.0, 4, 100, 0)
    branches = [train.warmup_stable_decay(1.0, 4, steps, 5) for steps in (20, 40)]
    for branch, end in zip(branches, (16, 36), strict=True):
        assert [float(branch(step)) for step in range(end)] == [float(stable(step)) for step in range(end)]
        assert float(branch(end)) < 1
    assert float(stable(99)) == 1


@pytest.mark.usefixtures("no_type_checks")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((4, 10, 7), "4 steps of warmup and 7 of decay do not fit into 10 steps"),
        ((-1, 10, 7), "-1 steps of warmup"),
        ((1, 10, 2, "exponential"), "a decay is sqrt, linear or cosine, not 'exponential'"),
    ],
)
def test_bad_schedules_raise(arguments, message):
    with pytest.raises(ValueError, match=message):
        train.warmup_stable_decay(1e-3, *arguments)

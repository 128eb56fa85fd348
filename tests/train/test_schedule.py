"""Learning rate schedules against their formulas."""

import numpy as np
import pytest

from zoo import train


def test_warmup_cosine_matches_its_formula():
    steps = np.arange(101)
    cosine = 0.1 + 0.9 * (1 + np.cos(np.pi * (steps - 20) / 80)) / 2
    expected = 3.0 * np.where(steps < 20, steps / 20, cosine)
    schedule = train.warmup_cosine(3.0, 20, 100)
    np.testing.assert_allclose([schedule(step) for step in steps], expected, rtol=1e-5)


@pytest.mark.parametrize(("warmup_steps", "steps", "peak"), [(30, 4, 2), (0, 4, 0), (1, 1, 0)])
def test_warmup_cosine_warms_up_half_of_the_steps_at_most(warmup_steps, steps, peak):
    schedule = train.warmup_cosine(1.0, warmup_steps, steps)
    rates = [float(schedule(step)) for step in range(steps + 1)]
    assert np.argmax(rates) == peak and rates[peak] == 1 and rates[-1] == pytest.approx(0.1)

"""Loss spikes: found once, at their step, and left by going back to the checkpoint before."""

import jax.numpy as jnp
import numpy as np
import pytest

from zoo import train


class Rows:
    """Batches that are their own numbers."""

    state = 0

    def __next__(self):
        self.state += 1
        return self.state

    def restore(self, state):
        self.state = state


def make_records(values, start=1):
    return [{"step": step, "loss": value} for step, value in enumerate(values, start=start)]


def test_spike_is_found_at_its_step():
    values = list(2 + 0.1 * np.random.default_rng(0).standard_normal(60))
    detector = train.SpikeDetector(window=20)
    assert detector.find(make_records(values)) is None
    assert detector.find(make_records([2.1, "nan", 5.0, 5.0], start=61)) == 63
    assert detector.find(make_records([2.0], start=65)) is None  # the spike has not moved the mean
    assert train.SpikeDetector("loss", window=70).find(make_records([*values, 9.0])) is None
    with pytest.raises(ValueError, match="window=1"):
        train.SpikeDetector(window=1)


def test_run_goes_back_and_skips_the_rows_of_the_spike(tmp_path):
    """Row 17 makes the loss jump; the run sees it when metrics are fetched, and goes on from step 15 with new rows."""
    visited, spikes = [], train.SpikeDetector(window=8)
    with train.Run(tmp_path, config={}, fetch_every=2, spikes=spikes) as run:
        state, rows = jnp.zeros(()), Rows()
        for row in run.steps(rows, 24):
            state = state + 1
            visited.append((run.step, row))
            run.log(loss=100.0 if row == 17 else 1 + 0.01 * (row % 3), total=state)
            if run.spike is not None:
                assert run.spike == 17
                state = run.rewind(state)
            if run.due(5):
                run.save(state, rows)
        with pytest.raises(RuntimeError, match="nothing to go back from"):
            run.rewind(state)
    steps, read = zip(*visited, strict=True)
    assert read == tuple(range(1, len(read) + 1))  # no row is read twice
    back = next(i for i in range(1, len(steps)) if steps[i] <= steps[i - 1])
    assert (steps[back - 1], steps[back]) in ((18, 16), (19, 16)) and steps[-1] == 24
    records = train.read_metrics(tmp_path / "metrics.jsonl")
    assert [record["step"] for record in records] == list(range(1, 25))
    assert [record["total"] for record in records] == list(range(1, 25)) and max(r["loss"] for r in records) < 2


def test_spike_without_a_checkpoint_is_passed_over(tmp_path, caplog):
    with train.Run(tmp_path, config={}, fetch_every=1, spikes=train.SpikeDetector(window=3)) as run:
        state = jnp.zeros(())
        for row in run.steps(Rows(), 8):
            run.log(loss=50.0 if row == 6 else 1.0 + 0.01 * row)
            if run.spike is not None:
                assert run.rewind(state) is state
    assert "a loss spike in step 6, and no checkpoint before it" in caplog.text and run.step == 8

"""Loss spikes, found on the host in metrics that are fetched anyway."""

import math
from collections.abc import Iterable, Mapping
from typing import Any


class SpikeDetector:
    """Finds a loss spike: a metric more than `sigmas` standard deviations above its running mean.

        spikes = train.SpikeDetector("bits_per_byte")
        with train.Run(run_options, config=config, spikes=spikes) as run:
            ...
            for batch in run.steps(batches, steps):
                ...
                if run.spike is not None:
                    model, opt_state = run.rewind((model, opt_state))

    Mean and variance are exponential averages over about `window` steps; no value is a spike in the first `window`. A
    value that is not finite is not a spike, since the run stops, or its optimizer skips the step.
    `zoo.train.skip_spikes` decides on the device, before the update; a detector sees a spike when the metrics are
    fetched, some steps later.
    """

    def __init__(self, metric: str = "loss", *, sigmas: float | int = 6.0, window: int = 100):
        """**Raises** `ValueError` for a window below 2 or sigmas that are not above 0."""
        if window < 2 or not sigmas > 0:
            raise ValueError(
                f"a spike is some sigmas above 0 above a mean of 2 steps or more, not {sigmas=}, {window=}"
            )
        self.metric = metric
        self.sigmas = float(sigmas)
        self.window = window
        self._mean, self._variance, self._steps = 0.0, 0.0, 0

    def find(self, records: Iterable[Mapping[str, Any]]) -> int | None:
        """Add the records of some steps, and return the first step with a spike; None without one. A spike does not
        enter the averages."""
        for record in records:
            value = record.get(self.metric)
            if not isinstance(value, int | float) or not math.isfinite(value):
                continue
            if self._steps >= self.window and value > self._mean + self.sigmas * math.sqrt(self._variance):
                return record["step"]
            self._steps += 1
            rate = 1 / min(self._steps, self.window)
            difference = value - self._mean
            self._mean += rate * difference
            self._variance = (1 - rate) * (self._variance + rate * difference**2)
        return None

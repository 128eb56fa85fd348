"""The end of a run, read from its directory."""

import statistics
from pathlib import Path
from typing import Any

from .metrics import read_metrics


def summary(directory: Path) -> dict[str, Any]:
    """Return the last value of every metric of a run, and medians of its speed.

    Speeds are `tokens_per_second` and `milliseconds_per_step`, 0 for a run too short to be timed.
    """
    last = {name: value for line in read_metrics(directory / "metrics.jsonl") for name, value in line.items()}
    timing = read_metrics(directory / "timing.jsonl")
    steps, tokens = (
        [line[name] for line in timing if line.get(name)] for name in ("steps_per_second", "tokens_per_second")
    )
    return last | {
        "tokens_per_second": statistics.median(tokens or [0]),
        "milliseconds_per_step": 1000 / statistics.median(steps or [float("inf")]),
    }

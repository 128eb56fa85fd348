"""Metrics that every recipe logs: gradient norm and learning rate."""

import json
import math
from pathlib import Path

import numpy as np

from zoo import train


def check_optimization(out: Path, *runs: str) -> None:
    """Check that each step of each run in `out` logged both, that the learning rate is the one that the recipe's help
    promises, and that the report draws both."""
    for run in runs or ("",):
        lines = train.read_metrics(out / run / "metrics.jsonl")
        assert all((np.array(line["gradient_norm"]) > 0).all() for line in lines)
        rates = [np.max(line["learning_rate"]) for line in lines]
        config = json.loads((out / run / "config.json").read_text())
        steps = config["steps"] if config.get("epochs") is None else lines[-1]["step"]
        assert len(rates) == lines[-1]["step"] == steps
        peak = max(config["rates"]) if "rates" in config else config["learning_rate"] or max(rates)
        expected = compute_schedule(steps, config["warmup_steps"], end=0.0 if "rates" in config else 0.1)
        np.testing.assert_allclose(rates, peak * expected, rtol=1e-5, atol=1e-7 * peak)
    report = (out / "report.html").read_text()
    assert 'aria-label="gradient norm' in report and 'aria-label="learning rate' in report


def compute_schedule(steps: int, warmup_steps: int, *, end: float) -> np.ndarray:
    """Return the learning rate of each step over its peak: linear from 0 over `warmup_steps`, at most half of all, then
    half a cosine to `end`, which no step reaches."""
    warmup = min(warmup_steps, steps // 2)

    def rate(step):
        if step < warmup:
            return step / warmup
        return end + (1 - end) * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup))) / 2

    return np.array([rate(step) for step in range(steps)])

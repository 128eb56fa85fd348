"""Metrics that every recipe logs: gradient norm and learning rate."""

from pathlib import Path

import numpy as np

from zoo import train


def check_optimization(out: Path, *runs: str) -> None:
    """Check that each step of each run in `out` logged both, and that the report draws both."""
    for run in runs or ("",):
        lines = train.read_metrics(out / run / "metrics.jsonl")
        assert all((np.array(line["gradient_norm"]) > 0).all() for line in lines)
        rates = [np.max(line["learning_rate"]) for line in lines]
        assert max(rates) > 0 and len(rates) == lines[-1]["step"]
    report = (out / "report.html").read_text()
    assert 'aria-label="gradient norm' in report and 'aria-label="learning rate' in report

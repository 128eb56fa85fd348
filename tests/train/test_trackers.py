"""Trackers: what they hand to their packages, and what the packages read of a run."""

import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

from zoo.train import TensorBoard, WeightsAndBiases
from zoo.train.trackers import PACKAGES, Tracker, flatten_values

ROOT = Path(__file__).parents[2]
READERS = {"tensorboard": "tensorboard.backend", "wandb": "wandb"}


def test_values_are_flat_numbers():
    values = {"loss": 2, "bad": "nan", "rates": [[0.1, 0.2], [0.3, "inf"]], "load": [0.0] * 65, "note": "text"}
    flat = flatten_values(values)
    assert flat.pop("bad") != flat
    assert flat == {"loss": 2.0, "rates/0": 0.1, "rates/1": 0.2, "rates/2": 0.3, "rates/3": float("inf")}


class Recorder(types.ModuleType):
    """A module, or an object of it, whose calls are recorded in a shared list, and return further ones."""

    def __init__(self, calls, name=""):
        super().__init__(name)
        self._calls, self._name, self.id = calls, name, "run-1"

    def __getattr__(self, name):
        return Recorder(self._calls, name)

    def __call__(self, *args, **options):
        self._calls.append((self._name, args, options))
        return self


@pytest.fixture
def calls(monkeypatch):
    """Calls of the packages of all trackers, which are replaced."""
    calls = []
    for package in PACKAGES.values():
        monkeypatch.setitem(sys.modules, package, Recorder(calls))
    return calls


def test_wandb_has_a_step_that_can_go_back(tmp_path, calls, monkeypatch):
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    tracker = WeightsAndBiases(tmp_path, config={"a": 1}, name="x", run_id="run-1", mode="offline")
    assert isinstance(tracker, Tracker) and tracker.run_id == "run-1"
    tracker.log(3, dict(loss=1.5, rows=[1, 2]))
    tracker.close()
    (_, _, options), *rest = calls
    assert options == dict(
        project="equizoo",
        dir=str(tmp_path),
        config={"a": 1},
        name="x",
        group=None,
        id="run-1",
        resume="allow",
        allow_val_change=True,
        mode="offline",
    )
    assert rest == [
        ("define_metric", ("*",), dict(step_metric="step", step_sync=False)),
        ("log", ({"step": 3, "loss": 1.5, "rows/0": 1.0, "rows/1": 2.0},), {}),
        ("finish", (), {}),
    ]


def test_tensorboard_hides_steps_that_come_again(tmp_path, calls):
    tracker = TensorBoard(tmp_path)
    for step in (1, 2, 2, 1):
        tracker.log(step, dict(loss=1.5))
    (tmp_path / "events.0").touch()
    TensorBoard(tmp_path).log(4, dict(loss=1.5))
    purges = [options.get("purge_step") for name, _, options in calls if name == "SummaryWriter"]
    assert purges == [None, 1, None, 4]
    assert [args for name, args, _ in calls if name == "add_scalar"] == [("loss", 1.5, s) for s in (1, 2, 2, 1, 4)]


@pytest.mark.parametrize("name, make", [("wandb", WeightsAndBiases), ("tensorboard", TensorBoard)])
def test_tracker_missing_package_names_its_command(tmp_path, monkeypatch, name, make):
    monkeypatch.setitem(sys.modules, PACKAGES[name], None)
    with pytest.raises(ImportError, match=f"pip install {PACKAGES[name]}"):
        make(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", PACKAGES)
def test_packages_read_a_resumed_run(tmp_path, name):
    for module in (PACKAGES[name], READERS[name]):
        command = [sys.executable, "-c", f"import {module}"]
        if subprocess.run(command, capture_output=True).returncode:
            pytest.skip(f"{module} is not installed: the extra {name}")
    settings = {"PYTHONPATH": str(ROOT), "WANDB_MODE": "offline"}
    command = [sys.executable, str(Path(__file__).with_name("tracked_run.py")), name, str(tmp_path / "many")]
    done = subprocess.run(command, env=os.environ | settings, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    samples = found.pop("samples")
    assert all(line in samples for line in ("def main(a,", "  b)", "class Node:"))
    loss = [[step, float(step + (6 if step <= 3 else 10))] for step in range(1, 11)]
    assert found == {"runs": 1, "group": "many", "rate": 0.5, "loss": loss, "report": True}
    assert "left out" not in done.stderr

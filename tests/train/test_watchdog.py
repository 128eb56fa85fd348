"""A run that stands still names the line where it does, once, and goes on."""

import json
import time

import numpy as np
import pytest

from zoo import train
from zoo.train.watchdog import Watchdog


def wait_for(path, text):
    deadline = time.monotonic() + 30
    while text not in path.read_text() and time.monotonic() < deadline:
        time.sleep(0.02)


def test_a_step_that_stands_still_is_named(tmp_path, capfd):
    batches = train.ShuffledBatches(train.TokenWindows(np.zeros(200, np.uint8), 2), 1)
    stacks = tmp_path / "stacks-0.log"
    with train.Run(train.RunOptions(tmp_path, watchdog=1), config={"watchdog": 1, "a": 1}) as run:
        for _ in run.steps(batches, 3):
            if run.step == 2:
                wait_for(stacks, "in test_a_step_that_stands_still_is_named")
                time.sleep(0.5)  # stderr comes second
    assert run.step == 3, "the run goes on"
    found = stacks.read_text()
    assert found.count("Timeout (0:00:01)!") == 1 and "in wait_for" in found
    said = capfd.readouterr().err
    assert f"no step for 1 s; stacks of all threads, also in {stacks}:" in said
    assert "in test_a_step_that_stands_still_is_named" in said.partition("no step for 1 s")[2]
    assert json.loads((tmp_path / "config.json").read_text()) == {"a": 1}


def test_steps_in_time_leave_nothing(tmp_path, capfd):
    with Watchdog(tmp_path / "new" / "stacks-0.log", 1.5) as watchdog:
        for _ in range(6):
            watchdog.restart()
            time.sleep(0.3)
    assert watchdog._timer is not None and watchdog._timer.finished.is_set()
    assert not list((tmp_path / "new").iterdir()) and "no step" not in capfd.readouterr().err


def test_a_time_must_be_positive(tmp_path):
    with pytest.raises(ValueError, match="watchdog=-1: give a positive number"):
        train.Run(train.RunOptions(tmp_path, watchdog=-1), config={})

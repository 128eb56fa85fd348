"""The trackers of a run: made by name, resumed with it, dropped when they fail, in the first process only."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import get_args, get_type_hints

import jax
import numpy as np
import pytest

from zoo import train
from zoo.tools.report import write_report
from zoo.train import tracking
from zoo.train.trackers import PACKAGES


class Fake:
    """A tracker that keeps its calls, and raises in the method `fails`."""

    made: list["Fake"]
    fails = ""

    def __init__(self, directory=None, *, config=None, name="", group=None, run_id=None):
        self.made.append(self)
        self.calls = []
        self.config, self.name, self.group, self.given = dict(config or {}), name, group, run_id
        self.run_id = run_id or f"run-{len(self.made)}"
        self.call("init")

    def call(self, name, *args):
        self.calls.append((name, *args))
        if name == self.fails:
            raise ConnectionError("no network")

    def log(self, step, values):
        self.call("log", step, values)

    def log_report(self, report, samples):
        self.call("report", report, samples)

    def close(self):
        self.call("close")


@pytest.fixture
def fake(monkeypatch):
    """The class that stands in for those of TensorBoard and Weights & Biases."""
    monkeypatch.setattr(Fake, "made", [], raising=False)
    monkeypatch.setattr(Fake, "fails", "")
    monkeypatch.setattr(tracking, "WeightsAndBiases", Fake)
    monkeypatch.setattr(tracking, "TensorBoard", Fake)
    monkeypatch.setattr(tracking, "import_tracker", lambda name: None)
    return Fake


class Counter:
    def __init__(self):
        self.state = 0

    def __next__(self):
        self.state += 1
        return self.state

    def restore(self, state):
        self.state = state


def count(out: Path, *track: str, steps: int = 4, resume: bool | int = False, **options) -> train.Run:
    """A run that logs its steps, and saves every second one."""
    batches = Counter()
    run_options = train.RunOptions(out, resume=resume, track=track)
    with train.Run(run_options, config={"a": out}, fetch_every=1, **options) as run:
        state = run.restore({"w": np.zeros(2)}, batches)
        for _ in run.steps(batches, steps):
            run.log(loss=run.step)
            if run.due(2):
                run.save(state, batches)
    return run


def report(run: train.Run) -> Path:
    return write_report(
        run.directory, title="", summary="", curves={"loss": "loss"}, unit="", samples=[("def ", "main():")]
    )


def lost(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if "left out" in record.getMessage()]


def test_options_name_the_trackers():
    (names, _) = get_args(get_type_hints(train.RunOptions)["track"])
    assert set(get_args(names)) == set(PACKAGES)
    with pytest.raises(ValueError, match="name trackers out of tensorboard, wandb, not comet"):
        tracking.import_trackers(["comet"])


def test_tracker_gets_config_metrics_and_report(tmp_path, fake, caplog):
    path = report(count(tmp_path / "out", "wandb", "wandb", name="wide"))
    first, second = fake.made
    assert (first.config, first.name, first.group) == ({"a": str(tmp_path / "out"), "run": "wide"}, "wide", "out")
    assert first.calls == [("init",), *(("log", step, {"loss": step}) for step in range(1, 5)), ("close",)]
    assert second.given == first.run_id and (second.config, second.group) == (first.config, "out")
    assert second.calls == [("init",), ("report", path, [("def ", "main():")]), ("close",)]
    assert not lost(caplog)


def test_resumed_run_goes_on_in_its_trackers(tmp_path, fake):
    count(tmp_path, "wandb", steps=2)
    count(tmp_path, "wandb", "tensorboard", steps=4, resume=True)
    count(tmp_path, "wandb", steps=6, resume=2)
    assert [tracker.given for tracker in fake.made] == [None, "run-1", None, "run-1"]
    assert [call[1] for call in fake.made[-1].calls[1:-1]] == [3, 4, 5, 6]
    assert json.loads((tmp_path / "trackers.json").read_text()) == {"group": None, "runs": {"wandb": "run-1"}}
    report(count(tmp_path, steps=7, resume=True))
    assert len(fake.made) == 4 and not (tmp_path / "trackers.json").exists()


def test_new_run_is_not_the_one_that_left_its_id(tmp_path, fake):
    (tmp_path / "trackers.json").write_text('{"group": null, "runs": {"wandb": "old"}}')
    (tmp_path / "metrics.jsonl").touch()
    count(tmp_path, "wandb")
    assert fake.made[0].given is None


@pytest.mark.parametrize("text", ["{", "[]", '{"runs": 1}'])
def test_damaged_ids_do_not_stop_a_run(tmp_path, fake, caplog, text):
    count(tmp_path, "wandb", steps=2)
    (tmp_path / "trackers.json").write_text(text)
    run = count(tmp_path, "wandb", steps=4, resume=True)
    assert len(train.read_metrics(tmp_path / "metrics.jsonl")) == 4 and len(lost(caplog)) == 1
    (tmp_path / "trackers.json").write_text(text)
    assert report(run).exists() and "the report is not tracked" in caplog.records[-1].getMessage()


@pytest.mark.parametrize("method", ["init", "log", "close"])
def test_failure_is_one_warning(tmp_path, fake, caplog, monkeypatch, method):
    memory = fake()
    fake.made.clear()
    memory.fails = ""
    monkeypatch.setattr(fake, "fails", method)
    run = count(tmp_path, "wandb", trackers=[memory])
    assert run.step == 4 and len(train.read_metrics(tmp_path / "metrics.jsonl")) == 4
    assert lost(caplog) == [
        f"{tmp_path}: wandb failed and is left out, metrics.jsonl goes on (ConnectionError: no network)"
    ]
    assert [call[0] for call in fake.made[0].calls].count(method) == 1
    assert [call[0] for call in memory.calls] == ["init", *["log"] * 4, "close"]
    if method == "init":
        report(run)
        assert len(fake.made) == 1


def test_only_the_first_process_tracks(tmp_path, fake, monkeypatch):
    batches = Counter()
    memory = fake()
    fake.made.clear()
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    with train.Run(train.RunOptions(tmp_path, track=("wandb",)), config={}, trackers=[memory]) as run:
        for _ in run.steps(batches, 3):
            run.log(loss=1)
    assert not fake.made and memory.calls == [("init",)] and not (tmp_path / "trackers.json").exists()


@dataclass(frozen=True)
class Config:
    run: train.RunOptions = train.RunOptions(Path("runs/a"))


def test_missing_package_ends_a_recipe_before_it_starts(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "wandb", None)
    words = ["--out", str(tmp_path / "a"), "--track", "wandb"]
    with pytest.raises(SystemExit, match="2"):
        train.run_cli(lambda config: pytest.fail("started"), Config, arguments=words)
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 1 and errors[0].endswith("pip install wandb") and not (tmp_path / "a").exists()
    with pytest.raises(ImportError, match="pip install wandb"):
        train.Run(train.RunOptions(tmp_path / "a", track=("wandb",)), config={})


def test_flag_takes_several_and_a_resumed_run_keeps_them(tmp_path, fake):
    def main(config):
        with train.Run(config.run, config=config):
            pass
        return config.run.track

    words = ["--out", str(tmp_path)]
    names = ("wandb", "tensorboard")
    assert train.run_cli(main, Config, arguments=[*words, "--track", *names]) == names
    assert train.run_cli(main, Config, arguments=[*words, "--resume"]) == names
    assert train.run_cli(main, Config, arguments=[*words, "--resume", "--track"]) == ()

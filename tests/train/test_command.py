"""Command lines of recipes: user errors on one line, tracebacks of all others, presets."""

import json
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from zoo import train
from zoo._optional import import_optional
from zoo.train.directory import DirectoryLock


@dataclass(frozen=True)
class Empty:
    """No flags."""


@dataclass(frozen=True)
class Sized:
    size: int = 1  # Any number.
    name: str = "a"  # Any word.


def refuses(config: Sized):
    raise ValueError(f"size={config.size} makes no sense")


def misses(config: Sized):
    import_optional("no_such_package", "pip install it")


def breaks(config: Sized):
    json.loads("{")


@pytest.mark.parametrize(("main", "says"), [(refuses, "size=3 makes no sense"), (misses, "pip install it")])
def test_cli_prints_user_errors_on_one_line(capsys, main, says):
    with pytest.raises(SystemExit, match="2"):
        train.run_cli(main, Sized, arguments=["--size", "3"])
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1 and "error:" in error


@pytest.mark.parametrize("text", ["", "interrupted while exporting"])
def test_cli_prints_one_line_for_ctrl_c(capsys, text):
    def main(config):
        raise KeyboardInterrupt(text)

    with pytest.raises(SystemExit, match="130"):
        train.run_cli(main, Empty, arguments=[])
    assert capsys.readouterr().err.partition(": ")[2] == (text or "interrupted") + "\n"


def test_cli_prints_one_line_for_devices_that_do_not_start(capsys, monkeypatch):
    def start():
        raise AssertionError

    def main(config):
        start()

    monkeypatch.setattr("jax.devices", start)
    with pytest.raises(SystemExit, match="2"):
        train.run_cli(main, Empty, arguments=[])
    assert "JAX finds no such device" in capsys.readouterr().err
    monkeypatch.undo()
    with pytest.raises(AssertionError):
        train.run_cli(main, Empty, arguments=[])


def test_cli_keeps_tracebacks_of_other_errors():
    with pytest.raises(json.JSONDecodeError):
        train.run_cli(breaks, Sized, arguments=[])


def test_cli_preset_sets_defaults_before_flags(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["recipe.py"])
    presets = {"big": Sized(size=9)}
    parse = lambda *words: train.run_cli(lambda config: config, Sized, presets, arguments=words)
    assert [parse(), parse("big"), parse("big", "--name", "b")] == [Sized(), Sized(9), Sized(9, "b")]


def test_cli_speaks_before_it_makes_anything(capsys, tmp_path):
    def main(config):
        return capsys.readouterr().out

    line = f"loading data and model; the run's folder is {tmp_path / 'run'}\n"
    assert train.run_cli(main, Trains, arguments=["--out", str(tmp_path / "run")]) == line


def test_check_names_lists_the_known_names():
    train.check_names("mixers", ("gla", "attention"), {"attention": 1, "gla": 2, "rwkv7": 3})
    for names, shown in ((("gla", "telepathy"), "gla, telepathy"), ((), "none")):
        with pytest.raises(ValueError, match=f"^name one or more of the mixers attention, gla, not {shown}$"):
            train.check_names("mixers", names, ("attention", "gla"))


@dataclass(frozen=True)
class Trains:
    steps: int = 1
    eval_every: int = 1
    run: train.RunOptions = train.RunOptions(Path("runs/a"))


def trains(config: Trains):
    pytest.fail("data and model are made")


def test_cli_refuses_a_directory_before_it_calls_main(capsys, tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "run" / "checkpoints" / "20").mkdir(parents=True)
    (tmp_path / "docs" / "pages").mkdir(parents=True)
    for out, says in (("file/a", "file is a file"), ("run", "holds a run of 20 steps"), ("docs", "holds other things")):
        with pytest.raises(SystemExit, match="2"):
            train.run_cli(trains, Trains, arguments=["--out", str(tmp_path / out)])
        error = capsys.readouterr().err
        assert says in error and error.count("\n") == 1
    lock = DirectoryLock(tmp_path / "run")
    lock.acquire()
    with pytest.raises(SystemExit, match="2"):
        train.run_cli(trains, Trains, arguments=["--resume", "--out", str(tmp_path / "run")])
    lock.release()
    assert "is in use by process" in capsys.readouterr().err


@pytest.mark.parametrize(("flag", "value"), [("--steps", "0"), ("--steps", "-3"), ("--eval-every", "0")])
def test_cli_refuses_counts_below_one(capsys, tmp_path, flag, value):
    with pytest.raises(SystemExit, match="2"):
        train.run_cli(trains, Trains, arguments=["--out", str(tmp_path / "run"), flag, value])
    assert capsys.readouterr().err.endswith(f"error: {flag} must be 1 or more, not {value}\n")
    assert not (tmp_path / "run").exists()


@dataclass(frozen=True)
class Rated(Trains):
    epochs: float | None = None
    learning_rate: float = 0.1


def test_cli_takes_lr_for_the_learning_rate(tmp_path, capsys):
    for words in (("--lr", "0.5"), ("--lr=0.5",), ("--learning-rate", "0.5")):
        config = train.run_cli(lambda config: config, Rated, arguments=[*words, "--out", str(tmp_path / "run")])
        assert config.learning_rate == 0.5
    with pytest.raises(SystemExit):
        train.run_cli(trains, Trains, arguments=["--lr", "0.5"])
    assert "Unrecognized options: --lr" in capsys.readouterr().err


def test_cli_refuses_epochs_with_steps_and_below_0(tmp_path, capsys):
    for words, said in (
        (["--epochs", "2", "--steps=3"], "--epochs and --steps both say how long to train: give one of them"),
        (["--epochs", "0"], "--epochs 0.0: expected a number of passes above 0"),
        (["--epochs", "inf"], "--epochs inf: expected a number of passes above 0"),
    ):
        with pytest.raises(SystemExit, match="2"):
            train.run_cli(trains, Rated, arguments=["--out", str(tmp_path / "run"), *words])
        assert capsys.readouterr().err.endswith(f"error: {said}\n")


def test_cli_prints_a_run_of_nan_and_a_full_disk_on_one_line(capsys):
    def diverge(config):
        raise FloatingPointError("loss is nan in step 3")

    def fill(config):
        os.write(os.open("/dev/full", os.O_WRONLY), b"text")

    for main, says in ((diverge, "loss is nan in step 3"), (fill, "No space left on device")):
        with pytest.raises(SystemExit, match="2"):
            train.run_cli(main, Empty, arguments=[])
        error = capsys.readouterr().err
        assert says in error and error.count("\n") == 1


def test_cli_ends_with_143_after_sigterm(tmp_path):
    """A scheduler takes 0 for the end of the training."""

    def main(config):
        with train.Interrupt():
            os.kill(os.getpid(), config.size)

    with pytest.raises(SystemExit) as caught:
        train.run_cli(main, Sized, arguments=["--size", str(int(signal.SIGTERM))])
    assert caught.value.code == 143
    train.run_cli(main, Sized, arguments=["--size", str(int(signal.SIGINT))])


def test_cli_refuses_several_processes_without_a_mesh(tmp_path, monkeypatch, capsys):
    @dataclass(frozen=True)
    class Meshed(Trains):
        mesh: train.MeshOptions = train.MeshOptions()

    monkeypatch.setattr("zoo.train.command.count_processes", lambda: 2)
    monkeypatch.setattr("zoo.train.command.end_process", sys.exit)  # which leaves pytest alive
    with pytest.raises(SystemExit, match="2"):
        train.run_cli(trains, Trains, arguments=["--out", str(tmp_path / "run")])
    assert "has no mesh, so that 2 processes would do the same: start one" in capsys.readouterr().err
    assert train.run_cli(lambda config: 2, Meshed, arguments=["--out", str(tmp_path / "run")]) == 2

"""Flags of a resumed run: taken from the folder's configuration, unless they are given."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from zoo import train
from zoo.train.options import flatten_config


@dataclass(frozen=True)
class Config:
    data: tuple[Path, ...] = ()
    heads: int | None = None
    ranks: tuple[int, ...] = (4,)
    kind: Literal["a", "b"] = "a"
    rate: float = 1e-3
    stabilized: bool = False
    tied: bool = True
    mesh: train.MeshOptions = train.MeshOptions(remat="full")
    run: train.RunOptions = train.RunOptions(Path("runs/x"))


OTHER = {
    "data": ["a", "b c"],
    "heads": 3,
    "ranks": [1, 16],
    "kind": "b",
    "rate": 5e-05,
    "stabilized": True,
    "tied": False,
    "fsdp": 8,
    "tensor": 1,
    "zero_stage": 1,
    "microbatches": 2,
    "remat": "dots",
    "dtype": "bfloat16",
    "out": "elsewhere",
    "seed": 7,
    "run": "dense",
    "digest": {"corpus": "3f"},
}


def write(folder: Path, text: str, *, name: str = "config.json") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)


def resume(out: Path, *words: str, presets=None) -> dict:
    return parse(*words, "--resume", "--out", str(out), presets=presets)


def parse(*words: str, presets=None) -> dict:
    """Return the flat configuration."""
    return train.run_cli(flatten_config, Config, presets, arguments=words)


def test_resume_takes_the_flags_of_the_folder(tmp_path, capsys):
    write(tmp_path, json.dumps(OTHER))
    wanted = OTHER | {"data": (Path("a"), Path("b c")), "ranks": (1, 16), "out": tmp_path}
    # A folder of before these flags.
    wanted |= dict.fromkeys(("attention", "recurrence", "grouped_matmul"), "auto")
    wanted |= {"context": 1, "context_attention": "ring", "sequence_parallel": False, "expert": 1, "pipe": 1}
    wanted |= {"schedule": "gpipe", "rounds": 1, "track": ()}
    assert resume(tmp_path) == {name: value for name, value in wanted.items() if name not in ("run", "digest")}
    line = capsys.readouterr().out.splitlines()[0]
    assert line.startswith(f"from {tmp_path / 'config.json'}: --data a b c --heads=3 --ranks 1 16 --kind=b")
    assert "--stabilized --no-tied --fsdp=8" in line and "--tensor" not in line and "digest" not in line


@pytest.mark.parametrize(
    ("saved", "given", "before", "instead"),
    [
        ({"fsdp": 16}, (), "--fsdp=16, for a multiple of 16 devices, and there are 8", "--fsdp 1,"),
        ({"fsdp": 4, "tensor": 4}, (), "--fsdp=4 --tensor=4, for a multiple of 16", "--fsdp 1 --tensor 1,"),
        ({"fsdp": 4, "tensor": 3}, ("--fsdp", "2"), "--tensor=3, for a multiple of 6", "--tensor 1,"),
    ],
)
def test_resume_on_other_devices_says_which_flags_to_give(tmp_path, capsys, saved, given, before, instead):
    write(tmp_path, json.dumps(saved))
    with pytest.raises(SystemExit, match="2"):
        resume(tmp_path, *given)
    error = capsys.readouterr().err
    assert f"{tmp_path / 'config.json'} has {before}" in error and f": give {instead} or other sizes" in error


def test_resume_prefers_given_flags(tmp_path, capsys):
    write(tmp_path, json.dumps(OTHER))
    given = resume(tmp_path, "--heads", "None", "--fsdp", "1", "--data", "c", "--stabilized", "--ranks", "2")
    assert (given["heads"], given["fsdp"], given["data"], given["ranks"]) == (None, 1, (Path("c"),), (2,))
    assert given["stabilized"] is True and given["seed"] == 7
    assert "--heads" not in capsys.readouterr().out
    assert parse("--out", str(tmp_path))["heads"] is None, "only a resumed run"


def test_resume_takes_epochs_unless_steps_are_given(tmp_path):
    @dataclass(frozen=True)
    class Timed:
        steps: int = 5
        epochs: float | None = None
        run: train.RunOptions = train.RunOptions(tmp_path)

    write(tmp_path, json.dumps({"steps": 5, "epochs": 3.0}))
    for words, expected in (((), (5, 3.0)), (("--epochs", "4"), (5, 4.0)), (("--steps=5",), (5, None))):
        config = train.run_cli(lambda config: config, Timed, arguments=["--resume", *words])
        assert (config.steps, config.epochs) == expected


def test_resume_prefers_the_folder_to_a_preset(tmp_path):
    write(tmp_path, json.dumps({"heads": None, "rate": 0.001, "tied": True}))
    presets = {"large": Config(heads=16, rate=3.0, tied=False, kind="b")}
    found = resume(tmp_path, presets=presets)
    assert found["kind"] == "a"
    found = parse("large", "--resume", "--out", str(tmp_path), presets=presets)
    assert (found["heads"], found["rate"], found["tied"], found["kind"]) == (None, 0.001, True, "b")


def test_resume_takes_the_flags_of_one_of_several_runs(tmp_path):
    write(tmp_path, "", name="metrics.jsonl")
    write(tmp_path / "export", json.dumps({"heads": 5}))  # a model
    assert resume(tmp_path)["heads"] is None
    write(tmp_path / "dense", json.dumps({"heads": 6, "run": "dense"}))
    write(tmp_path / "dense", "{}", name="env.json")
    assert resume(tmp_path)["heads"] == 6


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"heads": "many"}', "config.json: heads='many' is not a value of --heads: give --heads on the command line"),
        ('{"rate": 1.0, "kind": "c"}', "kind='c' is not a value of --kind"),
        ('{"stabilized": "yes"}', "stabilized='yes' is not a value of --stabilized"),
        ('{"dtype": "float16"}', "dtype='float16' is not a value of --dtype: give --dtype on the command line"),
        ('{"heads": {"a": 1}}', "is not a value of --heads"),
        ('{"heads": 3', "config.json: damaged ("),
        ("[1]", "config.json: damaged (list instead of an object): delete it and give all flags"),
    ],
)
def test_resume_from_unfit_configuration_is_one_line(tmp_path, capsys, text, message):
    write(tmp_path, text)
    with pytest.raises(SystemExit, match="2"):
        resume(tmp_path)
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    if "heads" in text and "damaged" not in message:
        assert resume(tmp_path, "--heads", "2")["heads"] == 2

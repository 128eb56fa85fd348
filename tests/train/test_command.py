"""Errors raised on purpose are one line; all others keep their traceback."""

import json
import sys

import pytest

from zoo import train
from zoo._optional import import_optional


def refuses(*, size: int = 1):
    raise ValueError(f"size={size} makes no sense")


def misses(*, size: int = 1):
    import_optional("no_such_package", "pip install it")


def breaks(*, size: int = 1):
    json.loads("{")


@pytest.mark.parametrize(("main", "says"), [(refuses, "size=3 makes no sense"), (misses, "pip install it")])
def test_what_is_raised_on_purpose_is_one_line(capsys, main, says):
    with pytest.raises(SystemExit, match="2"):
        train.run_cli(main, arguments=["--size", "3"])
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1 and "error:" in error


def test_what_comes_from_below_keeps_its_traceback():
    with pytest.raises(json.JSONDecodeError):
        train.run_cli(breaks, arguments=[])


def test_a_preset_is_other_defaults_and_flags_come_after(monkeypatch):
    seen = []

    def main(*, size: int = 1, name: str = "a"):
        seen.append((size, name))

    monkeypatch.setattr(sys, "argv", ["recipe.py"])
    for words in ([], ["big"], ["big", "--name", "b"]):
        train.run_cli(main, presets={"big": {"size": 9}}, arguments=words)
    assert seen == [(1, "a"), (9, "a"), (9, "b")]

"""Command lines of recipes: user errors on one line, tracebacks of all others, presets."""

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
def test_cli_prints_user_errors_on_one_line(capsys, main, says):
    with pytest.raises(SystemExit, match="2"):
        train.run_cli(main, arguments=["--size", "3"])
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1 and "error:" in error


def test_cli_keeps_tracebacks_of_other_errors():
    with pytest.raises(json.JSONDecodeError):
        train.run_cli(breaks, arguments=[])


def test_cli_preset_sets_defaults_before_flags(monkeypatch):
    seen = []

    def main(*, size: int = 1, name: str = "a"):
        seen.append((size, name))

    monkeypatch.setattr(sys, "argv", ["recipe.py"])
    for words in ([], ["big"], ["big", "--name", "b"]):
        train.run_cli(main, presets={"big": {"size": 9}}, arguments=words)
    assert seen == [(1, "a"), (9, "a"), (9, "b")]


def test_check_names_lists_the_known_names():
    train.check_names("mixers", ("gla", "attention"), {"attention": 1, "gla": 2, "rwkv7": 3})
    for names, shown in ((("gla", "telepathy"), "gla, telepathy"), ((), "none")):
        with pytest.raises(ValueError, match=f"^name one or more of the mixers attention, gla, not {shown}$"):
            train.check_names("mixers", names, ("attention", "gla"))

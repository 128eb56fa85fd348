"""No text of unknown origin controls the terminal: one function prints, and it escapes."""

import ast
import logging
import sys
from pathlib import Path

import pytest

from zoo._terminal import escape_controls, show, show_error

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[2J\x07", r"\x1b[2J\x07"),
        ("a\r\x08\x7f\x9b31m", r"a\r\x08\x7f\x9b31m"),
        ("safe\u202egpj.exe\u2066", r"safe\u202egpj.exe\u2066"),
        ("a\u2028b\u200bc\ufeff\U000e0041", r"a\u2028b\u200bc\ufeff\U000e0041"),
        ("caf\udce9\n", r"caf\udce9\n"),
        ("naïve λ 東京 👩\u200d🚀 می\u200cخواهم 5\u00a0%", "naïve λ 東京 👩\u200d🚀 می\u200cخواهم 5\u00a0%"),
    ],
)
def test_escape_controls(text, shown):
    assert escape_controls(text) == shown


def test_show_keeps_lines_and_tabs(capsys):
    show("a\tb\nc\x1b]0;title\x07", end="")
    show_error("refused\nzoo: all is well\n  listed\x1b[0m")
    assert capsys.readouterr() == ("a\tb\nc\\x1b]0;title\\x07", "refused\n  zoo: all is well\n  listed\\x1b[0m\n")
    show("to a file", file=sys.stderr)
    assert capsys.readouterr() == ("", "to a file\n")


def find_prints(source):
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        if ast.unparse(node.func) in ("print", "sys.stdout.write", "sys.stderr.write")
    ]


def test_only_show_prints():
    """Apart from the program that runs an export, which does not import the library."""
    found = {path.relative_to(ROOT).as_posix(): find_prints(path.read_text()) for path in ROOT.glob("zoo/**/*.py")}
    assert {path for path, lines in found.items() if lines} == {"zoo/_terminal.py", "zoo/tools/export/serve.py"}, found


def test_the_log_shows_control_characters(caplog):
    """It names tensors of files, which may be called anything."""
    logging.getLogger("zoo").warning("%s: left aside", "vision\x1b[2J\u202e")
    assert caplog.messages == [r"vision\x1b[2J\u202e: left aside"]

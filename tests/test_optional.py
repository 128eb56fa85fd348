"""Packages of extras that are not installed: one line that says how to install them."""

import subprocess
import sys
from pathlib import Path

import pytest

from zoo._optional import MissingExtraError, _print_missing_extra, require_installed


def test_missing_extra_is_named_with_its_command():
    require_installed("json", extra="train")
    with pytest.raises(
        MissingExtraError, match=r"^no_such and nor_this.part cannot be found: pip install 'equizoo\[train\]'$"
    ):
        require_installed("no_such", "json", "nor_this.part", extra="train")


def test_missing_extra_ends_a_program_with_one_line(tmp_path):
    """A recipe imports `zoo.train` at its top, where nothing catches the error."""
    script = tmp_path / "recipe.py"
    script.write_text("from zoo._optional import require_installed\nrequire_installed('no_such', extra='train')\n")
    environment = {"PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True)
    expected = "ImportError: no_such cannot be found: pip install 'equizoo[train]'\n"
    assert (done.returncode, done.stderr) == (2, expected)


def test_missing_extra_leaves_other_errors_alone(capsys):
    _print_missing_extra(ValueError, ValueError("another"), None)
    assert capsys.readouterr().err == "ValueError: another\n"

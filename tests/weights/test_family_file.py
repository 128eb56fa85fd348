"""A family from a Python file: as the file is now, or an error that names it."""

import pytest

from zoo.weights.family_file import load_family
from zoo.weights.safetensors import CheckpointError


def test_file_is_read_again_when_it_has_changed(tmp_path):
    """Two files of one size, written within a second, between which Python's .pyc files do not tell."""
    path = tmp_path / "mine.py"
    for number in range(3):
        path.write_text(
            "import dataclasses\nimport zoo\nfrom zoo.models.hf.families import FAMILIES\n"
            f"mine = dataclasses.replace(FAMILIES['llama'], name='mine{number}')\n"
        )
        assert load_family(path).name == f"mine{number}"


def test_file_without_one_family_raises(tmp_path):
    with pytest.raises(CheckpointError, match=r"there is no Python file .*mine\.py"):
        load_family(tmp_path / "mine.py")
    (tmp_path / "none.py").write_text("x = 1\n")
    with pytest.raises(
        CheckpointError, match=r"none\.py should define one zoo\.models\.hf\.grammar\.Family, and has none"
    ):
        load_family(tmp_path / "none.py")

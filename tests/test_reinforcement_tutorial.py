"""The tutorial docs/reinforcement.md, command by command: sorting digits, then one's own prompts and reward."""

import pytest

from tests.tutorial import ROOT, run_tutorial

QUICKLY = {
    "python sort.py\n": "python sort.py --steps 2 --eval-prompts 4\n",
    "--steps 100": "--steps 2 --eval-prompts 4",
}
"""Commands that take a minute, and what is run instead."""


@pytest.mark.slow  # tests/test_sft_tutorial.py runs one of this kind
def test_the_tutorial_runs(tmp_path):
    """Blocks of Python that go on after each other are run by tests/docs/test_code_blocks.py."""
    skips = lambda block: "train." in block
    printed = run_tutorial(ROOT / "docs" / "reinforcement.md", tmp_path, replaced=QUICKLY, skips=skips)
    sorting, _, descending, planned = printed
    assert "reward after 2 steps" in sorting and "rewards/digits" in sorting
    assert "2,000 prompt records" in descending and "reward after 2 steps" in descending
    assert "sampling    64 rows of 1,024 tokens" in planned
    for name in ("sort", "descending"):
        assert (tmp_path / "runs" / name / "export" / "model.safetensors").exists()

"""The commands of docs/distill.md: a teacher, a student with and without it, and a student of the teacher's texts. The
page's Python runs in tests/docs/test_code_blocks.py."""

import json

import pytest

from tests.tutorial import ROOT, run_tutorial

QUICKLY = {
    "python base.py": "python base.py --steps 2",
    "python student.py": "python student.py --steps 2",
    "python mine.py": "python mine.py --steps 2 --seq-len 64",
}
"""Commands that take a minute, and what is run instead."""


@pytest.mark.slow  # tests/test_sft_tutorial.py runs one of this kind
def test_the_commands_run(tmp_path):
    written = [{"prompt": f"{number} is", "completion": " a number"} for number in range(40)]
    (tmp_path / "written.jsonl").write_text("".join(json.dumps(record) + "\n" for record in written))
    options = {"replaced": QUICKLY, "skips": lambda block: False, "kinds": ("bash",)}
    _, distilled, tuned = run_tutorial(ROOT / "docs" / "distill.md", tmp_path, **options)
    assert distilled.count("nats per trained token after 2 steps") == 2
    assert "nats per trained token after 2 steps" in tuned
    for name in ("student", "alone", "mine"):
        assert (tmp_path / "runs" / name / "export" / "model.safetensors").exists()

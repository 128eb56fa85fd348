"""The tutorial docs/sft.md, command by command: chats, what is trained on, LoRA, a chat, the export."""

import json

import pytest

from tests.tutorial import ROOT, run_tutorial

QUICKLY = {"python base.py": "python base.py --steps 2", "--steps 60 --eval-every 20": "--steps 4 --eval-every 2"}
"""Commands that take a minute, and what is run instead."""


@pytest.mark.ci
def test_the_tutorial_runs(tmp_path):
    skips = lambda block: "transformers and PyTorch" in block
    printed = run_tutorial(ROOT / "docs" / "sft.md", tmp_path, replaced=QUICKLY, skips=skips)
    _, _, shown, trained, chatted, answered = printed
    assert "500 chat records" in shown and "⟦It is a list.\\x00⟧" in shown
    assert "nats per trained token after 4 steps" in trained and "before:" in trained
    assert chatted.strip() and answered
    export = tmp_path / "runs" / "mine" / "export"
    assert json.loads((export / "generation_config.json").read_text())["eos_token_id"] == 0
    assert "generation" in (export / "chat_template.jinja").read_text()

"""The tutorial docs/chat-model.md, command by command: pretraining, chats, rewards, evaluations, a chat."""

import json

import pytest

from tests.tutorial import ROOT, run_tutorial

QUICKLY = {
    "--steps 500": "--steps 2 --eval-every 2 --embed 32 --layers 1",
    "--epochs 4": "--steps 2 --eval-every 2",
    "--steps 100": "--steps 1 --samples 2 --batch-size 4 --eval-prompts 4",
    "--data held-out": "--data held-out --limit 2",
    "--limit 100": "--limit 8",
    "--task questions.jsonl --chat": "--task questions.jsonl --limit 8 --chat",
}
"""Commands that take minutes, and what is run instead."""


@pytest.mark.slow  # ten processes that compile; tests/test_sft_tutorial.py runs a chain of this kind
def test_the_tutorial_runs(tmp_path):
    skips = lambda block: "training." in block  # tests/docs/test_code_blocks.py runs it, behind rewards.py
    printed = run_tutorial(ROOT / "docs" / "chat-model.md", tmp_path, replaced=QUICKLY, skips=skips)
    text = "\n".join(printed)
    assert "bits per byte after 2 steps" in text and "4,025 chat records" in text
    assert "1,752 prompt records" in text and "reward after 1 step" in text
    assert text.count("exact_match") == 3 and text.count("bits per byte") > 4
    for stage in ("base", "sft", "grpo"):
        assert (tmp_path / "runs" / stage / "export" / "model.safetensors").exists()
    options = json.loads((tmp_path / "runs" / "grpo" / "export" / "generation_config.json").read_text())
    assert options["eos_token_id"] == 0

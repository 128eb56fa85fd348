"""The tutorial docs/sft.md, command by command: chats, what is trained on, LoRA, a chat, the export."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import make_environment

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "sft.md"
BLOCK = re.compile(r"(<!-- [^\n]* -->\n)?^```(bash|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
QUICKLY = {"python base.py": "python base.py --steps 2", "--steps 60 --eval-every 20": "--steps 4 --eval-every 2"}
"""Commands that take a minute, and what is run instead."""


@pytest.mark.ci
def test_the_tutorial_runs(tmp_path):
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    for name, program in {"zoo": "-m zoo.cli", "python": ""}.items():
        script = bin_folder / name
        script.write_text(f'#!/bin/sh\nexec {sys.executable} {program} "$@"\n')
        script.chmod(0o755)
    environment = make_environment(1)
    environment["PATH"] = f"{bin_folder}:{environment['PATH']}"
    environment |= {"PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    printed = []
    for mark, kind, source in BLOCK.findall(PAGE.read_text()):
        if "transformers" in mark:
            continue
        for slow, quick in QUICKLY.items():
            source = source.replace(slow, quick)
        words = ["bash", "-euo", "pipefail", "-c", source] if kind == "bash" else [sys.executable, "-c", source]
        done = subprocess.run(words, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, f"{source}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        printed.append(done.stdout)
    _, _, shown, trained, chatted, answered = printed
    assert "500 chat records" in shown and "⟦It is a list.\\x00⟧" in shown
    assert "nats per trained token after 4 steps" in trained and "before:" in trained
    assert chatted.strip() and answered
    export = tmp_path / "runs" / "mine" / "export"
    assert json.loads((export / "generation_config.json").read_text())["eos_token_id"] == 0
    assert "generation" in (export / "chat_template.jinja").read_text()

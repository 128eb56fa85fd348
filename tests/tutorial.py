"""Run the blocks of a tutorial one by one, each in a process of its own, as a reader does."""

import re
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from tests.processes import make_environment

ROOT = Path(__file__).parents[1]
_BLOCK = re.compile(
    r'(<!-- [^\n]* -->\n)?^```(bash|python)(?: title="([^"\n]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL
)


def run_tutorial(
    page: Path,
    folder: Path,
    *,
    replaced: Mapping[str, str],
    skips: Callable[[str], bool],
    kinds: Collection[str] = ("bash", "python"),
) -> list[str]:
    """Run the commands and programs of a page in `folder`; return what each printed. A block with a title is a file.

    - `kinds`: languages of the blocks to run.
    - `replaced`: texts that take a minute to run, and what is run instead.
    - `skips`: a function of a block with the comment above it: True for a block that does not run here.
    """
    bin_folder = folder / "bin"
    bin_folder.mkdir()
    for name, program in {"zoo": "-m zoo.cli", "python": ""}.items():
        script = bin_folder / name
        script.write_text(f'#!/bin/sh\nexec {sys.executable} {program} "$@"\n')
        script.chmod(0o755)
    environment = make_environment(1)
    environment["PATH"] = f"{bin_folder}:{environment['PATH']}"
    environment |= {"PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(folder / "cache")}
    printed = []
    for comment, kind, title, source in _BLOCK.findall(page.read_text(encoding="utf-8")):
        if kind not in kinds or skips(comment + source):
            continue
        if title:
            (folder / title).write_text(source)
            continue
        for slow, quick in replaced.items():
            source = source.replace(slow, quick)
        words = ["bash", "-euo", "pipefail", "-c", source] if kind == "bash" else [sys.executable, "-c", source]
        done = subprocess.run(words, env=environment, cwd=folder, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, f"{source}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        printed.append(done.stdout)
    return printed

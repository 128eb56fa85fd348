"""Start-up: seconds from a command to its first step or token, with an empty compilation cache and a filled one."""

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import jax

import zoo

from .measure import Timing
from .ours import Sizes

ROOT = Path(__file__).parents[2]
_FIRST_STEP = re.compile(rb"^\s*1/\d+ ", re.MULTILINE)
_FIRST_TOKEN = re.compile(rb".", re.DOTALL)


def measure_starts(rounds: int) -> dict[str, Timing]:
    """Start each program `1 + rounds` times with a cache folder that is empty before the first."""
    with tempfile.TemporaryDirectory() as folder:
        export = Path(folder, "export")
        zoo.save(Sizes(vocab=256).make(jax.random.key(0)), export)
        programs = {
            "recipes/transformer.py, to step 1": ([str(ROOT / "recipes/transformer.py")], _FIRST_STEP),
            "zoo generate, to the first token": (["-m", "zoo.cli", "generate", str(export), "hello"], _FIRST_TOKEN),
        }
        timings = {}
        for name, (words, pattern) in programs.items():
            seconds = []
            for number in range(1 + rounds):
                out = ["--out", f"{folder}/run-{number}"] if "recipes" in name else []
                seconds.append(_time_until([sys.executable, *words, *out], pattern, Path(folder, "cache")))
            timings[f"{name}, first start"] = Timing.of(seconds[:1])
            timings[f"{name}, later starts"] = Timing.of(seconds[1:])
        return timings


def _time_until(words: Sequence[str], pattern: re.Pattern, cache: Path) -> float:
    """Measure the seconds until the output of a process has the pattern, then end it."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("JAX_COMPILATION_CACHE")}
    environment = clean | {"XDG_CACHE_HOME": str(cache)}
    start, output = time.perf_counter(), b""
    with subprocess.Popen(words, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        while not pattern.search(output):
            chunk = os.read(process.stdout.fileno(), 65536)
            if not chunk:
                sys.exit(f"bench.py: {' '.join(words)} ended early:\n{process.stderr.read().decode()}")
            output += chunk
        found = time.perf_counter() - start
        process.kill()
    return found

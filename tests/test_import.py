"""`import zoo` is quick, and takes nothing along that only training, files or the terminal need."""

import json
import subprocess
import sys

import pytest

LIMIT = 0.3  # seconds on top of jax and equinox
RUNS = 5
HEAVY = {
    "beartype",
    "grain",
    "matplotlib",
    "optax",
    "orbax",
    "rich",
    "tensorstore",
    "tokenizers",
    "tyro",
}

PROBE = """
import json, sys, time
import jax, equinox
before, start = set(sys.modules), time.perf_counter()
import zoo
seconds = time.perf_counter() - start
print(json.dumps([seconds, sorted({name.partition(".")[0] for name in set(sys.modules) - before})]))
"""


def probe() -> tuple[float, set[str]]:
    """In a process of its own: the seconds that `import zoo` adds, and the packages that it is the first to import."""
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    seconds, packages = json.loads(done.stdout)
    return seconds, set(packages)


@pytest.fixture(scope="module")
def first() -> tuple[float, set[str]]:
    return probe()


def test_no_heavy_package_is_imported(first):
    assert not first[1] & HEAVY


def test_import_adds_little(first):
    # Other work on the machine only ever adds time, so the quickest of a few runs counts.
    quickest, runs = first[0], 1
    while quickest > LIMIT and runs < RUNS:
        quickest, runs = min(quickest, probe()[0]), runs + 1
    assert quickest <= LIMIT, f"import zoo adds {quickest:.2f} s, the best of {runs} runs; {LIMIT} s are allowed"

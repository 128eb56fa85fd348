"""`import zoo` is quick, and takes nothing along that only training, files or the terminal need."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

LIMIT = 1 / 3  # of what jax and equinox take in the same process: 0.3 s where these take 0.9 s
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
start = time.perf_counter()
import jax, equinox
before, middle = set(sys.modules), time.perf_counter()
import zoo
share = (time.perf_counter() - middle) / (middle - start)
print(json.dumps([share, sorted({name.partition(".")[0] for name in set(sys.modules) - before})]))
"""


def probe(bytecode: Path) -> tuple[float, set[str]]:
    """In a process of its own: what share of jax's and equinox's time `import zoo` adds, and the packages that it is
    the first to import. From the second time on nothing is compiled: an installed package lies there as bytecode."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment = kept | {"PYTHONPYCACHEPREFIX": str(bytecode)}
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    share, packages = json.loads(done.stdout)
    return share, set(packages)


@pytest.fixture(scope="module")
def bytecode(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("bytecode")


@pytest.fixture(scope="module")
def first(bytecode) -> tuple[float, set[str]]:
    return probe(bytecode)


def test_no_heavy_package_is_imported(first):
    assert not first[1] & HEAVY


def test_import_adds_little(first, bytecode):
    # Other work on the machine only ever adds time, so the quickest of a few runs counts; the first one compiled.
    shares = [probe(bytecode)[0]]
    while min(shares) > LIMIT and len(shares) < RUNS:
        shares.append(probe(bytecode)[0])
    share = min(shares)
    assert share <= LIMIT, f"import zoo adds {share:.0%} to jax and equinox, in the best of {len(shares)} runs"

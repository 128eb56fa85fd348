"""`import zoo` is fast and imports no package that only training, files or the terminal need."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

LIMIT = 1 / 3  # of the import time of jax and equinox in the same process: 0.3 s if these take 0.9 s
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
ratio = (time.perf_counter() - middle) / (middle - start)
print(json.dumps([ratio, sorted({name.partition(".")[0] for name in set(sys.modules) - before})]))
"""


def probe(bytecode: Path) -> tuple[float, set[str]]:
    """Import zoo in a new process; return its time relative to that of jax and equinox, and the packages that it adds.

    From the second run on Python reads bytecode, as from an installed package.
    """
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment |= {"PYTHONPYCACHEPREFIX": str(bytecode)}
    process = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, env=environment)
    assert process.returncode == 0, process.stderr
    ratio, packages = json.loads(process.stdout)
    return ratio, set(packages)


@pytest.fixture(scope="module")
def bytecode(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("bytecode")


@pytest.fixture(scope="module")
def first(bytecode) -> tuple[float, set[str]]:
    return probe(bytecode)


def test_import_loads_no_heavy_package(first):
    assert not first[1] & HEAVY


def test_import_time_is_a_fraction_of_that_of_jax(first, bytecode):
    # Other load on the machine only adds time, so the fastest of a few runs counts; the run of `first` compiled.
    ratios = [probe(bytecode)[0]]
    while min(ratios) > LIMIT and len(ratios) < RUNS:
        ratios.append(probe(bytecode)[0])
    ratio = min(ratios)
    assert ratio <= LIMIT, f"import zoo adds {ratio:.0%} to jax and equinox, in the best of {len(ratios)} runs"


def test_import_of_train_is_at_first_use():
    probe = "import sys, jax, zoo; before = 'zoo.train' in sys.modules; print(before, zoo.train.Run.__name__)"
    probe += "; print('train' in dir(zoo), hasattr(zoo, 'trane'), jax.config.jax_compilation_cache_dir)"
    environment = {name: value for name, value in os.environ.items() if name != "ZOO_COMPILE_CACHE"}
    process = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, env=environment)
    assert process.stdout == "False Run\nTrue False None\n", process.stderr


def test_import_of_train_names_the_missing_extra():
    probe = "import importlib.util as util, zoo; find = util.find_spec; "
    probe += "util.find_spec = lambda name, *rest: None if name == 'optax' else find(name, *rest); zoo.train.run_cli"
    process = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True)
    assert process.stderr.splitlines()[-1] == "ImportError: optax cannot be found: pip install 'equizoo[train]'"

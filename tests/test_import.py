"""`import zoo` does little and imports no package that only training, files or the terminal need."""

import compileall
import json
import subprocess
import sys
from pathlib import Path

import equinox
import jax
import pytest

import zoo

LIMIT = 0.3  # of the calls that importing jax and equinox makes; the time goes with the calls
HEAVY = {
    "array_record",
    "beartype",
    "datasets",
    "grain",
    "lm_eval",
    "matplotlib",
    "optax",
    "orbax",
    "pandas",
    "pyarrow",
    "rich",
    "tensorstore",
    "tokamax",
    "tokenizers",
    "tyro",
}

PROBE = """
import json, sys
calls = 0

def count_call(frame, event, argument):
    global calls
    calls += event == "call"

sys.setprofile(count_call)
import jax, equinox
before, middle = set(sys.modules), calls
import zoo
sys.setprofile(None)
added = sorted({name.partition(".")[0] for name in set(sys.modules) - before})
print(json.dumps([middle, calls - middle, added]))
"""


@pytest.fixture(scope="module")
def probed() -> tuple[int, int, set[str]]:
    """Import zoo in a new process; return the calls of jax and equinox, those of zoo, and the packages that it adds.

    A count of calls is the same on every run of one machine, which a time is not. Bytecode is there, as of an installed
    package: it is written here where it is missing.
    """
    for package in (jax, equinox, zoo):
        compileall.compile_dir(Path(package.__file__).parent, quiet=1)
    process = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    of_jax, of_zoo, packages = json.loads(process.stdout)
    return of_jax, of_zoo, set(packages)


def test_import_loads_no_heavy_package(probed):
    assert not probed[2] & HEAVY


def test_import_is_a_fraction_of_that_of_jax(probed):
    of_jax, of_zoo, _ = probed
    assert of_zoo <= LIMIT * of_jax, f"import zoo makes {of_zoo:,} calls, import jax and equinox {of_jax:,}"


def test_core_needs_no_tools():
    """Training, loading, adapting and every family work in an installation without `zoo.tools` and matplotlib."""
    probe = """
import sys

class Refuse:
    def find_spec(self, name, *rest):
        if name.partition(".")[0] == "matplotlib" or (name + ".").startswith("zoo.tools."):
            raise ImportError(f"the core imports {name}")

sys.meta_path.insert(0, Refuse())
import importlib, pkgutil, zoo, zoo.adapters, zoo.inspect, zoo.train
zoo.load, zoo.save, zoo.families()
for package in (zoo.models, zoo.weights, zoo.adapters, zoo.train, zoo.inspect, zoo.layers, zoo.ops, zoo.parallel):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        importlib.import_module(module.name)
print(len(zoo.families()))
"""
    process = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    assert int(process.stdout) > 70


def test_readers_of_records_import_their_packages_when_they_read():
    """`train.load_text` asks them for the kinds of files, and needs none of the packages."""
    probe = "import sys, zoo; before = set(sys.modules); import zoo.text.corpus, zoo.text.records.find_files; "
    probe += "print(sorted({name.partition('.')[0] for name in set(sys.modules) - before} & set(sys.argv)))"
    process = subprocess.run([sys.executable, "-c", probe, *HEAVY], capture_output=True, text=True)
    assert process.stdout == "[]\n", process.stderr


def test_import_of_train_is_at_first_use():
    probe = "import sys, jax, zoo; before = 'zoo.train' in sys.modules; print(before, zoo.train.Run.__name__)"
    probe += "; print('train' in dir(zoo), hasattr(zoo, 'trane'), jax.config.jax_compilation_cache_dir)"
    process = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True)
    assert process.stdout == "False Run\nTrue False None\n", process.stderr


def test_import_of_train_names_the_missing_extra():
    probe = "import importlib.util as util, zoo; find = util.find_spec; "
    probe += "util.find_spec = lambda name, *rest: None if name == 'optax' else find(name, *rest); zoo.train.run_cli"
    process = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True)
    assert process.stderr.splitlines()[-1] == "ImportError: optax cannot be found: pip install 'equizoo[train]'"


HOOKED = """
import importlib, pkgutil
from jaxtyping import install_import_hook

with install_import_hook("zoo", "beartype.beartype"):
    import zoo

    for module in pkgutil.walk_packages(zoo.__path__, "zoo."):
        try:
            importlib.import_module(module.name)
        except ImportError as error:
            if "pip install" not in str(error):  # an extra is missing
                raise
"""


@pytest.mark.ci
def test_every_module_imports_with_annotations_checked():
    """Users check their own annotations by jaxtyping's hook, and may name the library in it."""
    pytest.importorskip("beartype")
    process = subprocess.run([sys.executable, "-c", HOOKED], capture_output=True, text=True)
    assert process.returncode == 0, process.stderr[-2000:]


def test_the_command_line_needs_no_extra():
    """`zoo families` and the others run where only the library's own dependencies are installed."""
    program = (
        "import sys, zoo.cli; print(*{name.partition('.')[0] for name in sys.modules}, 'zoo.train' in sys.modules)"
    )
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    imported = process.stdout.split()
    assert imported[-1] == "False"
    assert not {"optax", "orbax", "grain", "tokenizers", "huggingface_hub", "jinja2", "lm_eval"}.intersection(imported)

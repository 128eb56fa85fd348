"""Families by `model_type`: each is in the file of its name, and only its file is imported."""

import ast
import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path

import jax
import pytest

import zoo
from zoo.models.hf import families, grammar
from zoo.models.hf.config import IGNORED_KEYS
from zoo.models.hf.families import ALIASES, FAMILIES, get_family
from zoo.models.hf.spec import Family

MODULES = [module.name for module in pkgutil.iter_modules(families.__path__)]


def test_every_family_is_in_the_file_of_its_name():
    declared = set()
    for module in MODULES:
        values = vars(importlib.import_module(f"{families.__name__}.{module}")).items()
        declared |= {x.name for name, x in values if isinstance(x, Family) and not name.startswith("_")}
    declared = {name for name in declared if not name.endswith("_vision")}  # parts of families
    assert declared == set(FAMILIES)
    assert [family.name for family in FAMILIES.values()] == sorted(FAMILIES)


def test_aliases_name_families():
    assert not ALIASES.keys() & FAMILIES.keys()
    for alias, name in ALIASES.items():
        assert get_family(alias) is FAMILIES[name]


def test_there_is_no_family_of_another_name():
    assert get_family("lama") is None and "lama" not in FAMILIES
    with pytest.raises(KeyError, match="lama"):
        FAMILIES["lama"]


def test_loading_imports_one_family(tmp_path):
    model = zoo.models.Transformer(vocab=32, embed=16, layers=2, heads=2, mlp=24, key=jax.random.key(0))
    zoo.save(model, tmp_path, "llama")
    probe = f"""
import sys, zoo

def list_imported():
    return [name for name in sys.modules if name.startswith("{families.__name__}.")]

print(list_imported(), end=" ")
zoo.load({str(tmp_path)!r})
print(list_imported(), len(zoo.families()), len(list_imported()))
"""
    process = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True)
    assert process.stdout == f"[] ['{families.__name__}.llama'] {len(FAMILIES)} 1\n", process.stderr


def test_families_use_every_name_of_the_grammar():
    texts = [(Path(families.__path__[0]) / f"{module}.py").read_text() for module in MODULES]
    nodes = [node for text in texts for node in ast.walk(ast.parse(text))]
    used = {
        x.attr for x in nodes if isinstance(x, ast.Attribute) and isinstance(x.value, ast.Name) and x.value.id == "hf"
    }
    assert used == set(grammar.__all__)


def test_no_family_repeats_a_key_that_all_ignore():
    repeated = {name: family.ignored_keys & IGNORED_KEYS for name, family in FAMILIES.items()}
    assert not any(repeated.values()), repeated

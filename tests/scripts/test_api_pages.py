"""Pages of the API: every public name on one page, once."""

import inspect
import pkgutil
from collections import Counter
from types import ModuleType

import griffe
import pytest

import zoo
from scripts import api_pages, make_pages

ROOT = make_pages.ROOT


def test_packages_are_all_public_modules():
    walked = [*pkgutil.iter_modules(zoo.__path__), *pkgutil.iter_modules(zoo.tools.__path__, "tools.")]
    found = {name for _, name, _ in walked if not name.rpartition(".")[2].startswith("_")}
    found.add("train.objectives")  # a namespace inside a package
    assert found == {*api_pages.PACKAGES, *api_pages.UNLISTED}


def test_every_public_name_is_shown_once():
    def names(entry):  # a file is shown with all that it defines
        is_file = isinstance(entry.value, ModuleType)
        return [resolve(x) for x in api_pages.list_public_names(entry.value)] if is_file else [entry.value]

    resolve = api_pages.resolve_name
    shown = Counter(id(x) for entries in api_pages.list_pages().values() for entry in entries for x in names(entry))
    public = [name for package in api_pages.list_packages() for name in api_pages.list_public_names(package)]
    assert len(public) > 300
    assert {name: shown[id(resolve(name))] for name in public} == dict.fromkeys(public, 1)


def test_pages_are_small_and_a_build_puts_them_into_the_menu():
    pages = api_pages.build_api_pages(make_pages.NOTE)
    stubs = [text.count("\n::: ") for text in pages.values()]
    assert len(stubs) > 20 and max(stubs) < 45
    menu = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert "- API: api/index.md" in menu and "\n  - scripts/write_pages.py\n" in menu


def test_functions_are_shown_and_not_their_modules():
    """What mkdocstrings finds under a path, by reading the source, is what Python imports from it."""

    def kind(value):
        routine = "function" if inspect.isroutine(value) or hasattr(value, "__wrapped__") else "attribute"
        return "module" if isinstance(value, ModuleType) else "class" if isinstance(value, type) else routine

    source = griffe.load("zoo", search_paths=[str(ROOT)])
    entries = [entry for page in api_pages.list_pages().values() for entry in page]
    found = {entry.name: source[entry.anchor.partition(".")[2]] for entry in entries}
    shown = {name: (x.final_target if x.is_alias else x).kind.value for name, x in found.items()}
    assert shown == {entry.name: kind(entry.value) for entry in entries}


def test_names_of_modules_are_shown_under_their_own_path():
    load, generate = (
        next(x for x in api_pages.list_pages()["zoo"] if x.name == f"zoo.{y}") for y in ("load", "generate")
    )
    assert load.stub() == "::: zoo.weights.load.load\n    options:\n      heading: zoo.load"
    assert generate.stub() == "::: zoo.generate.run.generate\n    options:\n      heading: zoo.generate"
    assert api_pages.locate("zoo.generate", zoo.generate) == "api/zoo.md#zoo.generate.run.generate"


def test_locate_finds_a_name_by_any_path_and_in_a_file():
    assert api_pages.locate("zoo.parallel.place.init", zoo.init) == "api/zoo.md#zoo.init"
    assert api_pages.locate("zoo.layers.Mamba", zoo.layers.Mamba) == "api/zoo.layers.recurrent.md#zoo.layers.Mamba"
    vary = "api/zoo.ops.md#zoo.ops.varying.vary"
    assert {api_pages.locate(f"zoo.{x}.vary", zoo.parallel.vary) for x in ("parallel", "ops.varying")} == {vary}
    assert api_pages.locate("zoo.parallel.ZERO1", zoo.parallel.ZERO1) == "api/zoo.parallel.md#zoo.parallel.ZERO1"
    with pytest.raises(ValueError, match="no page of the API shows zoo.nothing: export it"):
        api_pages.locate("zoo.nothing", lambda: None)

"""Pages of the API reference, one per package: which public names each shows, and where a name is documented.

A name is shown once: with `zoo` if `zoo` exports it, else on the page of the package that defines it. A package without
`__all__`, such as `zoo.ops`, is shown file by file.
"""

import functools
import importlib
import inspect
import pkgutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import zoo
from zoo.models.hf import families

PACKAGES = (
    *(
        "models",
        "weights",
        "layers",
        "parallel",
        "ops",
        "adapters",
        "precision",
        "text",
        "images",
        "audio",
        "train",
        "train.objectives",
    ),
    *("inspect", "tools.plan", "tools.report", "tools.draw", "tools.parity", "tools.testing", "tools.evaluate"),
)
"""Public packages and modules of `zoo`, in the order of the pages."""
UNLISTED = ("cli", "generate", "shapes", "tools", "tools.commands", "tools.export", "testing", "parity")
"""Modules without public names of their own: `zoo` exports the functions of `generate` and of `tools.export`."""
ALSO_SHOWN = (
    "zoo.adapters.methods.rank_allocation",
    "zoo.layers.recurrent.context.RecurrenceContext",
    "zoo.layers.recurrent.from_attention",
    "zoo.layers.encoders.mergers",
    "zoo.layers.ngram",
    "zoo.layers.encoders.packed_images.PackedImages",
    "zoo.layers.encoders.patches.PatchedImages",
    "zoo.models.blocks",
    "zoo.models.gated_connections",
    "zoo.models.encoders.heads",
    "zoo.models.hf.builders",
    "zoo.models.hf.config.read_config",
    *(f"{families.__name__}.{x.name}" for x in pkgutil.iter_modules(families.__path__) if x.name.endswith("_layers")),
    "zoo.models.parameter_paths.find_differences",
    "zoo.parallel.sequence",
    "zoo.parallel.tokens",
    "zoo.text.tasks.digit_sorting",
    "zoo.text.tasks.docstrings",
    "zoo.text.tasks.synthetic",
    "zoo.weights.plan.plan_tensors",
)
"""Names that no package exports, but that porting a model or writing a mixer needs."""
SHAPES = "zoo.shapes"


@dataclass(frozen=True)
class Entry:
    """A name of the API: the path that users write, and what it names."""

    name: str
    value: Any

    @property
    def shadows_module(self) -> bool:
        """Return True for names such as `zoo.load` and `zoo.generate`: a module of the same name hides the function
        from readers of source."""
        if isinstance(self.value, ModuleType):
            return False
        file = getattr(self.value, "__module__", "").rpartition(".")[2]
        return self.name in sys.modules or file == self.name.rpartition(".")[2]

    @property
    def anchor(self) -> str:
        """The anchor on its page."""
        return f"{self.value.__module__}.{self.value.__qualname__}" if self.shadows_module else self.name

    def stub(self) -> str:
        """Return the lines of Markdown that mkdocstrings replaces with the documentation."""
        heading = f"\n    options:\n      heading: {self.name}" if self.shadows_module else ""
        return f"::: {self.anchor}{heading}"


def list_packages() -> list[ModuleType]:
    """Return `zoo` and its public packages, in the order of the pages."""
    return [zoo, *(importlib.import_module(f"zoo.{name}") for name in PACKAGES)]


def list_public_names(package: ModuleType) -> list[str]:
    """Return `__all__` of a package; without one, the public functions and classes of its modules, recursively."""
    if hasattr(package, "__all__"):
        return [
            f"{package.__name__}.{name}"
            for name in package.__all__
            if not name.startswith("_") and not isinstance(getattr(package, name), ModuleType)
        ]
    found = []
    for name, value in sorted(vars(package).items()):
        is_module = isinstance(value, ModuleType) and value.__name__ == f"{package.__name__}.{name}"
        if is_module and not name.startswith("_"):
            found += list_public_names(value)
    return found + [
        f"{package.__name__}.{name}"
        for name, value in vars(package).items()
        if callable(value) and not name.startswith("_") and getattr(value, "__module__", "") == package.__name__
    ]


def resolve_name(name: str) -> Any:
    return functools.reduce(getattr, name.split(".")[1:], zoo)


@functools.cache
def list_pages() -> dict[str, list[Entry]]:
    """Return the title of each page, a package's path, and its entries by name."""
    packages = list_packages()
    by_file = [package for package in packages if not hasattr(package, "__all__")]
    shown = {id(resolve_name(name)) for package in by_file for name in list_public_names(package)}
    pages: dict[str, list[Entry]] = {}
    for package in packages:
        for entry in _list_entries(package):
            if package in by_file or id(entry.value) not in shown:
                shown.add(id(entry.value))
                page = "zoo" if package is zoo else _find_package(entry.value, package)
                pages.setdefault(page, []).append(entry)
    for name in ALSO_SHOWN:
        value = pkgutil.resolve_name(name)
        pages.setdefault(_find_package(value, zoo), []).append(Entry(name, value))
    order = {package.__name__: i for i, package in enumerate(packages)}
    ordered = sorted(pages, key=lambda page: (_find_position(page, order), page))
    return {page: sorted(pages[page], key=lambda x: x.name.lower()) for page in ordered}


def _find_position(page: str, order: dict[str, int]) -> int:
    """Return the position of a package, or that of the closest package around it."""
    while page not in order and "." in page:
        page = page.rpartition(".")[0]
    return order[page]


def _list_entries(package: ModuleType) -> Iterator[Entry]:
    if hasattr(package, "__all__"):
        yield from (Entry(name, resolve_name(name)) for name in list_public_names(package))
        return
    for _, name, is_package in pkgutil.iter_modules(package.__path__):
        if not name.startswith("_") and hasattr(package, name):
            module = importlib.import_module(f"{package.__name__}.{name}")
            yield from _list_entries(module) if is_package else [Entry(module.__name__, module)]


def _find_package(value: Any, exporter: ModuleType) -> str:
    """Return the path of the package that defines a value; if that is private or unknown, its exporter's."""
    module = value.__name__ if isinstance(value, ModuleType) else str(getattr(value, "__module__", ""))
    is_constant = not isinstance(value, type | ModuleType) and not inspect.isroutine(value)
    if is_constant or not module.startswith("zoo.") or module.startswith("zoo._"):
        return exporter.__name__
    package = module if hasattr(sys.modules[module], "__path__") else module.rpartition(".")[0]
    return module if package == "zoo" else package


def locate(name: str, value: Any) -> str | None:
    """Return the page and anchor of a name, relative to docs/: of the same object under another name, if need be.

    **Raises** `ValueError` for a function or class that no page shows.
    """
    defined_in = getattr(value, "__module__", "") if callable(value) else ""
    for page, entries in list_pages().items():
        for entry in entries:
            if entry.name == name or (callable(value) and entry.value is value):
                return f"api/{page}.md#{entry.anchor}"
            if isinstance(entry.value, ModuleType) and entry.name == defined_in:
                return f"api/{page}.md#{defined_in}.{value.__qualname__}"
    if callable(value):
        raise ValueError(f"no page of the API shows {name}: export it from a package of PACKAGES in {__name__}")
    return None


def build_api_pages(note: str) -> dict[str, str]:
    """Return the path and the text of each page, and of the index of all."""

    def summarize(page: str) -> str:
        return (inspect.getdoc(sys.modules[page]) or "").partition("\n\n")[0].replace("\n", " ")

    pages = {}
    for page, entries in list_pages().items():
        stubs = "\n\n".join(entry.stub() for entry in entries)
        pages[f"docs/api/{page}.md"] = f"# {page}\n\n{note}{summarize(page)}\n\n{stubs}\n"
    options = "    options:\n      show_root_heading: false\n      show_if_no_docstring: true"
    pages[f"docs/api/{SHAPES}.md"] = f"# {SHAPES}\n\n{note}::: {SHAPES}\n{options}\n"
    rows = [f"| [`{page}`]({page}.md) | {summarize(page)} |" for page in [*list_pages(), SHAPES]]
    pages["docs/api/index.md"] = "\n".join(
        [
            f"# API\n\n{note}One page per package, from the docstrings. Shapes such as "
            '`Float[Array, "batch seq embed"]` are part of a signature, and are checked whenever the tests run. '
            "[Public names](../names.md) lists all names with one sentence each.\n",
            "| package | contents |",
            "|---|---|",
            *rows,
            "",
        ]
    )
    return pages

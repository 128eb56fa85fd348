"""The size of the library in a few numbers: what was reached, and one in twenty more. A change that needs more changes
the number here, and says why in its commit."""

import ast
import collections
import io
import re
import sys
import tokenize
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp

import zoo

ROOT = Path(__file__).parents[1]
PACKAGE = str(ROOT / "zoo")

FRAMES = 16
"""From `Decoder.__call__` to the mask of the scores: each is a call that a reader follows."""
FILES = 39
"""Files that run in the first call of a Transformer."""
EXPORTS = 428
"""Names in `__all__` of packages: what a reader of the API's pages chooses from."""
FILES_OF_ROUNDS = 24
"""Files whose code names the rounds of an interleaved pipeline, which few users have."""
CORE = 39_329
"""Statements without docstrings and imports, outside of `zoo/tools`."""
TOOLS = 4_950
RECIPE = 45
"""Statements of a recipe's `main`, at most: data, model, loss, step and loop on two screens."""
MARKS = {"those of": 3.2, "whose": 15.8, ", which": 28.5, "so that": 7.1, "what a": 1.2}
"""Phrases per 10,000 words of prose that make a sentence long."""


def read(*patterns: str) -> dict[Path, str]:
    return {path: path.read_text(encoding="utf-8") for pattern in patterns for path in sorted(ROOT.glob(pattern))}


def count_statements(tree: ast.AST) -> int:
    """Count statements without docstrings and imports."""
    nodes = [x for x in ast.walk(tree) if isinstance(x, ast.stmt) and not isinstance(x, ast.Import | ast.ImportFrom)]
    return len([x for x in nodes if not (isinstance(x, ast.Expr) and isinstance(x.value, ast.Constant))])


def find_chain(frame) -> list[str]:
    """Return the functions of the library on the stack, the innermost first. Name scopes around methods are left
    out."""
    chain = []
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(PACKAGE) and not file.endswith("parallel/scope.py"):
            chain.append(f"{file.removeprefix(PACKAGE)}: {frame.f_code.co_qualname}")
        frame = frame.f_back
    return chain


def test_few_files_and_frames_are_between_tokens_and_logits():
    model = zoo.models.Transformer(vocab=64, embed=32, layers=4, heads=4, mlp=64, key=jax.random.key(0))
    files = set()
    longest = []

    def profile(frame, event, argument):
        nonlocal longest
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(PACKAGE) and "_checks" not in file:
            files.add(file)
            if "/ops/attention/" in file and "/select" not in file:
                longest = max(longest, find_chain(frame), key=len)

    run = eqx.filter_jit(lambda model, tokens: model(tokens))
    sys.setprofile(profile)
    try:
        run.lower(model, jnp.zeros((2, 8), jnp.int32))
    finally:
        sys.setprofile(None)
    assert any("grouped_query_attention" in name for name in longest)
    assert len(longest) <= FRAMES, "\n".join(reversed(longest))
    assert len(files) <= FILES, "\n".join(sorted(files))


def test_exports_are_few():
    exports = collections.Counter()
    for path, text in read("zoo/**/__init__.py").items():
        for node in ast.parse(text).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                exports[str(path.relative_to(ROOT))] = len([x for x in ast.walk(node) if isinstance(x, ast.Constant)])
    assert 100 < exports.total() <= EXPORTS, exports


def test_few_files_know_of_rounds():
    files = []
    for path, text in read("zoo/**/*.py").items():
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        names = [token.string for token in tokens if token.type == tokenize.NAME]
        if any(name == "rounds" or name.endswith("_rounds") for name in names):  # not the verb, as in rounds_up
            files.append(str(path.relative_to(ROOT)))
    assert 1 < len(files) <= FILES_OF_ROUNDS, files


def test_statements_are_few():
    counts = {path: count_statements(ast.parse(text)) for path, text in read("zoo/**/*.py").items()}
    tools = sum(count for path, count in counts.items() if "tools" in path.relative_to(ROOT).parts)
    assert 1_000 < tools <= TOOLS
    assert 1_000 < sum(counts.values()) - tools <= CORE


def test_recipes_are_short():
    for path, text in read("recipes/*.py").items():
        functions = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
        for function in functions:
            if function.name == "main":
                assert count_statements(function) <= RECIPE, path.name


def test_sentences_are_short():
    docstrings = []
    for text in read("zoo/**/*.py").values():
        nodes = [x for x in ast.walk(ast.parse(text)) if isinstance(x, ast.Expr) and isinstance(x.value, ast.Constant)]
        docstrings += [str(node.value.value) for node in nodes]
    prose = "\n".join(docstrings)
    words = len(prose.split())
    found = {mark: 10_000 * len(re.findall(rf"{re.escape(mark)}\b", prose)) / words for mark in MARKS}
    assert words > 10_000 and all(found[mark] <= MARKS[mark] for mark in MARKS), found


def test_files_import_in_one_direction():
    """No circle of files, imports inside functions and for the type checker included."""
    files = {}
    for path in ROOT.glob("zoo/**/*.py"):
        if path.name != "__init__.py":
            files[".".join(path.relative_to(ROOT).with_suffix("").parts)] = path
    imports = {name: find_imported_files(name, path, files) for name, path in files.items()}
    while leaves := [name for name, targets in imports.items() if not targets]:
        imports = {name: targets.difference(leaves) for name, targets in imports.items() if name not in leaves}
    # what is left imports a circle, or is one
    used = set().union(*imports.values()) if imports else set()
    assert not imports, sorted(used & imports.keys())


def find_imported_files(name: str, path: Path, files: dict[str, Path]) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            package = name.split(".")[: -node.level] if node.level else []
            base = ".".join([*package, *([node.module] if node.module else [])])
            found |= {base, *(f"{base}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return (found & files.keys()) - {name}

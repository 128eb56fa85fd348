"""One word, one meaning: names that can be grepped, first sentences that say something, and the field's own terms."""

import ast
import itertools
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# A layer and the preset that builds a model of it share their paper's name, and are told apart by their folders.
LAYER_AND_PRESET = {
    *("DeltaNet", "GatedDeltaNet", "GatedDeltaProduct", "HGRN2", "Mamba", "Mamba2", "MixtureOfExperts"),
    *("Mamba3", "RWKV6", "RWKV7"),
}
PRESETS = "zoo/models/presets"
MOST_MODULES = 2
COMMANDS = ("zoo/cli/", "zoo/tools/commands/")
# Tests whose subject is more than one module of the package.
SPANNING_TESTS = {
    *("adapters/test_all_methods.py", "adapters/test_properties.py", "adapters/peft/test_parity.py"),
    *(
        "tools/report/test_style.py",
        "cli/test_main.py",
        "generate/test_capture.py",
        "generate/test_latent_attention.py",
        "generate/test_mesh.py",
    ),
    *(
        "layers/recurrent/test_mixers.py",
        "models/encoders/test_packed_towers.py",
        "models/test_image_text_limits.py",
        "models/test_parallel_equals_serial.py",
        "models/test_padding.py",
        "models/test_shared.py",
        "models/test_x64.py",
        "ops/recurrence/test_parity.py",
    ),
    *(
        "parallel/test_all_axes.py",
        "parallel/test_observations.py",
        "parallel/test_processes.py",
        "text/records/test_processes.py",
        "train/test_moving_between_processes.py",
        "train/test_training_on_meshes.py",
        "weights/test_deepseek.py",
    ),
    *("weights/test_encoders.py", "weights/test_families_on_meshes.py", "weights/test_mesh.py"),
    "weights/test_hybrid_states.py",
}
LONGEST_TEST_NAME = 60

RIDDLE = re.compile(r"(What|Of|How|Whether|Which)\b")
# Paraphrases of the terms that a researcher would search for, split so that this file does not contain them.
BANNED = {
    "trainable": r"\blear" + r"nt\b",
    "replicated": r"\b(lie|lies|lying|lay|kept|held|stays?) who" + r"le\b|\bwho" + r"le everywhere\b",
    "sharded": r"\b(is|are|was|were|lies|lie|stored|kept|cut|split) in pie" + r"ces\b|\bshared ou" + r"t over\b",
    "attention mask": r"\bsig" + r"hts?\b",
    "it with a z": r"\b\w*(optimi|normali|quanti|initiali|materiali|stabili|tokeni)s(e|ed|es|er|ing|ation)\b",
    "it without a u": r"\b\w*(colo|behavio|neighbo)u" + r"rs?(ed|ing)?\b",
}


def parse(root: Path, *patterns: str) -> Iterator[tuple[str, ast.Module]]:
    """Path below `root` and syntax tree of every Python file that matches."""
    for pattern in patterns:
        for path in sorted(root.glob(pattern)):
            yield path.relative_to(root).as_posix(), ast.parse(path.read_text(encoding="utf-8"))


def find_shared_class_names(root: Path) -> list[str]:
    """Public class names, or names of functions written like classes, that two folders define."""
    folders = defaultdict(set)
    for path, tree in parse(root, "zoo/**/*.py"):
        for node in tree.body:
            is_class = isinstance(node, ast.ClassDef) or (isinstance(node, ast.FunctionDef) and node.name[0].isupper())
            if is_class and not node.name.startswith("_"):
                folders[node.name].add(str(Path(path).parent))
    found = []
    for name, where in sorted(folders.items()):
        if len(where) > 1 and not (name in LAYER_AND_PRESET and len(where) == 2 and PRESETS in where):
            found.append(f"{name}: {', '.join(sorted(where))}")
    return found


def find_common_function_names(root: Path) -> list[str]:
    """Names of top-level functions that three modules or more define. A command has the name of what it runs."""
    modules = defaultdict(set)
    for path, tree in parse(root, "zoo/**/*.py"):
        if path.startswith(COMMANDS):
            continue
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("__"):  # Python's own, as __getattr__
                modules[node.name].add(path)
    return [
        f"{name}: {', '.join(sorted(where))}" for name, where in sorted(modules.items()) if len(where) > MOST_MODULES
    ]


def find_docstrings(path: str, tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Where, and the docstring, of a module and of all that is public in it; the text below a field counts as one."""

    def visit(node: ast.AST, name: str) -> Iterator[tuple[str, str]]:
        if text := ast.get_docstring(node):  # type: ignore[arg-type]
            yield name, text
        body = getattr(node, "body", [])
        for before, after in itertools.pairwise(body):
            is_text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            if is_text and isinstance(before, ast.AnnAssign | ast.Assign) and isinstance(after.value.value, str):
                yield f"{name}, line {after.lineno}", after.value.value
        for child in body:
            if isinstance(child, ast.ClassDef | ast.FunctionDef) and not child.name.startswith("_"):
                yield from visit(child, f"{name}::{child.name}")

    yield from visit(tree, path)


def find_riddles(root: Path) -> list[str]:
    """Public docstrings that begin with a question word instead of a verb or a noun of the field."""
    found = []
    for path, tree in parse(root, "zoo/**/*.py", "recipes/*.py", "scripts/**/*.py"):
        found += [f"{name}: {text[:60]!r}" for name, text in find_docstrings(path, tree) if RIDDLE.match(text)]
    return found


def find_paraphrases(root: Path) -> list[str]:
    """Lines of source and pages that circumscribe a term of the field."""
    found = []
    files = [path for pattern in ("zoo/**/*.py", "recipes/*.py", "scripts/**/*.py") for path in root.glob(pattern)]
    for path in sorted([*files, *root.glob("docs/**/*.md"), *root.glob("*.md")]):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            for term, pattern in BANNED.items():
                if match := re.search(pattern, line, re.IGNORECASE):
                    found.append(f"{path.relative_to(root).as_posix()}:{number}: {match.group()!r}: say {term}")
    return found


def find_long_test_names(root: Path) -> list[str]:
    """Names of tests that are longer than a line of a report holds."""
    return [
        f"{path}:{node.lineno}: {node.name}"
        for path, tree in parse(root, "tests/**/test_*.py")
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        if node.name.startswith("test_") and len(node.name) > LONGEST_TEST_NAME
    ]


def find_unmirrored_tests(root: Path) -> list[str]:
    """Tests of a package of zoo that do not have the path of the module they test."""
    found = []
    for path in sorted(root.glob("tests/*/**/test_*.py")):
        name = path.relative_to(root / "tests")
        module = root / "zoo" / name.parent / name.name.removeprefix("test_")
        internal = module.with_name(f"_{module.name}")
        is_mirrored = module.exists() or internal.exists() or module.with_suffix("").is_dir()
        if (root / "zoo" / name.parts[0]).is_dir() and not is_mirrored and name.as_posix() not in SPANNING_TESTS:
            found.append(f"tests/{name.as_posix()}: no module {module.relative_to(root).as_posix()}")
    return found


RULES = {
    "class names": find_shared_class_names,
    "function names": find_common_function_names,
    "first sentences": find_riddles,
    "terms": find_paraphrases,
    "names of tests": find_long_test_names,
    "places of tests": find_unmirrored_tests,
}


@pytest.mark.one_case
@pytest.mark.parametrize("rule", RULES)
def test_vocabulary_of_the_repository(rule):
    found = RULES[rule](ROOT)
    assert not found, "\n" + "\n".join(found)


PLANTED = {
    "a class in two folders": (
        "class names",
        {"zoo/ops/a.py": "class Mask: ...", "zoo/layers/b.py": "class Mask: ..."},
        ["Mask: zoo/layers, zoo/ops"],
    ),
    "a preset in a third folder": (
        "class names",
        {f"zoo/{folder}/a.py": "class Mamba: ..." for folder in ("layers", "models/presets", "train")},
        ["Mamba: zoo/layers, zoo/models/presets, zoo/train"],
    ),
    "a function named like a class of elsewhere": (
        "class names",
        {"zoo/ops/a.py": "class Mask: ...", "zoo/models/b.py": "def Mask(): ..."},
        ["Mask: zoo/models, zoo/ops"],
    ),
    "a function in three modules": (
        "function names",
        {f"zoo/ops/{name}.py": "def follow(): ..." for name in "abc"},
        ["follow: zoo/ops/a.py, zoo/ops/b.py, zoo/ops/c.py"],
    ),
    "a private function in three modules": (
        "function names",
        {f"zoo/ops/{name}.py": "def _follow(): ..." for name in "abc"},
        ["_follow: zoo/ops/a.py, zoo/ops/b.py, zoo/ops/c.py"],
    ),
    "a module": ("first sentences", {"zoo/a.py": '"""What a module is."""'}, ["zoo/a.py: 'What a module is.'"]),
    "a method": (
        "first sentences",
        {"zoo/a.py": 'class A:\n    def f(self):\n        """How it goes."""'},
        ["zoo/a.py::A::f: 'How it goes.'"],
    ),
    "a field": (
        "first sentences",
        {"zoo/a.py": 'class A:\n    x: int = 0\n    """Of all things."""'},
        ["zoo/a.py::A, line 3: 'Of all things.'"],
    ),
    "a recipe": (
        "first sentences",
        {"recipes/a.py": '"""Whether it learns."""'},
        ["recipes/a.py: 'Whether it learns.'"],
    ),
    "trainable": ("terms", {"docs/a.md": "A lear" + "nt matrix."}, ["docs/a.md:1: 'lear" + "nt': say trainable"]),
    "replicated": ("terms", {"zoo/a.py": "# It lies who" + "le."}, ["zoo/a.py:1: 'lies who" + "le': say replicated"]),
    "sharded": (
        "terms",
        {"README.md": "\nstored in pie" + "ces"},
        ["README.md:2: 'stored in pie" + "ces': say sharded"],
    ),
    "attention mask": (
        "terms",
        {"recipes/a.py": "sig" + "ht = 1"},
        ["recipes/a.py:1: 'sig" + "ht': say attention mask"],
    ),
    "American spelling": (
        "terms",
        {"zoo/a.py": "# The optimi" + "ser of the neighbou" + "rs."},
        ["zoo/a.py:1: 'optimi" + "ser': say it with a z", "zoo/a.py:1: 'neighbou" + "rs': say it without a u"],
    ),
    "a long name": (
        "names of tests",
        {"tests/test_a.py": f"def test_{'a' * 60}(): ..."},
        [f"tests/test_a.py:1: test_{'a' * 60}"],
    ),
    "a test in another folder than its module": (
        "places of tests",
        {"zoo/ops/moe/a.py": "", "tests/ops/test_a.py": ""},
        ["tests/ops/test_a.py: no module zoo/ops/a.py"],
    ),
}


@pytest.mark.parametrize(("rule", "files", "expected"), PLANTED.values(), ids=PLANTED)
def test_vocabulary_finds_a_planted_violation(tmp_path, rule, files, expected):
    for name, source in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    assert RULES[rule](tmp_path) == expected


ALLOWED = {
    "zoo/layers/a.py": '"""Mixers."""\nclass Mamba: ...\nclass _Mask: ...\ndef _f():\n    """What is private."""',
    "zoo/models/presets/a.py": "def Mamba(): ...",
    "zoo/train/a.py": "class _Mask: ...\ndef follow(): ...",
    "zoo/models/a.py": "def follow(): ...\nclass A:\n    def find(self): ...\nclass B:\n    def find(self): ...",
    "zoo/models/b.py": "class C:\n    def find(self): ...",
    "docs/a.md": "Trainable parameters are sharded over fsdp, scales replicated.",
    "tests/test_a.py": f"def test_{'a' * 50}(): ...",
    "tests/models/test_a.py": "",
    "tests/docs/test_pages.py": "",
}


def test_vocabulary_passes_what_is_allowed(tmp_path):
    for name, source in ALLOWED.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    assert not [line for rule in RULES.values() for line in rule(tmp_path)]

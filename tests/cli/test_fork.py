"""`zoo fork`: the copy of a recipe uses its new name and runs in any directory."""

import ast
import importlib
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import ROOT, make_environment
from tests.recipes.test_transformer import TINY
from zoo import train

RECIPES = {path.stem: path for path in sorted(ROOT.glob("recipes/*.py"))}
module = importlib.import_module("zoo.cli.fork")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("path", RECIPES.values(), ids=RECIPES)
def test_recipe_imports_only_installed_packages(path):
    """Allowed are zoo, the standard library and installed packages."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"line {node.lineno} imports a neighbor"
            names.add(str(node.module).partition(".")[0])
    places = {name: importlib.util.find_spec(name) for name in names - sys.stdlib_module_names - {"zoo"}}
    assert all(places.values())
    ours = {
        name for name, found in places.items() if found and Path(found.origin or ROOT).is_relative_to(ROOT / "recipes")
    }
    assert not ours and not names & {"recipes", "scripts", "tests"}


def test_fork_list_shows_first_lines(run):
    rows = dict(line.split(maxsplit=1) for line in run("fork", "--list")[0].splitlines())
    assert rows.keys() == RECIPES.keys()
    for name, line in rows.items():
        assert RECIPES[name].read_text().startswith(f'"""{line}\n')


def test_fork_copy_uses_its_own_name(run):
    printed, _ = run("fork", "transformer", "my_experiment.py")
    assert printed.splitlines()[0] == "wrote my_experiment.py, a copy of the recipe transformer"
    assert printed.splitlines()[-1] == "next: python my_experiment.py --steps 20"
    text, recipe = Path("my_experiment.py").read_text(), RECIPES["transformer"].read_text()
    assert "recipes/" not in text and "python my_experiment.py --resume  " in text
    assert 'Path("runs/my_experiment")' in text and "finetune.py (zoo fork finetune) goes on from it" in text
    lines = list(zip(text.splitlines(), recipe.splitlines(), strict=True))
    assert all(line == other for line, other in lines if "recipes/" not in other and "runs/transformer" not in other)
    assert all(line.find("  # ") == other.find("  # ") for line, other in lines), "comments keep their column"
    ast.parse(text)


def test_fork_copy_names_its_prerequisite(run):
    printed, _ = run("fork", "finetune")
    assert printed.splitlines()[1:] == [
        "next, without a checkpoint of your own: zoo fork transformer && python transformer.py",
        "next: python finetune.py --steps 20",
    ]
    text = Path("finetune.py").read_text()
    assert "recipes/" not in text and '"zoo fork transformer && python transformer.py"' in text
    assert 'checkpoint: Path = Path("runs/transformer/export")' in text and 'Path("runs/finetune")' in text


def test_fork_target_file_or_directory(run, refused):
    Path("folder").mkdir()
    assert "wrote folder/transformer.py" in run("fork", "transformer", "folder")[0]
    assert "next: python 'folder/a b.py' --steps 20" in run("fork", "recipes/transformer.py", "folder/a b.py")[0]
    assert "python 'a b.py' --resume" in Path("folder/a b.py").read_text()
    Path("mine.py").write_text("precious")
    assert "mine.py exists already: choose another file, or pass --force" in refused("fork", "transformer", "mine.py")
    assert Path("mine.py").read_text() == "precious"
    run("fork", "transformer", "mine.py", "--force")
    assert Path("mine.py").read_text().splitlines()[0] == RECIPES["transformer"].read_text().splitlines()[0]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), f"missing the name of a recipe: {', '.join(RECIPES)}; `zoo fork --list` describes"),
        (("transfomer",), f"there is no recipe 'transfomer': choose from {', '.join(RECIPES)}"),
        (("qlora",), "qlora is part of the recipe lora: `zoo fork lora`, then --quantization nf4 or int8"),
        (
            ("recipes/dora.py",),
            "dora is part of the recipe compare_adapters, which ends with its measurements: `zoo fork",
        ),
        (("transformer", "no/such/x.py"), "no/such: no such directory to write x.py to"),
        (("transformer", "x"), "'x' is not a valid file name for a recipe"),
        (("transformer", 'x"y.py'), "is not a valid file name for a recipe"),
        (("transformer", "random.py"), "random.py would shadow the module 'random'"),
        (("transformer", "optax.py"), "optax.py would shadow the module 'optax'"),
    ],
)
def test_fork_errors_name_the_problem(refused, words, message, tmp_path):
    assert message in refused("fork", *words)
    assert not list(tmp_path.iterdir())


def test_fork_into_a_folder_that_cannot_be_written(refused):
    message = refused("fork", "sft", "/proc/mine.py")
    assert "/proc/mine.py cannot be written (" in message and "as in `zoo fork sft /tmp/sft.py`" in message


def test_fork_names_missing_packages(run, monkeypatch):
    assert "pip install" not in run("fork", "transformer")[0]
    monkeypatch.setattr(module, "_TRAIN_REQUIREMENTS", ("optax", "no_such_package", "nor.this"))
    printed, _ = run("fork", "transformer", "x.py")
    assert 'it needs no_such_package, nor.this: pip install "equizoo[train,tools]"\n' in printed


def test_fork_requirements_are_those_of_training():
    calls = [
        node for node in ast.walk(ast.parse((ROOT / "zoo/train/__init__.py").read_text())) if isinstance(node, ast.Call)
    ]
    (call,) = (call for call in calls if isinstance(call.func, ast.Name) and call.func.id == "require_installed")
    assert tuple(ast.literal_eval(argument) for argument in call.args) == module._TRAIN_REQUIREMENTS


# test_fork_copy_uses_its_own_name: the copy is the recipe; tests/train/report/test_result.py: a model without a family
@pytest.mark.slow
def test_fork_with_the_mixer_of_the_page_reaches_its_report(run, tmp_path, monkeypatch, capsys):
    """Nothing but the export needs a family: the mixer of docs/add-a-layer.md has none."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    run("fork", "transformer", "my_experiment.py")
    page = (ROOT / "docs" / "add-a-layer.md").read_text()
    op, layer = (block.partition("```")[0] for block in page.split("```python\n")[1:3])
    text = Path("my_experiment.py").read_text()
    start, end = "        model = zoo.models.Transformer(\n", "        return config.mesh.apply(model)\n"
    loop = "\ndef main("
    before, after = text.split(start)
    assert "class MovingAverage(" in layer and after.count(end) == 1
    made = """
        model = zoo.models.build_decoder(
            vocab=corpus.vocab,
            embed=config.embed,
            layers=[(lambda key: MovingAverage(config.embed, config.mlp_dim, key=key), None)] * config.layers,
            norm=lambda: zoo.layers.RMSNorm(config.embed),
            tied=True,
            key=key,
        )
"""
    forked = before.replace(loop, f"{op}{layer}\n{loop}", 1) + made + end + after.partition(end)[2]
    Path("my_experiment.py").write_text(forked)
    spec = importlib.util.spec_from_file_location("my_experiment", "my_experiment.py")
    assert spec is not None and spec.loader is not None
    fork = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "my_experiment", fork)
    spec.loader.exec_module(fork)
    (tmp_path / "text").mkdir()
    for number in range(40):
        (tmp_path / "text" / f"{number}.txt").write_text("the cat sat on the mat and saw that it was flat " * 20)
    sizes = ["--data=text", "--steps=2", "--layers=1", "--embed=16", "--mlp-dim=16", "--seq-len=8", "--batch-size=8"]
    train.run_cli(fork.main, fork.Config, arguments=sizes)
    assert "layers.*.moving_average.decay" in Path("runs/my_experiment/report.html").read_text()
    said = "no family holds MovingAverage; weights are in runs/my_experiment/checkpoints/2; see Port a model"
    assert capsys.readouterr().out.splitlines()[-1] == said
    assert Path("runs/my_experiment/checkpoints/2").is_dir() and not Path("runs/my_experiment/export").exists()


@pytest.mark.slow  # test_fork_copy_uses_its_own_name: the copy is the recipe, which tests/recipes run
def test_fork_copy_runs_in_any_directory(run, tmp_path):
    """Uses the sizes of tests/recipes, and so their compiled programs."""
    run("fork", "transformer", "my_experiment.py")
    (tmp_path / "text").mkdir()
    for number in range(40):
        (tmp_path / "text" / f"{number}.txt").write_text("the cat sat on the mat and saw that it was flat " * 20)
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in TINY.items()]
    environment = make_environment(XDG_CACHE_HOME=str(tmp_path / "cache"))
    command = [sys.executable, "my_experiment.py", "--data=text", *flags]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "wrote the report to runs/my_experiment/report.html" in done.stdout
    assert (tmp_path / "runs" / "my_experiment" / "export" / "config.json").exists()

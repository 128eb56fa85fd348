"""The wheel, built from the source distribution and installed elsewhere: what README shows runs from it alone."""

import os
from pathlib import Path

import pytest
import yaml

from scripts.page_code import list_code
from tests.installed_wheel import installed, run
from tests.processes import make_environment

__all__ = ["installed"]

ROOT = Path(__file__).parents[1]

MODEL_OF_THE_HUB = """
import jax, zoo
sizes = {"vocab_size": 10_000, "hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 32}
heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
zoo.save(zoo.models.preset("qwen3-0.6b", key=jax.random.key(0), **sizes, **heads), "Qwen/Qwen3-0.6B")
"""
COMMAND = """
from zoo.cli import main

def command(words, fails):
    try:
        code = main(words) or 0
    except SystemExit as stopped:
        code = stopped.code or 0
    assert bool(code) == fails, words
"""


@pytest.fixture
def environment():
    def make(devices=1):
        variables = make_environment(devices)
        return {name: value for name, value in variables.items() if name != "PYTHONPATH"}

    return make


@pytest.mark.slow
def test_library_is_the_installed_one(installed, tmp_path, environment):
    where = run(
        installed / "python", "-c", "import zoo; print(zoo.__file__)", folder=tmp_path, environment=environment()
    )
    assert Path(where.strip()).is_relative_to(installed.parent)


@pytest.mark.slow
def test_commands_and_a_recipe_of_the_wheel(installed, tmp_path, environment):
    run(installed / "zoo", "fork", "transformer", "mine.py", folder=tmp_path, environment=environment())
    flags = ("--steps", "3", "--batch-size", "8", "--seq-len", "32")
    out = run(installed / "python", "mine.py", *flags, folder=tmp_path, environment=environment())
    assert "bits per byte" in out
    assert (tmp_path / "runs" / "mine" / "report.html").is_file()
    shown = run(installed / "zoo", "info", "runs/mine/export", folder=tmp_path, environment=environment())
    assert "qwen3 (Qwen3ForCausalLM in transformers)" in shown


@pytest.mark.slow
def test_examples_of_the_readme_run_from_the_wheel(installed, tmp_path, environment):
    code = "".join(source for _, source in list_code((ROOT / "README.md").read_text(encoding="utf-8")))
    (tmp_path / "model.py").write_text(MODEL_OF_THE_HUB)
    (tmp_path / "readme.py").write_text(COMMAND + code)
    run(installed / "python", "model.py", folder=tmp_path, environment=environment())
    run(installed / "python", "readme.py", folder=tmp_path, environment=environment(8))
    assert (tmp_path / "tuned" / "model.safetensors").is_file()


def test_workflows_test_the_versions_that_the_package_names():
    workflows = {path.stem: yaml.safe_load(path.read_text()) for path in (ROOT / ".github/workflows").glob("*.yml")}
    assert {"ci", "slow", "site", "release"} <= set(workflows)
    classifiers = (ROOT / "pyproject.toml").read_text()
    versions = workflows["ci"]["jobs"]["versions"]["strategy"]["matrix"]["python"]
    named = [version for version in ("3.11", "3.12", "3.13") if f'Python :: {version}"' in classifiers]
    assert sorted({"3.11", *versions}) == named
    publish = workflows["release"]["jobs"]["publish"]
    assert publish["permissions"] == {"id-token": "write"} and publish["needs"] == "build"
    assert "secrets" not in (ROOT / ".github/workflows/release.yml").read_text()


def test_templates_are_yaml_with_names():
    for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"):
        template = yaml.safe_load(path.read_text())
        assert path.stem == "config" or {"name", "description", "body"} <= set(template), os.fspath(path)

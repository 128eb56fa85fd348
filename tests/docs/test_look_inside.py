"""docs/look-inside.md: its names have values, and its blocks run on the checkpoint that its command trains."""

import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

import zoo
from scripts.page_code import list_code
from tests.docs.test_code_blocks import ROOT, show_devices
from tests.processes import make_environment

PAGE = ROOT / "docs" / "look-inside.md"
WORDS = {"tokens": "seq", "value_dim": "head_dim"}
"""Dims that the page calls by simpler names."""
COMMANDS = re.compile(r"^```bash\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_names_of_the_table_have_values():
    text = PAGE.read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(?:hook_|blocks\.|ln_final).*?` \| `(.*?)` \| (.*?) \|", text, re.MULTILINE)
    model = zoo.models.Transformer(vocab=8, embed=8, layers=2, heads=2, mlp=8, key=jax.random.key(0))
    found = zoo.capture_names(model, jnp.zeros((1, 3), int))
    assert len(rows) == 18
    for name, dims in rows:
        value = found[name.replace("layers.0", "layers.*")]
        assert [WORDS.get(dim, dim) for dim in value.array_dims if dim != "layers"] == ["batch", *dims.split(", ")], (
            name
        )


@pytest.mark.parametrize(
    "steps, devices",
    [
        pytest.param(2, 8, marks=pytest.mark.ci, id="two steps, eight devices"),
        pytest.param(1000, 1, marks=pytest.mark.slow, id="trained"),
    ],
)
def test_page_runs(steps, devices, tmp_path, monkeypatch, no_type_checks):
    """What the page says of the model holds after all steps; other machines find other heads."""
    show_devices(monkeypatch, devices)
    monkeypatch.chdir(tmp_path)
    text = PAGE.read_text(encoding="utf-8")
    (command,) = COMMANDS.finditer(text)
    assert "--steps 1000 " in command[1]
    trained_at = text.count("\n", 0, command.start()) + 1
    before = [(line, source) for line, source in list_code(text) if line < trained_at]
    after = [(line, source) for line, source in list_code(text) if line > trained_at]
    names = {"__name__": "__main__"}
    run_blocks(before, names)
    train(command[1].replace("--steps 1000 ", f"--steps {steps} "), tmp_path)
    run_blocks(after, names)
    if steps == 1000:
        check_claims(names)


def run_blocks(blocks, names):
    for line, source in blocks:
        exec(compile("\n" * (line - 1) + source, str(PAGE), "exec", dont_inherit=True), names)


def train(commands, folder):
    """Run the commands as a shell does, with `zoo` and `python` of this environment."""
    bin_folder = folder / "bin"
    bin_folder.mkdir()
    for name, program in {"zoo": "-m zoo.cli", "python": ""}.items():
        script = bin_folder / name
        script.write_text(f'#!/bin/sh\nexec {sys.executable} {program} "$@"\n')
        script.chmod(0o755)
    environment = make_environment(1, XDG_CACHE_HOME=str(folder / "cache"))
    environment["PATH"] = f"{bin_folder}:{environment['PATH']}"
    words = ["bash", "-euo", "pipefail", "-c", commands]
    done = subprocess.run(words, env=environment, cwd=folder, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"


def check_claims(names):
    model, tokens = names["model"], names["tokens"]
    assert names["second_loss"](model, tokens) < 0.1
    scores = names["scores"]
    assert scores["next"][1].max() > 0.2 > 0.12 > scores["next"][0].max()
    assert scores["previous"][0].max() > 0.2
    assert names["losses_without"].max() > 1
    for name, places in names["effects"].items():
        assert places.max() > 0.9 and jnp.sort(places)[-2] < 0.1, name
    assert names["lens"]["layers.0.input"] > names["lens"]["layers.1.input"] > 10 * names["lens"]["norm.input"]
    assert names["steered_shares"][0.0] < 0.15 and names["steered_shares"][1.0] > 0.8
    assert names["unexplained"] < 0.15
    assert names["cache_losses"]["int8"] < 0.1 < names["cache_losses"]["int3"]

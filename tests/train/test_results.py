"""The result of a run: what is printed at its end, and results.json."""

import json

import jax
import pytest

import zoo
from zoo.train.results import write_results


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 3, "validation": 2.0, "new": 1.5}) + "\n")
    return tmp_path


def write(folder, **options):
    mesh = zoo.make_mesh(devices=jax.devices()[:1])
    model = zoo.models.Transformer(vocab=8, embed=8, layers=1, heads=2, mlp=8, key=jax.random.key(0))
    return write_results(folder, model, mesh, steps=3, **options)


def test_samples_before_and_after_are_labeled(folder, capsys):
    samples = [("One ", "was."), ("Two ", "was."), ("One ", "is."), ("Two ", "is.")]
    write(folder, before={"new": 4.0}, samples=samples)
    printed = capsys.readouterr().out
    assert "before:\nOne was.\n\nafter:\nOne is.\n\nnew 4.000 → 1.500" in printed and "Two" not in printed


def test_samples_without_a_before_have_no_label(folder, capsys):
    write(folder, samples=[("One ", "is.")])
    printed = capsys.readouterr().out
    assert "One is." in printed and "after:" not in printed and "validation 2.000" in printed

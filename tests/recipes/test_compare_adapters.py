"""compare_adapters: matched parameter counts, one run per method, resuming, how far rows turn and grow; the report."""

import json

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from recipes import compare_adapters
from tests.recipes.flags import call
from tests.recipes.optimization import check_optimization
from zoo import train

pytestmark = pytest.mark.ci

TINY = {
    "seq_len": 16, "batch_size": 8, "steps": 2, "warmup_steps": 1, "eval_every": 1, "methods": ("vera", "full"),
    "ranks": (2,), "targets": ("query", "value"), "fsdp": 2,
}  # fmt: skip


@pytest.fixture(scope="module")
def unbroken(text, start, tmp_path_factory, without_samples):
    out = tmp_path_factory.mktemp("unbroken") / "run"
    call(compare_adapters.main, checkpoint=start, data=(text,), pretraining_data=(text,), out=out, **TINY)
    return out


def test_compare_adapters_one_row_per_method(unbroken):
    results = json.loads((unbroken / "results.json").read_text())
    assert [row["method"] for row in results["runs"]] == ["vera", "full"]
    vera, full = results["runs"]
    lora = 2 * 2 * 2 * (16 + 16)  # rank 2, two matrices in each of two layers
    assert abs(vera["parameters"] - lora) <= 4 and int(vera["rank"]) == 48
    assert full["share"] == "100.00%" and full["rank"] == "none"
    for row in results["runs"]:
        assert row["new"] < results["before"]["new"] and row["bytes held"] > 0
    (correlation,) = results["correlations"]  # of VeRA's rows none are measured
    assert correlation["run"] == "full" and -1 <= correlation["correlation"] <= 1
    check_optimization(unbroken, "vera-48", "full")
    report = (unbroken / "report.html").read_text()
    changed = ("Changes", "Magnitudes against directions", "Correlation of magnitude")
    for part in ("Trainable parameters", "Results", "vera", "trainable parameters", "An object is", *changed):
        assert part in report


@pytest.mark.slow
def test_compare_adapters_exports_the_best_merged(unbroken, start):
    """Full training leaves no adapter."""
    tuned = zoo.adapters.load(zoo.load(start), unbroken / "vera-48" / "adapter")
    tokens = jnp.arange(32).reshape(2, 16)
    np.testing.assert_allclose(zoo.load(unbroken / "export")(tokens), tuned(tokens), atol=1e-4)
    assert jnp.abs(tuned(tokens) - zoo.load(start)(tokens)).max() > 1e-3
    assert not (unbroken / "full" / "adapter").exists()


def test_movements_are_those_of_the_paper(start):
    """Rows made longer by a half turn nowhere; rows with two inputs exchanged keep their lengths."""
    base = zoo.load(start)
    measure = compare_adapters.measure_movements
    weight = lambda model: model.stack.segments[0].blocks[0].mixer.query.weight
    longer = measure(base, eqx.tree_at(weight, base, replace_fn=lambda w: w * 1.5))
    lengths = np.linalg.norm(weight(base), axis=-1)
    assert list(longer) == [f"layers.{layer}.attention.query" for layer in range(2)]
    for layer, (grown, turned) in enumerate(longer.values()):
        assert np.isclose(grown, lengths[layer].mean() / 2) and abs(turned) < 1e-6
    exchanged = weight(base)[..., ::-1]
    cosines = (weight(base) * exchanged).sum(-1) / lengths**2
    for layer, (grown, turned) in enumerate(measure(base, eqx.tree_at(weight, base, exchanged)).values()):
        assert grown < 1e-6 and np.isclose(turned, 1 - cosines[layer].mean(), rtol=1e-4)
    assert measure(base, base) == {}


@pytest.mark.slow  # vera and full above
def test_compare_adapters_measures_rows_of_dora(text, start, tmp_path, without_samples):
    """Movements and adapters are of the merged model of each run."""
    options = TINY | {"methods": ("dora", "lora"), "tensor": 2}
    call(
        compare_adapters.main, checkpoint=start, data=(text,), pretraining_data=(text,), out=tmp_path / "run", **options
    )
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    dora, lora = (row["run"] for row in results["runs"])
    assert [row["run"] for row in results["correlations"]] == [dora, lora]
    assert json.loads((tmp_path / "run" / dora / "adapter" / "adapter_config.json").read_text())["use_dora"]
    report = (tmp_path / "run" / "report.html").read_text()
    assert "layers.0.attention.query" in report and "layers.1.attention.value" in report


def test_compare_adapters_bad_input_is_one_line(text, start, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    given = ["--checkpoint", start, "--data", text, "--pretraining-data", text, "--seq-len", 16]
    for words, said in [
        ([], "runs/transformer/export: no model there; `python recipes/transformer.py`"),
        (["--ranks", 0], "is at least 1"),
        (["--max-rank", 3], "at least the largest"),
        ([*given, "--targets", "querry"], "no matrix of the model is meant by the target 'querry'"),
    ]:
        with pytest.raises(SystemExit) as stopped:
            train.run_cli(compare_adapters.main, compare_adapters.Config, arguments=[str(word) for word in words])
        assert stopped.value.code == 2 and said in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()

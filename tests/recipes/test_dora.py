"""DoRA from a directory to an adapter and a directory, and what its rows did meanwhile."""

import json
import shutil

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from recipes import dora
from tests.recipes.flags import MESH_FLAGS, RUN_FLAGS, call, flag_names
from tests.recipes.optimization import check_optimization
from zoo import train

pytestmark = pytest.mark.ci

TINY = {
    "seq_len": 16, "batch_size": 8, "steps": 2, "warmup_steps": 1, "eval_every": 1, "rank": 2,
    "targets": ("query", "down"), "fsdp": 2, "tensor": 2,
}  # fmt: skip


@pytest.fixture(scope="module")
def unbroken(text, start, tmp_path_factory, without_samples):
    out = tmp_path_factory.mktemp("unbroken") / "run"
    call(dora.main, checkpoint=start, data=(text,), pretraining_data=(text,), out=out, **TINY)
    return out


@pytest.mark.slow  # test_lora.py trains an adapter; movements are tested below
def test_dora_learns_exports_and_reports(unbroken, start):
    lines = train.read_metrics(unbroken / "metrics.jsonl")
    assert [line["step"] for line in lines if "new" in line and "old" in line] == [1, 2]
    assert lines[-1]["new"] < lines[0]["new"]
    assert json.loads((unbroken / "adapter" / "adapter_config.json").read_text())["use_dora"]
    base, merged = zoo.load(start), zoo.load(unbroken / "export")
    tokens = jnp.arange(32).reshape(2, 16)
    tuned = zoo.adapters.load(base, unbroken / "adapter")
    np.testing.assert_allclose(tuned(tokens), merged(tokens), atol=1e-4)
    moved = dora.movements(base, merged)
    kinds = {name.rpartition(".")[2] for name in moved}
    assert kinds == {"query", "down"} and len(moved) == 4
    check_optimization(unbroken)
    report = (unbroken / "report.html").read_text()
    for part in ("Changes", "Magnitudes against directions", "correlation of magnitude", "query.dora.magnitude"):
        assert part in report


@pytest.mark.slow  # the same as of lora.py, in CI
def test_dora_resumes_bitwise(text, start, unbroken, tmp_path):
    out = shutil.copytree(unbroken, tmp_path / "run")
    shutil.rmtree(out / "checkpoints" / "2")
    call(dora.main, checkpoint=start, data=(text,), pretraining_data=(text,), out=out, resume=True, **TINY)
    for name in ("metrics.jsonl", "adapter/adapter_model.safetensors", "export/model.safetensors"):
        assert (out / name).read_bytes() == (unbroken / name).read_bytes()


def test_movements_are_those_of_the_paper(start):
    """Rows made longer by a half turn nowhere; rows with two inputs exchanged keep their lengths."""
    base = zoo.load(start)
    weight = lambda model: model.stack.segments[0].blocks[0].mixer.query.weight
    longer = dora.movements(base, eqx.tree_at(weight, base, replace_fn=lambda w: w * 1.5))
    lengths = np.linalg.norm(weight(base), axis=-1)
    assert list(longer) == [f"layers.{layer}.attention.query" for layer in range(2)]
    for layer, (grown, turned) in enumerate(longer.values()):
        assert np.isclose(grown, lengths[layer].mean() / 2) and abs(turned) < 1e-6
    exchanged = weight(base)[..., ::-1]
    cosines = (weight(base) * exchanged).sum(-1) / lengths**2
    for layer, (grown, turned) in enumerate(dora.movements(base, eqx.tree_at(weight, base, exchanged)).values()):
        assert grown < 1e-6 and np.isclose(turned, 1 - cosines[layer].mean(), rtol=1e-4)
    assert dora.movements(base, base) == {}


def test_dora_bad_input_is_one_line(text, start, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    given = ["--checkpoint", start, "--data", text, "--pretraining-data", text, "--seq-len", 16]
    for words, said in [
        ([], "runs/transformer/export: no model there; `python recipes/transformer.py`"),
        ([*given, "--targets", "querry"], "no matrix of the model is meant by the target 'querry'"),
        ([*given, "--rank", 0], "a rank is at least 1, not 0"),
    ]:
        with pytest.raises(SystemExit) as stopped:
            train.run_cli(dora.main, arguments=[str(word) for word in words])
        assert stopped.value.code == 2 and said in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


FLAGS = [
    *("checkpoint", "data", "pretraining_data", "targets", "rank", "alpha", "seq_len", "batch_size", "steps"),
    *("learning_rate", "warmup_steps", "weight_decay", "eval_every"),
    *MESH_FLAGS,
    *RUN_FLAGS,
]


def test_dora_flags():
    assert flag_names(dora.main) == FLAGS

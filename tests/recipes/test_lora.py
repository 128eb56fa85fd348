"""LoRA from a directory to an adapter and a directory, resumed, and refused in words; QLoRA, on a quantized base."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from recipes import lora
from tests.recipes.flags import call, loaded_dtype
from tests.recipes.optimization import check_optimization
from zoo import train

pytestmark = pytest.mark.ci

TINY = {"seq_len": 16, "batch_size": 16, "steps": 4, "warmup_steps": 1, "eval_every": 2, "rank": 2}
OPTIONS = {"targets": ("query", "value"), "microbatches": 2, "fsdp": 2, "tensor": 2}
OPTIONS["epochs"] = 0.08  # of 59 steps each


@pytest.fixture(scope="module")
def unbroken(text, start, tmp_path_factory):
    out = tmp_path_factory.mktemp("unbroken") / "run"
    call(lora.main, checkpoint=start, data=(text,), pretraining_data=(text,), out=out, **TINY, **OPTIONS)
    return out


def test_lora_learns_exports_and_reports(unbroken, start):
    lines = train.read_metrics(unbroken / "metrics.jsonl")
    assert [line["step"] for line in lines if "new" in line and "old" in line] == [2, 4, 5]
    assert lines[-1]["bits_per_byte"] < lines[0]["bits_per_byte"]
    base, merged = zoo.load(start), zoo.load(unbroken / "export")
    assert jax.tree.structure(base) == jax.tree.structure(merged)
    assert "| learning_rate | " in (unbroken / "adapter" / "README.md").read_text()
    said = json.loads((unbroken / "adapter" / "adapter_config.json").read_text())
    assert (said["r"], said["lora_alpha"]) == (2, 4)
    tuned = zoo.adapters.load(base, unbroken / "adapter")
    assert 0 < zoo.count(tuned) < zoo.count(base)
    tokens = jnp.arange(32).reshape(2, 16)
    np.testing.assert_allclose(tuned(tokens), merged(tokens), atol=1e-4)
    assert np.array_equal(base.embedding.weight, merged.embedding.weight)
    check_optimization(unbroken)
    report = (unbroken / "report.html").read_text()
    for part in ("new", "old", "→", "When a function is called", "query.lora.down.weight"):
        assert part in report


def test_lora_checkpoint_holds_the_adapter_alone(unbroken):
    about = (unbroken / "checkpoints" / "5" / "about" / "metadata").read_text()
    assert '"stack.segments.0.blocks.0.mixer.query.base.weight": "float32 [2, 16, 16] ' in about
    arrays = json.loads(about)
    assert not any(name.endswith("base.weight") for name in arrays.get("leaves", {}))


QUANTIZED = {
    "seq_len": 16, "batch_size": 8, "steps": 2, "warmup_steps": 1, "eval_every": 1, "rank": 2, "quantization": "nf4",
    "targets": ("query", "up"), "fsdp": 2, "dtype": "bfloat16",
}  # fmt: skip


@pytest.fixture(scope="module")
def whole_blocks(text, tmp_path_factory):
    """A model of whole blocks, untrained."""
    model = zoo.models.Transformer(vocab=256, embed=128, layers=1, heads=2, mlp=64, key=jax.random.key(0))
    return train.export(model, train.load_text((text,)), tmp_path_factory.mktemp("blocks") / "export", seq_len=16)


@pytest.fixture(scope="module")
def quantized(text, whole_blocks, tmp_path_factory):
    out = tmp_path_factory.mktemp("quantized") / "run"
    call(lora.main, checkpoint=whole_blocks, data=(text,), pretraining_data=(text,), out=out, **QUANTIZED)
    return out


def test_qlora_learns_exports_and_reports(quantized, whole_blocks):
    lines = train.read_metrics(quantized / "metrics.jsonl")
    assert [line["step"] for line in lines if "new" in line and "old" in line] == [1, 2]
    assert lines[-1]["new"] < lines[0]["new"]
    small = zoo.adapters.quantize(zoo.load(whole_blocks), "nf4")
    tuned, merged = zoo.adapters.load(small, quantized / "adapter"), zoo.load(quantized / "export")
    tokens = jnp.arange(32).reshape(2, 16)
    np.testing.assert_allclose(tuned(tokens), merged(tokens), atol=1e-4)
    on_the_read_one = zoo.adapters.load(zoo.load(whole_blocks), quantized / "adapter")
    assert not np.allclose(on_the_read_one(tokens), merged(tokens), atol=1e-2)
    check_optimization(quantized)
    report = (quantized / "report.html").read_text()
    for part in ("QLoRA on new text", "new", "old", "→", "query.lora.up.weight"):
        assert part in report


def test_qlora_takes_its_quantization_from_the_folder(quantized, tmp_path, capsys):
    out = shutil.copytree(quantized, tmp_path / "run")
    words = ["--resume", "--out", str(out)]
    config = train.run_cli(lambda config: config, lora.Config, arguments=words)
    assert (config.quantization, config.targets, config.steps) == ("nf4", ("query", "up"), 2)


def test_lora_holds_a_frozen_base_in_the_compute_dtype(text, start, tmp_path, monkeypatch):
    flags = {**TINY, "checkpoint": start, "data": (text,), "pretraining_data": (text,), "out": tmp_path}
    for quantization, dtype in (("none", "bfloat16"), ("nf4", "float32")):
        found = loaded_dtype(lora.main, monkeypatch, **flags, quantization=quantization, dtype="bfloat16")
        assert found == dtype


def complaint(capsys, *words):
    """The line that a command ends with."""
    with pytest.raises(SystemExit) as stopped:
        train.run_cli(lora.main, lora.Config, arguments=[str(word) for word in words])
    assert stopped.value.code == 2
    return capsys.readouterr().err


def test_lora_bad_input_is_one_line(text, start, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert "runs/transformer/export: no model there; `python recipes/transformer.py`" in complaint(capsys)
    given = ("--checkpoint", start, "--data", text, "--pretraining-data", text, "--seq-len", 16)
    assert "no matrix of the model is meant by the target 'querry'" in complaint(capsys, *given, "--targets", "querry")
    assert "a rank is at least 1, not 0" in complaint(capsys, *given, "--rank", 0)
    assert "do not divide evenly over data=8" in complaint(capsys, *given, "--batch-size", 12)
    assert not (tmp_path / "runs").exists()

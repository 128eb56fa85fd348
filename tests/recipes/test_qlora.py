"""QLoRA: LoRA on a quantized base, its cost in bits per byte, its files."""

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from recipes import qlora
from tests.recipes.flags import MESH_FLAGS, RUN_FLAGS, call, flag_names
from tests.recipes.optimization import check_optimization
from zoo import train

pytestmark = pytest.mark.ci

TINY = {
    "seq_len": 16, "batch_size": 8, "steps": 2, "warmup_steps": 1, "eval_every": 1, "rank": 2,
    "targets": ("query", "up"), "fsdp": 2, "quantize_targets": ("query", "up"), "dtype": "bfloat16",
}  # fmt: skip


@pytest.fixture(scope="module")
def start(text, tmp_path_factory):
    """A model of whole blocks, untrained."""
    model = zoo.models.Transformer(vocab=256, embed=128, layers=1, heads=2, mlp=64, key=jax.random.key(0))
    return train.export(model, train.load_text((text,)), tmp_path_factory.mktemp("start") / "export", seq_len=16)


@pytest.fixture(scope="module")
def unbroken(text, start, tmp_path_factory, without_samples):
    out = tmp_path_factory.mktemp("unbroken") / "run"
    call(qlora.main, checkpoint=start, data=(text,), pretraining_data=(text,), out=out, **TINY)
    return out


def test_qlora_learns_exports_and_reports(unbroken, start):
    lines = train.read_metrics(unbroken / "metrics.jsonl")
    assert [line["step"] for line in lines if "new" in line and "old" in line] == [1, 2]
    assert lines[-1]["new"] < lines[0]["new"]
    small = zoo.adapters.quantize(zoo.load(start), "nf4", targets=TINY["quantize_targets"])
    tuned, merged = zoo.adapters.load(small, unbroken / "adapter"), zoo.load(unbroken / "export")
    tokens = jnp.arange(32).reshape(2, 16)
    np.testing.assert_allclose(tuned(tokens), merged(tokens), atol=1e-4)
    on_the_read_one = zoo.adapters.load(zoo.load(start), unbroken / "adapter")
    assert not np.allclose(on_the_read_one(tokens), merged(tokens), atol=1e-2)
    check_optimization(unbroken)
    report = (unbroken / "report.html").read_text()
    for part in ("new", "old", "→", "query.lora.up.weight"):
        assert part in report


@pytest.mark.slow  # the same as of lora.py, in CI
def test_qlora_resumes_bitwise(text, start, unbroken, tmp_path):
    out = shutil.copytree(unbroken, tmp_path / "run")
    shutil.rmtree(out / "checkpoints" / "2")
    call(qlora.main, checkpoint=start, data=(text,), pretraining_data=(text,), out=out, resume=True, **TINY)
    for name in ("metrics.jsonl", "adapter/adapter_model.safetensors", "export/model.safetensors"):
        assert (out / name).read_bytes() == (unbroken / name).read_bytes()


def test_qlora_bad_input_is_one_line(text, start, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    given = ["--checkpoint", start, "--data", text, "--pretraining-data", text, "--seq-len", 16]
    for words, said in [
        ([], "runs/transformer/export: no model there; `python recipes/transformer.py`"),
        ([*given, "--quantize-targets", "querry"], "no matrix of the model is meant by the target 'querry'"),
        ([*given, "--rank", 0], "a rank is at least 1, not 0"),
    ]:
        with pytest.raises(SystemExit) as stopped:
            train.run_cli(qlora.main, arguments=[str(word) for word in words])
        assert stopped.value.code == 2 and said in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


FLAGS = [
    *("checkpoint", "data", "pretraining_data", "quantization", "quantize_targets", "targets", "rank"),
    *("alpha", "rank_stabilized", "seq_len", "batch_size", "steps", "learning_rate", "warmup_steps"),
    *("weight_decay", "eval_every"),
    *MESH_FLAGS,
    *RUN_FLAGS,
]


def test_qlora_flags():
    assert flag_names(qlora.main) == FLAGS

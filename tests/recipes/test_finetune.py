"""Fine-tuning from a directory to a directory: on one mesh and another, stopped and resumed, and refused in words."""

import json
import shutil

import jax
import numpy as np
import pytest

import zoo
from recipes import finetune
from tests.recipes.flags import call
from tests.recipes.optimization import check_optimization
from zoo import train

pytestmark = pytest.mark.ci

TINY = {"seq_len": 16, "batch_size": 8, "steps": 4, "warmup_steps": 1, "eval_every": 2}


@pytest.fixture(scope="module")
def unbroken(text, start, tmp_path_factory, without_samples):
    out = tmp_path_factory.mktemp("unbroken") / "run"
    call(
        finetune.main,
        checkpoint=start,
        data=(text,),
        pretraining_data=(text,),
        out=out,
        fsdp=2,
        tensor=2,
        **TINY,
    )
    return out


def test_finetune_learns_exports_and_reports(unbroken, start):
    lines = train.read_metrics(unbroken / "metrics.jsonl")
    assert [line["step"] for line in lines if "new" in line and "old" in line] == [2, 4]
    assert lines[-1]["bits_per_byte"] < lines[0]["bits_per_byte"]
    before, after = (zoo.load(folder) for folder in (start, unbroken / "export"))
    assert jax.tree.structure(before) == jax.tree.structure(after)
    assert not np.array_equal(before.embedding.weight, after.embedding.weight)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (start / name).read_bytes() == (unbroken / "export" / name).read_bytes()
    check_optimization(unbroken)
    report = (unbroken / "report.html").read_text()
    for part in (
        "old",
        "When a function is called",
        "→",
        "layers.*.attention.query.weight",
    ):
        assert part in report


@pytest.mark.slow
def test_finetune_starts_from_the_export_of_transformer(start, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(start, finetune.Config.checkpoint)
    call(finetune.main, fsdp=2, tensor=2, **TINY)
    printed = capsys.readouterr().out
    assert "wrote the report to runs/finetune/report.html" in printed
    assert "old 8." in printed and "→" in printed
    assert printed.index("\nbefore:\n") < printed.index("\nafter:\n")


@pytest.mark.slow  # its code is that of test_transformer_combines_the_other_options
def test_finetune_combines_the_other_options_on_byte_pairs(text, tmp_path):
    corpus = train.load_text((text,), vocab=300)
    sizes = {"vocab": 300, "embed": 16, "layers": 2, "heads": 4, "mlp": 32}
    model = zoo.models.Transformer(**sizes, key=jax.random.key(0))
    start = train.export(model, corpus, tmp_path / "checkpoint", seq_len=16)
    options = {"dtype": "bfloat16", "microbatches": 2, "zero_stage": 1, "fsdp": 4, "tensor": 2, "remat": "dots"}
    changes = {"steps": 2, "batch_size": 16, "seq_len": 20}
    call(
        finetune.main,
        checkpoint=start,
        data=(text,),
        pretraining_data=(text,),
        out=tmp_path / "run",
        **TINY | changes | options,
    )
    config = json.loads((tmp_path / "run" / "export" / "config.json").read_text())
    assert config["max_position_embeddings"] == 20 and config["dtype"] == "float32"
    again = train.read_tokenizer(tmp_path / "run" / "export")
    tokens = next(iter(again.encode_all([b"the cat sat"])))
    assert tokens.tolist() == corpus.encode("the cat sat").tolist() and len(tokens) < 11


def complaint(capsys, *words):
    """The line that a command ends with."""
    with pytest.raises(SystemExit) as stopped:
        train.run_cli(finetune.main, finetune.Config, arguments=[str(word) for word in words])
    assert stopped.value.code == 2
    return capsys.readouterr().err


def test_finetune_bad_input_is_one_line(text, start, unbroken, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    wanted = "runs/transformer/export: no model there; `python recipes/transformer.py` makes one"
    assert wanted in complaint(capsys)
    few = tmp_path / "few"
    shutil.copytree(start, few)
    facts = json.loads((few / "config.json").read_text())
    (few / "config.json").write_text(json.dumps(facts | {"vocab_size": 200}))
    assert "has 256 tokens, and the model that" in complaint(capsys, "--checkpoint", few, "--data", text)
    (few / "tokenizer.json").unlink()
    assert "tokenizer.json: there is no such file" in complaint(capsys, "--checkpoint", few, "--data", text)
    given = ("--checkpoint", start, "--data", text, "--pretraining-data", text)
    assert "do not divide evenly over data=8" in complaint(capsys, *given, "--batch-size", 12, "--seq-len", 16)
    assert "resume it" in complaint(capsys, *given, "--out", unbroken, "--seq-len", 16)
    assert not (tmp_path / "runs").exists()

"""Distillation from a teacher, online, stored and on samples of the student, resumed to the bit."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from recipes import distill
from tests.recipes.flags import MESH_FLAGS, RUN_FLAGS, call, flag_names, unexplained_flags
from tests.recipes.optimization import check_optimization
from zoo import train
from zoo.text.tasks.docstrings import read_standard_library

pytestmark = pytest.mark.ci

TINY = {"embed": 8, "layers": 1, "seq_len": 48, "batch_size": 8, "steps": 4, "warmup_steps": 1, "eval_every": 2}
TINY |= {"data_processes": 1, "prompts": ("7 + 1?",)}
MESH = {"microbatches": 2, "fsdp": 2, "tensor": 2}


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    path = tmp_path_factory.mktemp("chats") / "chats.jsonl"
    with path.open("w") as file:
        for number in range(200):
            answer = {"role": "assistant", "content": str(number + 1)}
            file.write(json.dumps({"messages": [{"role": "user", "content": f"{number} + 1?"}, answer]}) + "\n")
    return path


@pytest.fixture(scope="module")
def flags(chats, start):
    return {"teacher": start, "data": (str(chats),), **TINY}


@pytest.fixture(scope="module")
def unbroken(flags, tmp_path_factory):
    """A run on a mesh, in micro-batches, with everything: samples, hidden states and the data's cross-entropy."""
    out = tmp_path_factory.mktemp("unbroken") / "run"
    options = {
        "alpha": 0.2,
        "beta": 0.5,
        "temperature": 2.0,
        "hidden": ("0:1",),
        "on_policy": 0.5,
        "max_new_tokens": 16,
    }
    call(distill.main, out=out, **flags, **options, **MESH)
    return out, options


def test_a_student_learns_exports_and_reports(unbroken):
    out, _ = unbroken
    lines = train.read_metrics(out / "metrics.jsonl")
    assert [line["step"] for line in lines if "validation" in line] == [2, 4]
    student = zoo.load(out / "export")
    assert student.embedding.table_shape == (256, 8) and student.stack.count_layers() == 1
    check_optimization(out)
    report = (out / "report.html").read_text()
    for part in ("nats per trained token", "→", "7 + 1?", "validation of the teacher"):
        assert part in report


@pytest.mark.slow  # runs of dpo.py, with a frozen reference, and of grpo.py, with samples, are resumed in CI
def test_distillation_resumes_bitwise(flags, unbroken, start, tmp_path):
    """And not with another teacher."""
    whole, options = unbroken
    out = shutil.copytree(whole, tmp_path / "run")
    shutil.rmtree(out / "checkpoints" / "4")
    shutil.rmtree(out / "export")
    call(distill.main, out=out, resume=True, **flags, **options, **MESH)
    for name in ("metrics.jsonl", "export/model.safetensors"):
        assert (out / name).read_bytes() == (whole / name).read_bytes()
    teacher = zoo.load(start)
    (tmp_path / "pairs.jsonl").write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n')
    assert "pairs.jsonl: the kind of the records is preference" in complaint(capsys, *given[:3], "pairs.jsonl")
    other = shutil.copytree(start, tmp_path / "other")
    zoo.save(jax.tree.map(lambda x: 2 * x if x.ndim > 1 else x, teacher), other, source=start)
    with pytest.raises(ValueError, match="frozen"):
        call(distill.main, out=out, resume=True, **{**flags, "teacher": other}, **options, **MESH)


@pytest.mark.usefixtures("without_samples")
def test_a_stored_teacher_teaches_as_the_teacher_does(flags, tmp_path, monkeypatch):
    """With all tokens stored, up to the rounding to float16. A second run reads what the first one stored."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name, top_k in {"online": 0, "stored": 256, "again": 256, "few": 8}.items():
        if name == "again":
            monkeypatch.setattr("zoo.train.stored_arrays._write", None)
        if name == "few":
            monkeypatch.undo()
        call(distill.main, out=tmp_path / name, top_k=top_k, **flags, **MESH)
    losses = {
        name: [line["loss"] for line in train.read_metrics(tmp_path / name / "metrics.jsonl")]
        for name in ("online", "stored", "again", "few")
    }
    np.testing.assert_allclose(losses["stored"], losses["online"], rtol=5e-3)
    assert losses["again"] == losses["stored"]
    assert all(few < whole for few, whole in zip(losses["few"], losses["online"], strict=True))


@pytest.mark.usefixtures("without_samples")
def test_students_of_the_teachers_layers_and_of_a_checkpoint(flags, start, tmp_path):
    call(distill.main, out=tmp_path / "kept", keep_every=2, **{**flags, "steps": 1, "learning_rate": 0.0})
    kept, teacher = zoo.load(tmp_path / "kept" / "export"), zoo.load(start)
    assert kept.stack.count_layers() == 1
    tokens = jnp.arange(32).reshape(2, 16)
    (_, first, *_), (_, expected) = zoo.hidden_states(teacher, tokens), zoo.hidden_states(kept, tokens)
    np.testing.assert_allclose(teacher.norm(first), expected, atol=1e-5)
    call(distill.main, out=tmp_path / "copy", student=start, alpha=0.0, **{**flags, "steps": 2})
    lines = train.read_metrics(tmp_path / "copy" / "metrics.jsonl")
    assert abs(lines[0]["loss"]) < 1e-6  # of a copy of the teacher, without the data's cross-entropy


@pytest.mark.usefixtures("without_samples")
def test_distillation_on_the_default_text(start, tmp_path, monkeypatch):
    """The standard library's sources, of which a few are taken here, sampled from, and the baseline."""
    few = read_standard_library()[:30]
    monkeypatch.setattr(distill, "read_standard_library", lambda: few)
    options = {name: TINY[name] for name in TINY if name != "prompts"}
    call(distill.main, teacher=start, out=tmp_path / "run", on_policy=1.0, max_new_tokens=16, **options)
    call(distill.main, teacher=start, out=tmp_path / "alone", alpha=1.0, **options)
    for name in ("run", "alone"):
        assert len(train.read_metrics(tmp_path / name / "metrics.jsonl")) == 4


def complaint(capsys, *words):
    """Return the line that a command ends with."""
    with pytest.raises(SystemExit) as stopped:
        train.run_cli(distill.main, distill.Config, arguments=[str(word) for word in words])
    assert stopped.value.code == 2
    return capsys.readouterr().err


def test_distillation_bad_input_is_one_message(chats, start, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert "runs/transformer/export: no model there; `python recipes/transformer.py" in complaint(capsys)
    given = ("--teacher", start, "--data", chats, "--layers", 1, "--embed", 8, "--seq-len", 48)
    assert "--alpha 2.0: a number from 0 to 1" in complaint(capsys, *given, "--alpha", 2)
    assert "take one of them" in complaint(capsys, *given, "--student", start, "--keep-every", 2)
    assert "not with --beta, --hidden, --on-policy" in complaint(capsys, *given, "--top-k", 4, "--beta", 1)
    assert "no data to learn from" in complaint(capsys, *given, "--on-policy", 1, "--alpha", 1)
    assert "--beta 2.0: a number from 0 to 1" in complaint(capsys, *given, "--beta", 2)
    assert "--temperature 0.0: a number above 0" in complaint(capsys, *given, "--temperature", 0)
    assert "'0-1': a layer of the student and one of" in complaint(capsys, *given, "--hidden", "0-1")
    assert "layers.7" in complaint(capsys, *given, "--hidden", "0:7")
    assert "k=300: a number of tokens from 1 to 256" in complaint(capsys, *given, "--top-k", 300)
    assert "--max-new-tokens 64: a row of --seq-len 48 holds fewer" in complaint(capsys, *given, "--on-policy", 1)
    other = shutil.copytree(start, tmp_path / "other")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = vocab | {"a": vocab["b"], "b": vocab["a"]}
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert "has another tokenizer than" in complaint(capsys, *given, "--student", other)
    assert not (tmp_path / "runs").exists()


FLAGS = [
    *(
        "teacher",
        "student",
        "keep_every",
        "layers",
        "embed",
        "heads",
        "data",
        "kind",
        "field",
        "chat_template",
        "chat_date",
    ),
    *("train_on", "too_long", "bad_records", "data_processes", "beta", "temperature", "alpha", "hidden"),
    *("hidden_weight", "top_k", "on_policy", "max_new_tokens", "seq_len", "batch_size", "steps", "learning_rate"),
    *("warmup_steps", "weight_decay", "eval_every", "prompts"),
    *MESH_FLAGS,
    *RUN_FLAGS,
]


def test_distill_flags():
    assert flag_names(distill.main) == FLAGS and not unexplained_flags(distill.main)

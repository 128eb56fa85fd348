"""Distillation from a teacher to a student from scratch, and to a checkpoint."""

import json
import shutil

import jax
import pytest

import zoo
from recipes import distill
from tests.recipes.flags import call
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
    """A run on a mesh, in micro-batches, with the data's cross-entropy."""
    out = tmp_path_factory.mktemp("unbroken") / "run"
    options = {"alpha": 0.2, "beta": 0.5, "temperature": 2.0}
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


@pytest.mark.slow  # a run of dpo.py is not resumed with another reference, in CI
def test_distillation_is_not_resumed_with_another_teacher(flags, unbroken, start, tmp_path):
    whole, options = unbroken
    out = shutil.copytree(whole, tmp_path / "run")
    teacher = zoo.load(start)
    other = shutil.copytree(start, tmp_path / "other")
    zoo.save(jax.tree.map(lambda x: 2 * x if x.ndim > 1 else x, teacher), other, source=start)
    with pytest.raises(ValueError, match="frozen"):
        call(distill.main, out=out, resume=True, **{**flags, "teacher": other}, **options, **MESH)


@pytest.mark.usefixtures("without_samples")
def test_a_student_that_is_the_teacher_has_nothing_to_learn(flags, start, tmp_path):
    call(distill.main, out=tmp_path / "copy", student=start, alpha=0.0, **{**flags, "steps": 2})
    lines = train.read_metrics(tmp_path / "copy" / "metrics.jsonl")
    assert abs(lines[0]["loss"]) < 1e-6  # of a copy of the teacher, without the data's cross-entropy


@pytest.mark.usefixtures("without_samples")
def test_distillation_on_the_default_text(start, tmp_path, monkeypatch):
    """The standard library's sources, of which a few are taken here, sampled from, and the baseline."""
    few = read_standard_library()[:30]
    monkeypatch.setattr(distill, "read_standard_library", lambda: few)
    options = {name: TINY[name] for name in TINY if name != "prompts"}
    call(distill.main, teacher=start, out=tmp_path / "run", **options)
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
    assert "--alpha 2.0 --beta 0.0: expected numbers from 0 to 1" in complaint(capsys, *given, "--alpha", 2)
    assert "--alpha 0.5 --beta 2.0: expected numbers from 0 to 1" in complaint(capsys, *given, "--beta", 2)
    assert "--temperature 0.0 above 0" in complaint(capsys, *given, "--temperature", 0)
    (tmp_path / "pairs.jsonl").write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n')
    assert "pairs.jsonl: the kind of the records is preference" in complaint(capsys, *given[:3], "pairs.jsonl")
    other = shutil.copytree(start, tmp_path / "other")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = vocab | {"a": vocab["b"], "b": vocab["a"]}
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert "has another tokenizer than" in complaint(capsys, *given, "--student", other)
    assert not (tmp_path / "runs").exists()

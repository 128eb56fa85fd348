"""Reinforcement learning from rewards: resumed to the bit, equal on every mesh, and refusals."""

import json

import jax
import numpy as np
import pytest

import zoo
from recipes import grpo
from tests.recipes.flags import call, loaded_dtype
from tests.recipes.optimization import check_optimization
from zoo import train

pytestmark = pytest.mark.ci

TINY = {
    "batch_size": 4, "samples": 4, "steps": 4, "warmup_steps": 1, "eval_every": 2, "eval_prompts": 4,
    "prompt_len": 16, "max_new_tokens": 8, "learning_rate": 1e-2, "data_processes": 1,
}  # fmt: skip
ADAPTED = {"lora": 2, "targets": ("query", "value"), "updates": 2}
SHARDED = {"microbatches": 2, "fsdp": 2, "tensor": 2}


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    """Flags of a task: 40 prompts, and two functions that reward texts of an untrained model."""
    folder = tmp_path_factory.mktemp("task")
    with (folder / "prompts.jsonl").open("w") as file:
        for number in range(40):
            file.write(json.dumps({"prompt": f"{number} + 1 = ", "answer": number + 1}) + "\n")
    (folder / "rewards.py").write_text(
        "def varied(texts, records):\n    return [float(len(set(text)) > 5) for text in texts]\n"
        "def small(texts, records):\n    return [record['answer'] / 40 for record in records]\n"
    )
    rewards = (f"{folder}/rewards.py:varied", f"{folder}/rewards.py:small=0.5")
    return {"data": (str(folder / "prompts.jsonl"),), "reward": rewards}


@pytest.fixture(scope="module")
def unbroken(task, start, tmp_path_factory):
    out = tmp_path_factory.mktemp("unbroken") / "run"
    call(grpo.main, checkpoint=start, out=out, **task, **TINY, **ADAPTED, **SHARDED)
    return out


def test_grpo_logs_exports_and_reports(unbroken, start):
    lines = train.read_metrics(unbroken / "metrics.jsonl")
    assert [line["step"] for line in lines if "validation" in line] == [2, 4]
    for line in lines:
        expected = line["rewards/varied"] + 0.5 * line["rewards/small"]
        assert line["reward"] == pytest.approx(expected, abs=1e-6)
        assert 0 < line["sampler_gap"] < line["largest_gap"] < 1e-4 and line["entropy"] > 0
        assert 1 <= line["length"] <= 8
    base, merged = zoo.load(start), zoo.load(unbroken / "export")
    tokens = np.arange(32).reshape(2, 16)
    assert np.abs(base(tokens) - merged(tokens)).max() > 1e-3
    np.testing.assert_allclose(zoo.adapters.load(base, unbroken / "adapter")(tokens), merged(tokens), atol=1e-4)
    report = (unbroken / "report.html").read_text()
    for part in ("reward", " + 1 = ", "query.lora.down.weight", "validation_solved"):
        assert part in report
    assert "bits per byte" not in report


def test_grpo_on_meshes(task, start, tmp_path, monkeypatch):
    """One device, and data 2 x context 2 x tensor 2: the same samples and rewards, losses up to rounding."""
    options = {**task, **TINY, "steps": 2, "updates": 2}
    found = {}
    for name, sizes in {"one": {}, "mesh": {"context": 2, "tensor": 2}}.items():
        with monkeypatch.context() as patch:
            if not sizes:
                first = jax.devices()[:1]
                patch.setattr(jax, "devices", lambda *args, first=first: first)
                patch.setattr(jax, "device_count", lambda *args: 1)
            call(grpo.main, checkpoint=start, out=tmp_path / name, **options, **sizes)
        found[name] = train.read_metrics(tmp_path / name / "metrics.jsonl")
    check_optimization_of_updates(found["one"])
    for one, mesh in zip(found["one"], found["mesh"], strict=True):
        assert one.keys() == mesh.keys()
        for name in one.keys() - {"sampler_gap", "largest_gap"}:
            assert mesh[name] == pytest.approx(one[name], rel=2e-4, abs=1e-5), name


def check_optimization_of_updates(lines):
    """The learning rate goes on in every update, and some tokens are clipped in the second."""
    assert lines[0]["learning_rate"] == pytest.approx(TINY["learning_rate"]) and lines[-1]["clipped"] >= 0


def test_grpo_of_digits(tmp_path, monkeypatch):
    """The default task, quickly: a start in a run of its own, in bfloat16."""
    monkeypatch.setattr(grpo, "START_STEPS", 2)
    options = {**TINY, "steps": 2, "fsdp": 2, "dtype": "bfloat16"}
    call(grpo.main, out=tmp_path / "run", **options)
    lines = train.read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert {"rewards/digits", "rewards/exact", "solved"} <= lines[0].keys()
    assert len(train.read_metrics(tmp_path / "run" / "start" / "metrics.jsonl")) == 2
    for folder in ("start/export", "export"):
        assert zoo.load(tmp_path / "run" / folder).embedding.table_shape == (256, 64)
    check_optimization(tmp_path / "run")
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert "validation_solved" in results["result"] and len(results["samples"]) == 6
    call(grpo.main, out=tmp_path / "run", resume=True, **options, tensor=2)  # finished, and on another mesh


@pytest.mark.slow
def test_grpo_learns_to_sort_digits(tmp_path):
    call(grpo.main, out=tmp_path / "run", steps=80, eval_every=80, seed=1)
    lines = train.read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert lines[0]["solved"] < 0.4
    assert np.mean([line["solved"] for line in lines[-10:]]) > 0.9
    assert lines[-1]["validation_solved"] > 0.9


def test_grpo_holds_a_frozen_base_in_the_compute_dtype(task, start, tmp_path, monkeypatch):
    flags = {**TINY, **task, "checkpoint": start, "out": tmp_path, "dtype": "bfloat16"}
    for lora, dtype in ((2, "bfloat16"), (0, "float32")):
        assert loaded_dtype(grpo.main, monkeypatch, **flags, lora=lora) == dtype


def complaint(capsys, *words):
    """Return the line that a command ends with."""
    with pytest.raises(SystemExit) as stopped:
        train.run_cli(grpo.main, grpo.Config, arguments=[str(word) for word in words])
    assert stopped.value.code == 2
    return capsys.readouterr().err


def test_grpo_bad_input_is_one_message(task, start, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (data,) = task["data"]
    given = ("--checkpoint", start, "--data", data)
    assert "add --checkpoint DIR" in complaint(capsys, "--data", data)
    assert "--pipe 2: the stages of a pipeline do not sample" in complaint(capsys, "--pipe", 2)
    assert "--samples 1: expected at least 2" in complaint(capsys, "--samples", 1)
    assert "--updates 0: expected at least 1" in complaint(capsys, "--updates", 0)
    assert "--temperature 0.0: expected a number above 0" in complaint(capsys, "--temperature", 0)
    assert "its prompts are longer than a row (--prompt-len)" in complaint(capsys, *given, "--prompt-len", 3)
    assert "no such file of reward functions" in complaint(capsys, *given, "--reward", "no.py:f")
    (tmp_path / "bare.jsonl").write_text('{"prompt": "a"}\n' * 3 + '{"prompt": "b"}\n')
    assert "a record has no `answer`, but" in complaint(capsys, *given[:3], "bare.jsonl")
    (tmp_path / "mine.py").write_text("def mine(texts, records):\n    return [1 / (len(t) - len(t)) for t in texts]\n")
    error = complaint(capsys, *given, "--reward", "mine.py:mine")
    assert "reward mine: ZeroDivisionError: division by zero, for the prompt '" in error and "and the text" in error
    weighted = ("--checkpoint", start, "--data", f"{data}=1.0")
    assert "pass the files without weights" in complaint(capsys, *weighted)
    assert "unrecognized" in complaint(capsys, "--top-k", 5).lower()

"""`zoo evaluate`: bits per byte equal those of the model's logits, with each token scored once. Tasks are
asked, and their results kept."""

import importlib
import json
import math
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from zoo.cli import main
from zoo.text.tokenizers import ByteTokenizer, FileTokenizer
from zoo.tools.evaluate.bits_per_byte import read_texts, split_into_windows
from zoo.tools.evaluate.results import Metric, TaskResult

evaluate_command = importlib.import_module("zoo.tools.commands.evaluate")  # the package has the function by this name
TEXT = "Un été à Paris: 東京 is far. " * 3


@pytest.fixture
def file(tmp_path):
    (tmp_path / "a.txt").write_text(TEXT, encoding="utf-8")
    return tmp_path / "a.txt"


def run_json(run, *words) -> dict:
    return json.loads(run("evaluate", *words, "--json")[0])


def nats(model, tokens) -> np.ndarray:
    """-log p of every token but the first."""
    logs = jax.nn.log_softmax(model(jnp.array([tokens])).astype(jnp.float32))[0]
    return -np.asarray(logs)[np.arange(len(tokens) - 1), tokens[1:]]


@pytest.mark.one_case
@pytest.mark.parametrize("kind", ["text_model", "bytes_model"])
def test_evaluate_one_window_matches_the_logits(run, request, file, kind):
    directory = request.getfixturevalue(kind)
    text = ByteTokenizer() if kind == "bytes_model" else FileTokenizer(directory / "tokenizer.json", 256)
    tokens = [*text.prefix, *text.encode(TEXT).tolist()]
    expected = nats(zoo.load(directory), tokens)
    found = run_json(run, directory, "--data", file, "--batch", 2)
    assert found["windows"] == 1 and found["bytes"] == len(TEXT.encode()) == found["tokens"] == len(expected)
    assert found["nats_per_token"] == pytest.approx(expected.mean(), rel=1e-5)
    assert found["perplexity"] == pytest.approx(math.exp(expected.mean()), rel=1e-5)
    assert found["bits_per_byte"] == pytest.approx(expected.sum() / math.log(2) / len(TEXT.encode()), rel=1e-5)


def test_evaluate_passes_windows_through_a_pipeline(run, bytes_model, file):
    words = [bytes_model, "--data", file, "--length", 16, "--batch", 4]
    pipelined, serial = run_json(run, *words, "--pipe", 2), run_json(run, *words)
    assert pipelined["nats_per_token"] == pytest.approx(serial["nats_per_token"], rel=1e-5)
    assert pipelined["tokens"] == serial["tokens"]


@pytest.mark.slow
def test_evaluate_many_windows_and_a_mesh(run, bytes_model, file):
    words = ["evaluate", bytes_model, "--data", file, "--length", 16, "--batch", 4]
    windows = split_into_windows(TEXT, ByteTokenizer(), 16)
    model = zoo.load(bytes_model)
    rows = [[*window.context, *window.continuation] for window in windows]
    counted = [-nats(model, row)[len(window.context) - 1 :] for row, window in zip(rows, windows, strict=True)]
    found = run_json(run, *words[1:])
    assert found["windows"] == len(windows) > 4 and found["tokens"] == found["bytes"] == len(TEXT.encode())
    assert found["nats_per_token"] == pytest.approx(-np.concatenate(counted).mean(), rel=1e-5)
    split = run_json(run, *words[1:], "--data-axis", 2, "--tensor", 2)
    assert split["bits_per_byte"] == pytest.approx(found["bits_per_byte"], rel=1e-5)
    odd = [*words[1:4], "--length", 15, "--batch", 4]
    whole, shared = run_json(run, *odd), run_json(run, *odd, "--context", 4)  # windows are padded to 16 tokens
    assert shared["tokens"] == whole["tokens"]
    assert shared["bits_per_byte"] == pytest.approx(whole["bits_per_byte"], rel=1e-5)
    few = run_json(run, *words[1:], "--limit", 2)
    assert few["windows"] == 2 and few["tokens"] == len(counted[0]) + len(counted[len(windows) // 2])
    assert f"{found['bits_per_byte']:.4f} bits per byte, perplexity" in run(*words)[0]


class NoPrefix(ByteTokenizer):
    def __init__(self):
        super().__init__()
        self.prefix = ()


@pytest.mark.parametrize("text", [ByteTokenizer(), NoPrefix()])
@pytest.mark.parametrize("length", [3, 7, 8, 500])
def test_windows_tile_the_text(text, length):
    tokens = list(TEXT.encode())
    windows = split_into_windows(TEXT, text, length)
    scored = [token for window in windows for token in window.continuation]
    lost = 0 if text.prefix else 1  # the first token has no context
    assert scored == tokens[lost:] and sum(window.bytes for window in windows) == len(tokens) - lost
    start = lost
    for window in windows:
        assert window.context and len(window.context) + len(window.continuation) <= length
        assert window.context == [*text.prefix, *tokens[max(start - 1, 0) : start]]
        start += len(window.continuation)


def test_read_texts_in_directories(tmp_path):
    for name, content in {"b.txt": b"two", "a/c.txt": b"one", ".hidden": b"x", "d.bin": b"\xff\xfe", "e": b""}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    assert read_texts([tmp_path]) == ["one", "two"] and read_texts([tmp_path / "b.txt"]) == ["two"]
    with pytest.raises(ValueError, match="no text: files are empty"):
        read_texts([tmp_path / "d.bin"])


def test_evaluate_errors_name_the_problem(refused, text_model, bytes_model, gpt2, file, tmp_path):
    assert "no such file or directory" in refused("evaluate", bytes_model, "--data", tmp_path / "nowhere")
    assert "--length must be at least 2" in refused("evaluate", bytes_model, "--data", file, "--length", 1)
    assert "too short" in refused("evaluate", text_model, "--data", file, "--length", 2)
    assert "text cannot be tokenized" in refused("evaluate", gpt2, "--data", file)
    shutil.copytree(gpt2, tmp_path / "other")
    shutil.copy(text_model / "tokenizer.json", tmp_path / "other")
    assert "gives token 254, and the model's vocabulary has 30" in refused(
        "evaluate", tmp_path / "other", "--data", file
    )


@pytest.fixture
def questions(tmp_path):
    """Two tasks: choices, and answers to generate."""
    choices = [{"question": f"{i} +", "choices": [" 1", " two", "3"], "answer": i % 3} for i in range(5)]
    answers = [{"question": f"{i} =", "answer": "4"} for i in range(3)]
    for name, records in {"sums": choices, "words": answers}.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return tmp_path / "sums.jsonl", tmp_path / "words.jsonl"


def test_evaluate_tasks_prints_and_keeps_every_item(run, refused, text_model, questions, tmp_path):
    words = [text_model, "--task", *questions, "--batch", 4, "--max-new-tokens", 3, "--shots", 1]
    table, _ = run("evaluate", *words, "--out", tmp_path / "results")
    rows = [line.split() for line in table.splitlines()]
    assert rows[1][:4] == ["sums", "5", "1", "acc"] and rows[3][:4] == ["words", "3", "1", "exact_match"]
    kept = json.loads((tmp_path / "results" / "results.json").read_text())
    assert [len(kept["items"][name]) for name in ("sums", "words")] == [5, 3]
    accuracy = sum(item["acc"] for item in kept["items"]["sums"]) / 5
    assert kept["tasks"]["sums"]["metrics"]["acc"]["value"] == pytest.approx(accuracy)
    assert float(rows[1][4]) == pytest.approx(accuracy, abs=1e-4)
    assert len(kept["model"]["fingerprint"]) == 64 and kept["versions"]["jax"] == jax.__version__
    assert kept["options"] == {"shots": 1, "limit": None, "chat": False, "max_new_tokens": 3}
    assert run_json(run, *words) == kept["tasks"]
    before = (tmp_path / "results" / "results.json").read_bytes()
    again = refused("evaluate", *words, "--out", tmp_path / "results")
    assert "is there already: pass another directory as --out" in again
    assert (tmp_path / "results" / "results.json").read_bytes() == before


def test_an_interrupt_keeps_the_tasks_that_are_done(monkeypatch, text_model, questions, tmp_path, capsys):
    def answer(lm, task, options):
        if task.name == "words":
            raise KeyboardInterrupt
        return TaskResult(task.name, 5, 0, {"acc": Metric(0.5, 0.1)}, [{"acc": 0.5}])

    monkeypatch.setattr(evaluate_command, "evaluate_task", answer)
    with pytest.raises(SystemExit) as stopped:
        main(["evaluate", str(text_model), "--task", *map(str, questions), "--out", str(tmp_path / "results")])
    assert stopped.value.code == 130 and "interrupted" in capsys.readouterr().err
    kept = json.loads((tmp_path / "results" / "results.json").read_text())
    assert list(kept["items"]) == ["sums"] and kept["tasks"]["sums"]["metrics"]["acc"]["value"] == 0.5


def test_evaluate_refuses_tasks_before_it_loads_a_model(refused, monkeypatch, bytes_model, questions, file, tmp_path):
    monkeypatch.setattr(evaluate_command, "load_language_model", lambda *_, **__: pytest.fail("a model was loaded"))
    sums, words = questions
    assert "pass --data with text, --task with JSON lines or --tasks" in refused("evaluate", bytes_model)
    both = refused("evaluate", bytes_model, "--data", file, "--task", sums)
    assert "--data is text, and --task and --tasks are questions" in both
    assert "--shots is for tasks" in refused("evaluate", bytes_model, "--data", file, "--shots", 2)
    assert "5 shots for the task sums" in refused("evaluate", bytes_model, "--task", sums, "--shots", 5)
    piped = refused("evaluate", bytes_model, "--task", words, "--pipe", 2)
    assert "the answers of words are generated, and --pipe 2 shards layers" in piped
    assert "--limit must be at least 1" in refused("evaluate", bytes_model, "--task", sums, "--limit", 0)
    sums.write_text('{"question": "x", "choices": ["a", "b"]}\n')
    assert 'sums.jsonl:1: "answer" is the number' in refused("evaluate", bytes_model, "--task", sums)
    include = refused("evaluate", bytes_model, "--task", words, "--include-path", tmp_path)
    assert "--include-path has tasks for lm_eval" in include
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    missing = refused("evaluate", bytes_model, "--tasks", "arc_easy")
    assert "lm_eval cannot be found: pip install 'equizoo[eval]'" in missing

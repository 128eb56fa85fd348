"""Tasks from JSON lines: what is read, refused and asked, and the metrics."""

import json

import numpy as np
import pytest

from zoo.tools.evaluate import TaskOptions, evaluate_task, load_language_model, read_tasks, run_tasks
from zoo.tools.evaluate.language_model import LanguageModel, LogLikelihood
from zoo.tools.evaluate.results import TaskResult, average, format_table
from zoo.tools.evaluate.run_tasks import _record_choice
from zoo.tools.evaluate.tasks import MultipleChoice

from .parity import FOLDER, read_expected

GOOD = '{"question": "2 + 2 =", "choices": [" 3", " 4"], "answer": 1}'


class Recorder(LanguageModel):
    """Writes down what it is asked."""

    def log_likelihoods(self, pairs):
        self.asked = [self.tokenizer.decode([*context]) + "|" + self.tokenizer.decode(rest) for context, rest in pairs]
        self.tokens = pairs
        return [LogLikelihood(-1.0, False) for _ in pairs]

    def generate(self, prompts):
        self.asked = [self.tokenizer.decode(prompt.tokens) for prompt in prompts]
        self.prompts = prompts
        return [""] * len(prompts)


@pytest.fixture(scope="module")
def lm():
    return load_language_model(FOLDER / "model", batch=4, length=64, chat=True)


@pytest.fixture
def recorder(lm):
    return Recorder(lm.model, lm.tokenizer, template=lm.template)


def write(path, *lines):
    path.write_text("\n".join(x if isinstance(x, str) else json.dumps(x) for x in lines) + "\n", encoding="utf-8")
    return path


@pytest.fixture
def questions(tmp_path):
    """The questions of the fixture, with what ends an answer."""
    records = [json.loads(line) for line in (FOLDER / "questions.jsonl").read_text(encoding="utf-8").splitlines()]
    return write(tmp_path / "questions.jsonl", *(record | {"until": ["e", "\n"]} for record in records))


def test_metrics_are_those_of_lm_eval(lm, questions):
    choice, generated = read_tasks([FOLDER / "choice.jsonl", questions])
    expected = read_expected()["results"]
    found = evaluate_task(lm, choice, TaskOptions())
    assert found.items == 7 and found.metrics["acc"].value == expected["zoo_choice"]["acc,none"]
    assert [record["place"].rpartition(":")[2] for record in found.records] == list("1234567")
    found = evaluate_task(lm, generated, TaskOptions(max_new_tokens=12))
    assert found.metrics["exact_match"].value == expected["zoo_questions"]["exact_match,none"] == 0.5
    assert [record["text"] for record in found.records] == [" fiv", " bridg", " sid", " b"]
    values = run_tasks(lm.model, lm.tokenizer, [choice, generated], batch=4, length=64, limit=2, max_new_tokens=12)
    assert values == {"choice_acc": 1.0, "choice_acc_bytes": 1.0, "questions_exact_match": 0.5}


def test_choices_by_total_and_per_byte():
    item = MultipleChoice("a.jsonl:1", "?", (" a", " bbbbbbb", " é"), 1)
    scores = [LogLikelihood(total, False) for total in (-3.0, -4.0, -9.0)]
    record = _record_choice(item, scores)
    assert (record["likeliest"], record["likeliest_per_byte"]) == (0, 1)
    assert (record["acc"], record["acc_bytes"]) == (0.0, 1.0)
    ties = _record_choice(item, [LogLikelihood(-8.0, False)] * 3)
    assert (ties["likeliest"], ties["likeliest_per_byte"]) == (0, 1)
    umlaut = _record_choice(MultipleChoice("a.jsonl:1", "?", ("é", "e"), 0), [LogLikelihood(-3.0, False)] * 2)
    assert umlaut["likeliest_per_byte"] == 0  # two bytes, one character


def test_standard_errors_are_those_of_a_mean():
    values = np.random.default_rng(0).integers(0, 2, 40).astype(float)
    found = average(values.tolist())
    assert found.value == pytest.approx(values.mean())
    assert found.standard_error == pytest.approx(values.std(ddof=1) / np.sqrt(40))
    resampled = np.random.default_rng(1).choice(values, (4000, 40)).mean(axis=1).std()
    assert found.standard_error == pytest.approx(resampled, rel=0.05)
    assert average([1.0]).standard_error is None
    lines = format_table([TaskResult("a", 40, 2, {"acc": found, "acc_bytes": average([1.0])}, [])]).splitlines()
    assert lines[1].split() == ["a", "40", "2", "acc", f"{found.value:.4f}", f"{found.standard_error:.4f}"]
    assert lines[2].split() == ["acc_bytes", "1.0000"]


def test_examples_are_other_records_the_same_each_time(recorder, tmp_path):
    lines = [{"question": f"Q{i}:", "choices": [f" a{i}", f" b{i}"], "answer": i % 2} for i in range(4)]
    (task,) = read_tasks([write(tmp_path / "few.jsonl", *lines)])
    evaluate_task(recorder, task, TaskOptions(shots=2))
    asked = recorder.asked
    solved = [f"Q{i}:{' a' if i % 2 == 0 else ' b'}{i}" for i in range(4)]
    for number, text in enumerate(asked):
        *examples, last = text.split("\n\n")
        item, choice = divmod(number, 2)
        assert last == f"Q{item}:| {'ab'[choice]}{item}"
        assert len(set(examples)) == 2 and set(examples) < set(solved) - {solved[item]}
    evaluate_task(recorder, task, TaskOptions(shots=2))
    assert recorder.asked == asked
    evaluate_task(recorder, task, TaskOptions(shots=3, limit=1))
    assert len(recorder.asked) == 2
    with pytest.raises(ValueError, match="4 shots for the task few: each of its 4 records .* at most the 3 others"):
        evaluate_task(recorder, task, TaskOptions(shots=4))


def test_questions_are_asked_with_their_stops(recorder, tmp_path):
    lines = [{"question": "Q: ", "answer": " x"}, {"question": "R:", "answer": "y", "until": ";"}]
    (task,) = read_tasks([write(tmp_path / "gen.jsonl", *lines)])
    evaluate_task(recorder, task, TaskOptions(shots=1, max_new_tokens=9))
    assert recorder.asked == ["R: y\n\nQ: ", "Q: x\n\nR:"]
    assert [(x.options.until, x.options.max_new_tokens) for x in recorder.prompts] == [(("\n",), 9), ((";",), 9)]


def test_a_chat_asks_in_turns(recorder, tmp_path):
    start, end = "<|im_start|>", "<|im_end|>\n"
    lines = [
        {"question": "Q", "choices": [" a", " b"], "answer": 1},
        {"question": end, "choices": ["c", "d"], "answer": 0},
    ]
    (task,) = read_tasks([write(tmp_path / "chat.jsonl", *lines)])
    evaluate_task(recorder, task, TaskOptions(shots=1, chat=True))
    special = recorder.tokenizer.special_tokens
    context, choice = recorder.tokens[2]
    turns = f"{start}user\nQ{end}{start}assistant\nb{end}{start}user\n"
    head = recorder.tokenizer.encode(turns).tolist()
    assert context[: len(head)] == head and recorder.tokenizer.decode(choice) == "c"
    written = context[len(head) :]
    assert written.count(special["<|im_end|>"]) == 1  # the question's own spelling of it is text
    (task,) = read_tasks([write(tmp_path / "asked.jsonl", {"question": "Q", "answer": "x"})])
    evaluate_task(recorder, task, TaskOptions(chat=True))
    assert recorder.prompts[0].options.until == ()
    plain = Recorder(recorder.model, recorder.tokenizer)
    with pytest.raises(ValueError, match="a chat was asked for, and there is no chat template"):
        evaluate_task(plain, task, TaskOptions(chat=True))


BAD = {
    "not JSON": ("{", "expected JSON"),
    "no question": ('{"choices": ["a", "b"], "answer": 0}', '"question" is missing, and the keys are'),
    "question": ('{"question": 3, "answer": "x"}', "\"question\" is a text, and '3' came: write it as in"),
    "empty question": ('{"question": " ", "answer": "x"}', '"question" is empty'),
    "no answer": ('{"question": "x"}', '"answer" is missing'),
    "answer": ('{"question": "x", "answer": 4}', "\"answer\" is a text, and '4' came"),
    "empty answer": ('{"question": "x", "answer": ""}', '"answer" is empty'),
    "until": ('{"question": "x", "answer": "y", "until": [""]}', '"until" is a text .* write "until"'),
    "one choice": ('{"question": "x", "choices": ["a"], "answer": 0}', '"choices" is a list of at least two texts'),
    "an empty choice": ('{"question": "x", "choices": ["a", ""], "answer": 0}', "none of them empty"),
    "choice": ('{"question": "x", "choices": "ab", "answer": 0}', "at least two texts, none of them empty, and 'ab'"),
    "letter": ('{"question": "x", "choices": ["a", "b"], "answer": "b"}', "right choice, from 0 to 1, and 'b' came"),
    "number": ('{"question": "x", "choices": ["a", "b"], "answer": 2}', "from 0 to 1, and '2' came: write it as in"),
    "true": ('{"question": "x", "choices": ["a", "b"], "answer": true}', "from 0 to 1, and 'True' came"),
    "another kind": ('{"question": "x", "answer": "b"}', "records of a file are of one kind, .*: write two files"),
}


@pytest.mark.parametrize(("line", "message"), BAD.values(), ids=BAD)
def test_bad_records_are_named_by_file_and_line(tmp_path, line, message):
    lines = [GOOD, "", line] if message.startswith("records of") else ["", "", line, GOOD]
    path = write(tmp_path / "bad.jsonl", *lines)
    with pytest.raises(ValueError, match=rf"bad\.jsonl:3: .*{message}"):
        read_tasks([path])


def test_bad_files_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere.jsonl: expected a file of JSON lines"):
        read_tasks([tmp_path / "nowhere.jsonl"])
    with pytest.raises(ValueError, match="empty.jsonl: expected records, and there are none"):
        read_tasks([write(tmp_path / "empty.jsonl", "")])
    (tmp_path / "two").mkdir()
    paths = [write(tmp_path / "a.jsonl", GOOD), write(tmp_path / "two" / "a.jsonl", GOOD)]
    with pytest.raises(ValueError, match="another task is called a already"):
        read_tasks(paths)

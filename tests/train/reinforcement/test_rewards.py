"""Reward functions are called once for all texts, and what goes wrong names the prompt and the text."""

import numpy as np
import pytest

from zoo import train
from zoo.train.reinforcement.rewards import RewardError

RECORDS = [{"prompt": "1 + 1?", "answer": 2}, {"prompt": "2 + 2?", "answer": "4"}, {"prompt": "Who?", "answer": "me"}]


@pytest.mark.parametrize(
    ("text", "answer", "expected"),
    [
        ("42", "42", 1),
        (" 42\n", 42, 1),
        ("The answer is 42.", "42", 1),
        ("6 * 7 = 42", "42", 1),
        ("42, or 43", "42", 0),
        ("It is 1,042.50", "1042.5", 1),
        ("142", "42", 0),
        ("-42", "42", 0),
        ("", "42", 0),
        ("none", "42", 0),
        ("134", "0134", 0),
        ("0134", "0134", 1),
        ("the cat", "cat", 0),
        ("cat ", "cat", 1),
        ("1.5", "1.50", 1),
        ("It is 1,234,567", 1234567, 1),
        ("The roots are 5,6", 56, 0),
        ("The roots are 5,6", 6, 1),
        ("12,34,56", 123456, 0),
        ("1,2,345", 345, 1),
        ("1,234,56", 56, 1),
        ("0,123", 123, 1),
        ("1234,567", 567, 1),
        ("56", "5,6", 0),
        ("5,6", "5,6", 1),
        ("3-5", -5, 0),
        ("3-5", 5, 1),
        ("(x)-5", 5, 1),
        ("x=-5", -5, 1),
        ("**-5**", "-5", 1),
        ("It is \u22125", -5, 1),
        ("It is .5", 0.5, 1),
        ("-.5", -0.5, 1),
        ("0.00001", 0.00001, 1),  # str of which is 1e-05
        ("It is 2.5e3", 2500, 1),
        ("It is 1e99999999999999999999", 1, 0),
    ],
)
def test_match_answer(text, answer, expected):
    assert train.match_answer([text], [{"answer": answer}]) == [expected]


def test_rewards_are_weighted_and_called_once():
    calls = []

    def brief(texts, records):
        calls.append(len(texts))
        return np.array([len(text) < 3 for text in texts])

    rewards = train.Rewards({"exact": train.match_answer, "brief": brief}, {"brief": 0.5})
    found = rewards(["2", "three", "me"], RECORDS)
    np.testing.assert_array_equal(found.parts["exact"], [1, 0, 1])
    np.testing.assert_array_equal(found.parts["brief"], [1, 0, 1])
    np.testing.assert_array_equal(found.total, [1.5, 0, 1.5])
    assert calls == [3] and found.solved == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda texts, records: [float(x) for x in texts], "could not convert .*'Who\\?' and the text 'me'"),
        (lambda texts, records: [1.0], "returned list of shape \\(1,\\) for 3 texts"),
        (lambda texts, records: 1.0, "returned float for 3 texts: expected a number for each"),
        (lambda texts, records: None, "returned NoneType for 3 texts"),
        (lambda texts, records: [1, None, 1], "is nan for the prompt '2 \\+ 2\\?' and the text '4'"),
        (lambda texts, records: [1, 2, np.inf], "is inf for the prompt 'Who\\?' and the text 'me'"),
        (
            lambda texts, records: [0.0 / (3 - len(texts))],
            "float division by zero, for 3 texts together, and for none by itself",
        ),
    ],
)
def test_what_a_reward_does_wrong_is_named(function, message):
    with pytest.raises(RewardError, match=f"reward mine:? .*{message}"):
        train.Rewards({"mine": function})(["2", "4", "me"], RECORDS)


def test_a_long_text_is_shortened():
    with pytest.raises(RewardError, match=r"aaa'\.\.\.$") as raised:
        train.Rewards({"mine": lambda texts, records: [np.nan]})(["a" * 5000], [{"prompt": "b"}])
    assert len(str(raised.value)) < 400


def test_records_without_an_answer():
    with pytest.raises(RewardError, match="a record has no `answer`, but 'prompt', 'solution': add it, or pass"):
        train.Rewards({"exact": train.match_answer})(["a"], [{"prompt": "b", "solution": "c"}])


def test_functions_are_read_from_files(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "HALF = 0.5\ndef half(texts, records):\n    return [HALF for _ in texts]\ndef one(texts, records):\n"
    )
    with pytest.raises(RewardError, match=r"mine\.py does not run: IndentationError"):
        train.Rewards.read([f"{path}:half"])
    path.write_text(path.read_text() + "    return [1.0] * len(texts)\n")
    found = train.Rewards.read([f"{path}:half=4", f"{path}:one"])(["a", "b"], RECORDS[:2])
    np.testing.assert_array_equal(found.total, [3, 3])
    assert list(found.parts) == ["half", "one"]
    for words, message in {
        ("half",): "half: a reward is FILE.py:FUNCTION or FILE.py:FUNCTION=WEIGHT",
        (f"{path}:half=much",): "half=much",
        (f"{path}:half", f"{path}:half=2"): "there is a reward function half already",
        (f"{path}:hal",): "has no function hal: it has half, one",
        (f"{path}:HALF",): "has no function HALF",
        (f"{tmp_path}/other.py:half",): "other.py: no such file of reward functions",
    }.items():
        with pytest.raises(RewardError, match=message):
            train.Rewards.read(words)

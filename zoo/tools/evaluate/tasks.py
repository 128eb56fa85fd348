"""Tasks from JSON lines: questions with choices, and questions whose answer is generated."""

import functools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zoo.text.records.json_lines import JsonLines
from zoo.text.records.record_file import RecordError, quote

CHOICE_EXAMPLE = '{"question": "2 + 2 =", "choices": [" 3", " 4"], "answer": 1}'
QUESTION_EXAMPLE = '{"question": "2 + 2 =", "answer": "4"}'
_SEED = 0


@dataclass(frozen=True)
class MultipleChoice:
    """A question with choices: the likeliest one is the model's answer."""

    place: str
    """Where the record is: `questions.jsonl:3`."""
    question: str
    choices: tuple[str, ...]
    """Continuations of the question, verbatim: most begin with a space."""
    correct: int
    """Number of the right one, from 0."""

    @property
    def answer(self) -> str:
        return self.choices[self.correct]


@dataclass(frozen=True)
class Question:
    """A question whose answer is generated, and compared without the spaces around it."""

    place: str
    question: str
    answer: str
    until: tuple[str, ...] | None
    """Strings that end an answer; None if the record names none."""


@dataclass(frozen=True)
class Task:
    """The records of a file, all of one kind."""

    name: str
    items: tuple[MultipleChoice, ...] | tuple[Question, ...]

    def choose_examples(self, number: int, shots: int) -> list[MultipleChoice] | list[Question]:
        """Return records of the task as examples for the item `number`: the first ones of one shuffled order, without
        the item itself. The same in every call."""
        others = [i for i in self._shuffled[: shots + 1] if i != number]
        return [self.items[i] for i in others[:shots]]  # type: ignore[return-value]

    @functools.cached_property
    def _shuffled(self) -> list[int]:
        order = list(range(len(self.items)))
        random.Random(_SEED).shuffle(order)
        return order

    def check_shots(self, shots: int) -> None:
        """**Raises** `ValueError` for more examples than the task has other records."""
        if not 0 <= shots < len(self.items):
            raise ValueError(
                f"{shots} shots for the task {self.name}: each of its {len(self.items)} records can have at most the "
                f"{len(self.items) - 1} others as examples"
            )


def read_tasks(paths: Sequence[str | Path]) -> list[Task]:
    """Read one task from each file; its name is the file's, without the ending.

    A record is `{"question", "choices", "answer"}` with the number of the right choice, from 0, or `{"question",
    "answer"}` with a text, and optionally `"until"`, a string that ends the answer, or several. Other keys are ignored.

    **Raises** `FileNotFoundError` for a missing file; `ValueError` with file and line for a record of another form, for
    a file without records or with both kinds, and for two files of one name.
    """
    tasks: list[Task] = []
    for path in map(Path, paths):
        if not path.is_file():
            raise FileNotFoundError(f"{path}: expected a file of JSON lines, such as {CHOICE_EXAMPLE}")
        name = path.name.partition(".")[0] or path.name
        if any(task.name == name for task in tasks):
            raise ValueError(f"{path}: another task is called {name} already: rename one of the two files")
        tasks.append(Task(name, _read_items(path)))
    return tasks


def _read_items(path: Path) -> tuple[Any, ...]:
    file = JsonLines(path)
    items: list[MultipleChoice | Question] = []
    for unit in file.split():
        for number, record in file.read(unit):
            place = file.locate(unit, number)
            if isinstance(record, RecordError):
                raise ValueError(f"{place}: {record}")
            item = _read_item(record, place)
            if items and type(item) is not type(items[0]):
                raise ValueError(
                    f"{place}: records of a file are of one kind, and only one of this record and {items[0].place} has "
                    '"choices": write two files'
                )
            items.append(item)
    if not items:
        raise ValueError(f"{path}: expected records, and there are none: write lines such as {CHOICE_EXAMPLE}")
    return tuple(items)


def _read_item(record: dict[str, Any], place: str) -> MultipleChoice | Question:
    if "choices" in record:
        return _read_choice(record, place)
    question = _read_text(record, "question", place, QUESTION_EXAMPLE)
    answer = _read_text(record, "answer", place, QUESTION_EXAMPLE)
    for key, text in (("question", question), ("answer", answer)):
        if not text.strip():
            raise ValueError(f'{place}: "{key}" is empty: write a text, as in {QUESTION_EXAMPLE}')
    until = record.get("until")
    if isinstance(until, str):
        until = [until]
    is_valid = until is None or (isinstance(until, list) and all(isinstance(x, str) and x for x in until))
    if not is_valid:
        raise ValueError(
            f'{place}: "until" is a text that ends the answer, or a list of such texts, and '
            f'{quote(str(record["until"]))} came: write "until": ["\\n"]'
        )
    return Question(place, question, answer, None if until is None else tuple(until))


def _read_choice(record: dict[str, Any], place: str) -> MultipleChoice:
    question = _read_text(record, "question", place, CHOICE_EXAMPLE)
    choices = record["choices"]
    if not isinstance(choices, list) or len(choices) < 2 or not all(isinstance(x, str) and x for x in choices):
        raise ValueError(
            f'{place}: "choices" is a list of at least two texts, none of them empty, and {quote(str(choices))} came: '
            f"write them as in {CHOICE_EXAMPLE}"
        )
    correct = record.get("answer")
    if type(correct) is not int or not 0 <= correct < len(choices):
        raise ValueError(
            f'{place}: "answer" is the number of the right choice, from 0 to {len(choices) - 1}, and '
            f"{quote(str(correct))} came: write it as in {CHOICE_EXAMPLE}"
        )
    return MultipleChoice(place, question, tuple(choices), correct)


def _read_text(record: dict[str, Any], key: str, place: str, example: str) -> str:
    if key not in record:
        raise ValueError(f'{place}: "{key}" is missing, and the keys are {quote(", ".join(record))}: write {example}')
    if not isinstance(record[key], str):
        raise ValueError(f'{place}: "{key}" is a text, and {quote(str(record[key]))} came: write it as in {example}')
    return record[key]

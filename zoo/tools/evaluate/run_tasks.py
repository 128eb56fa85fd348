"""Evaluate a model on tasks from JSON lines."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from zoo.models import Decoder
from zoo.parallel import Mesh
from zoo.text.tokenizers import Tokenizer

from .generation import GenerationOptions
from .language_model import LanguageModel, LogLikelihood, TextPrompt
from .results import TaskResult, average
from .tasks import MultipleChoice, Question, Task

_SEPARATOR = "\n\n"
"""Between an example and what follows."""
_UNTIL = ("\n",)
"""Ends an answer, where a record does not say what does. In a chat the model's end of turn does."""


@dataclasses.dataclass(frozen=True)
class TaskOptions:
    """Options of an evaluation on tasks."""

    shots: int = 0
    """Examples before each question, from the task's other records: the same ones in every evaluation."""
    limit: int | None = None
    """Number of items, the first ones of the file; None for all."""
    chat: bool = False
    """Ask by the chat template: a question is a turn of the user, an example's answer one of the assistant."""
    max_new_tokens: int = 256
    """Most tokens of a generated answer."""


def run_tasks(
    model: Decoder,
    tokenizer: Tokenizer,
    tasks: Sequence[Task],
    *,
    mesh: Mesh | None = None,
    batch: int = 8,
    length: int = 2048,
    stop_tokens: Sequence[int] = (),
    **options: Any,
) -> dict[str, float]:
    """Evaluate a model that is in memory, as within a run: `{"arithmetic_acc": 0.75, "arithmetic_acc_bytes": 0.5}`.

        tasks = read_tasks(["arithmetic.jsonl"])
        ...
            run.log(**run_tasks(model, corpus.tokenizer, tasks, mesh=mesh))

    `options` are those of `TaskOptions`; `batch`, `length` and `stop_tokens` are those of `LanguageModel`. Programs
    are compiled at the first call, and found again at the next. It is for small tasks: a step waits for it.
    """
    asked = TaskOptions(**options)
    lm = LanguageModel(model, tokenizer, mesh, batch=batch, length=length, stop_tokens=stop_tokens)
    found = {}
    for task in tasks:
        for name, metric in evaluate_task(lm, task, asked).metrics.items():
            found[f"{task.name}_{name}"] = metric.value
    return found


def evaluate_task(lm: LanguageModel, task: Task, options: TaskOptions) -> TaskResult:
    """Evaluate a model on one task.

    - Choices: `acc`, where the likeliest choice is the right one, and `acc_bytes`, where the choice of the greatest
      log-likelihood per byte is. The choice follows the question verbatim; of equal ones, the first counts.
    - Questions: `exact_match` of the generated text and the answer, without the spaces around them.

    **Raises** `ValueError` for more shots than other records, and for a chat without a chat template.
    """
    task.check_shots(options.shots)
    items = task.items[: options.limit]
    if isinstance(items[0], MultipleChoice):
        records = _answer_choices(lm, task, items, options)  # type: ignore[arg-type]
        names = ("acc", "acc_bytes")
    else:
        records = _answer_questions(lm, task, items, options)  # type: ignore[arg-type]
        names = ("exact_match",)
    metrics = {name: average([record[name] for record in records]) for name in names}
    return TaskResult(task.name, len(items), options.shots, metrics, records)


def _answer_choices(
    lm: LanguageModel, task: Task, items: Sequence[MultipleChoice], options: TaskOptions
) -> list[dict[str, Any]]:
    pairs = []
    for number, item in enumerate(items):
        examples = task.choose_examples(number, options.shots)
        pairs += _encode_choices(lm, item, examples, chat=options.chat)
    scores = iter(lm.log_likelihoods(pairs))
    records = []
    for item in items:
        found = [next(scores) for _ in item.choices]
        records.append(_record_choice(item, found))
    return records


def _record_choice(item: MultipleChoice, scores: Sequence[LogLikelihood]) -> dict[str, Any]:
    totals = [score.log_likelihood for score in scores]
    per_byte = [total / len(choice.encode()) for total, choice in zip(totals, item.choices, strict=True)]
    likeliest = totals.index(max(totals))
    likeliest_per_byte = per_byte.index(max(per_byte))
    return {
        "place": item.place,
        "question": item.question,
        "choices": item.choices,
        "correct": item.correct,
        "log_likelihoods": totals,
        "is_greedy": [score.is_greedy for score in scores],
        "likeliest": likeliest,
        "likeliest_per_byte": likeliest_per_byte,
        "acc": float(likeliest == item.correct),
        "acc_bytes": float(likeliest_per_byte == item.correct),
    }


def _answer_questions(
    lm: LanguageModel, task: Task, items: Sequence[Question], options: TaskOptions
) -> list[dict[str, Any]]:
    prompts = []
    for number, item in enumerate(items):
        examples = task.choose_examples(number, options.shots)
        tokens = _encode_prompt(lm, item, examples, chat=options.chat)
        until = item.until
        if until is None:
            until = () if options.chat else _UNTIL
        prompts.append(TextPrompt(tokens, GenerationOptions(options.max_new_tokens, until)))
    texts = lm.generate(prompts)
    return [
        {
            "place": item.place,
            "question": item.question,
            "answer": item.answer,
            "text": text,
            "exact_match": float(text.strip() == item.answer.strip()),
        }
        for item, text in zip(items, texts, strict=True)
    ]


def _encode_choices(
    lm: LanguageModel, item: MultipleChoice, examples: Sequence[MultipleChoice | Question], *, chat: bool
) -> list[tuple[list[int], list[int]]]:
    """Return the tokens of context and choice, for each choice. A turn of a chat does not begin with a space."""
    if not chat:
        text = _write_prompt(item, examples)
        return [lm.encode_pair(text, choice) for choice in item.choices]
    context = _encode_prompt(lm, item, examples, chat=True)
    pairs = []
    for choice in item.choices:
        tokens, _ = lm.tokenizer.encode_with_offsets(choice.strip(), find_special_tokens=False)
        pairs.append((context, tokens.tolist()))
    return pairs


def _encode_prompt(
    lm: LanguageModel, item: MultipleChoice | Question, examples: Sequence[MultipleChoice | Question], *, chat: bool
) -> list[int]:
    """Return the tokens of a question behind its examples, as text or as turns of a chat."""
    if not chat:
        return lm.encode(_write_prompt(item, examples))
    template = lm.require_template()
    messages = []
    for example in examples:
        messages.append({"role": "user", "content": example.question})
        messages.append({"role": "assistant", "content": example.answer.strip()})
    messages.append({"role": "user", "content": item.question})
    return template.encode(messages, lm.tokenizer, add_generation_prompt=True).tolist()


def _write_prompt(item: MultipleChoice | Question, examples: Sequence[MultipleChoice | Question]) -> str:
    """Return a question behind its examples: a right choice follows its question verbatim, an answer behind a space."""
    solved = []
    for example in examples:
        if isinstance(example, MultipleChoice):
            solved.append(example.question + example.answer)
        else:
            solved.append(f"{example.question.rstrip()} {example.answer.strip()}")
    return _SEPARATOR.join([*solved, item.question])

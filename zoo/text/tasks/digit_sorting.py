"""Sorting digits: prompts with verifiable answers, for reinforcement learning without a download."""

from collections.abc import Mapping, Sequence

import numpy as np

DIGITS = 4


def list_sorting_prompts() -> list[dict[str, str]]:
    """Return all 10,000 prompts of four digits, "3141=", each with its `answer`, "1134"."""
    numbers = [f"{number:0{DIGITS}}" for number in range(10**DIGITS)]
    return [{"prompt": f"{number}=", "answer": "".join(sorted(number))} for number in numbers]


def list_sorting_examples(count: int, *, sorted_share: float = 0.3, seed: int = 0) -> list[dict[str, str]]:
    """Return prompts with a `completion`: sorted digits in so many of them, and shuffled ones in the others. A model
    that is trained on them knows the format, and seldom solves the task."""
    rng = np.random.default_rng(seed)
    examples = []
    for digits in rng.integers(0, 10, (count, DIGITS)):
        answer = np.sort(digits) if rng.random() < sorted_share else rng.permutation(digits)
        prompt, completion = ("".join(map(str, text)) for text in (digits, answer))
        examples.append({"prompt": f"{prompt}=", "completion": completion})
    return examples


def count_sorted_digits(texts: Sequence[str], records: Sequence[Mapping[str, str]]) -> list[float]:
    """Return the share of the answer's digits that are in their place in each text: a reward for a part of the way."""
    pairs = zip(texts, records, strict=True)
    return [sum(map(str.__eq__, text, record["answer"])) / DIGITS for text, record in pairs]

"""Rewards of sampled texts: plain Python functions of texts and records, and their weighted sum."""

import importlib.util
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

RewardFunction = Callable[[Sequence[str], Sequence[Mapping[str, Any]]], Any]
"""A function `(texts, records) -> rewards`: a number for each sampled text. `records` has the record of each text's
prompt: `prompt`, as the model has read it, and all further fields."""

_NUMBER = re.compile(
    r"(?:(?<![\w)\]}])[-\u2212])?"  # after a digit, a name or a bracket, "-" subtracts or stands for "to"
    r"(?:(?<!\d,)(?<!\d)[1-9]\d{0,2}(?:,\d{3})+(?!,?\d)(?:\.\d+)?"  # commas part thousands, or two numbers
    r"|\d+(?:\.\d+)?|(?<![\w.])\.\d+)"
    r"(?:[eE][-+]?\d{1,3}(?!\w))?"
)
_PADDED_NUMBER = re.compile(r"[-\u2212]?0\d")  # its zeros count, as in a code
_SHOWN = 200
"""Characters of a prompt or text in a message."""


class RewardError(ValueError):
    """Raised for a reward function that cannot be read, or that fails."""


class RewardValues(NamedTuple):
    """Rewards of texts."""

    total: Float[np.ndarray, "texts"]
    """The weighted sum."""
    parts: dict[str, Float[np.ndarray, "texts"]]
    """By the name of the function, before weighting."""

    @property
    def solved(self) -> float:
        """Share of texts to which every function gives at least 1."""
        return float(np.all([part >= 1 for part in self.parts.values()], axis=0).mean())


@dataclass(frozen=True)
class Rewards:
    """Weighted sum of reward functions, each called once for all texts.

        rewards = Rewards({"exact": match_answer, "brief": lambda texts, records: [len(text) < 80 for text in texts]})
        found = rewards(texts, records)

    - `weights`: by name, 1 by default.

    With several processes each computes the rewards of all texts: functions return the same numbers in all of them.
    """

    functions: Mapping[str, RewardFunction]
    weights: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def read(cls, specifications: Sequence[str]) -> "Rewards":
        """Read functions written FILE.py:FUNCTION, with a weight FILE.py:FUNCTION=0.5.

        **Raises** `RewardError` for another form, a missing file or function, a file that fails, and two functions of
        one name.
        """
        functions: dict[str, RewardFunction] = {}
        weights = {}
        for specification in specifications:
            match = re.fullmatch(r"(.+\.py):(\w+)(?:=(.+))?", specification)
            if match is None:
                raise RewardError(f"{specification}: a reward is FILE.py:FUNCTION or FILE.py:FUNCTION=WEIGHT")
            path, name, weight = match.groups(default="1")
            if name in functions:
                raise RewardError(f"{specification}: there is a reward function {name} already: rename one")
            weights[name] = _parse_weight(weight, specification)
            functions[name] = _import_function(Path(path), name)
        return cls(functions, weights)

    def __call__(self, texts: Sequence[str], records: Sequence[Mapping[str, Any]]) -> RewardValues:
        """Compute the rewards of texts, with the record of each.

        **Raises** `RewardError`, with the prompt and the text, for a function that raises or returns a number that is
        not finite, and for one that does not return a number for each text.
        """
        parts = {name: _call(name, function, texts, records) for name, function in self.functions.items()}
        weighted = [self.weights.get(name, 1.0) * part for name, part in parts.items()]
        return RewardValues(np.sum(weighted, axis=0), parts)


def match_answer(texts: Sequence[str], records: Sequence[Mapping[str, Any]]) -> list[float]:
    """Return 1 for a text that is the `answer` of its record, spaces around it aside, and 0 for others.

    An answer that is a number is also met by a text whose last number equals it: "The sum is 1,042." for 1042. Commas
    part groups of three digits; otherwise they part numbers: the last of "5,6" is 6, and the last of "3-5" is 5.

    **Raises** `RewardError` for a record without `answer`.
    """
    for record in records:
        if "answer" not in record:
            raise RewardError(
                f"a record has no `answer`, but {', '.join(map(repr, record))}: add it, or pass a function of your own "
                "(--reward FILE.py:FUNCTION)"
            )
    return [float(_is_answer(text, record["answer"])) for text, record in zip(texts, records, strict=True)]


def _is_answer(text: str, answer: Any) -> bool:
    wanted = str(answer).strip()
    if text.strip() == wanted:
        return True
    numbers = _NUMBER.findall(text)
    if not numbers or not _NUMBER.fullmatch(wanted) or _PADDED_NUMBER.match(wanted):
        return False
    return _parse_number(numbers[-1]) == _parse_number(wanted)


def _parse_number(number: str) -> Decimal:
    return Decimal(number.replace(",", "").replace("\u2212", "-"))


def _parse_weight(weight: str, specification: str) -> float:
    try:
        return float(weight)
    except ValueError:
        raise RewardError(f"{specification}: expected a number as the weight, got {weight}") from None


def _import_function(path: Path, name: str) -> RewardFunction:
    """Return a function of a Python file. **Raises** `RewardError` for a file or function that is not there."""
    if not path.is_file():
        raise RewardError(f"{path}: no such file of reward functions")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise RewardError(f"{path} does not run: {type(error).__name__}: {error}") from error
    functions = [known for known, value in vars(module).items() if callable(value) and not known.startswith("_")]
    if name not in functions:
        near = get_close_matches(name, functions, n=3, cutoff=0.0)
        raise RewardError(f"{path} has no function {name}: it has {', '.join(near) or 'none'}")
    return getattr(module, name)


def _call(
    name: str, function: RewardFunction, texts: Sequence[str], records: Sequence[Mapping[str, Any]]
) -> Float[np.ndarray, "texts"]:
    try:
        found = function(texts, records)
    except RewardError:
        raise
    except Exception as error:
        raise RewardError(f"reward {name}: {_locate(function, texts, records, error)}") from error
    try:
        values = np.asarray(found, np.float64)
    except (TypeError, ValueError):
        values = np.empty(0)
    if values.shape != (len(texts),):
        raise RewardError(
            f"reward {name} returned {_to_words(found)} for {len(texts)} texts: expected a number for each"
        )
    if len(faulty := np.flatnonzero(~np.isfinite(values))):
        row = int(faulty[0])
        raise RewardError(f"reward {name} is {values[row]} for {_quote(texts[row], records[row])}")
    return values


def _locate(
    function: RewardFunction, texts: Sequence[str], records: Sequence[Mapping[str, Any]], error: Exception
) -> str:
    """Describe an error of a reward function with the first text that raises one by itself."""
    for text, record in zip(texts, records, strict=True):
        try:
            function([text], [record])
        except Exception as own:
            return f"{type(own).__name__}: {own}, for {_quote(text, record)}"
    return f"{type(error).__name__}: {error}, for {len(texts)} texts together, and for none by itself"


def _to_words(found: Any) -> str:
    shape = np.shape(found) if isinstance(found, np.ndarray | list | tuple) else ()
    return f"{type(found).__name__} of shape {shape}" if shape else type(found).__name__


def _quote(text: str, record: Mapping[str, Any]) -> str:
    return f"the prompt {_shorten(str(record.get('prompt')))} and the text {_shorten(text)}"


def _shorten(text: str) -> str:
    if len(text) <= _SHOWN:
        return repr(text)
    return f"{text[:_SHOWN]!r}..."

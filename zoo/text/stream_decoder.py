"""Decode tokens as they come: whole characters, and stop strings that several tokens spell."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Integer

_FIRST_MARK = 0xD800
"""First of the surrogates that stand for special tokens in a text, since no decoded text has one."""
_MARKS = re.compile("[\ud800-\udfff]")


class StreamDecoder:
    """Incremental detokenizer: turn a stream of tokens into pieces of text that later tokens do not change.

    A character is held back until all of its bytes have arrived, and a word keeps its leading space. `prompt` are the
    tokens before the first new one.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], prompt: Sequence[int] = ()):
        self._decode = decode
        self._tokens = list(prompt)
        self._start = 0
        self._printed = len(self._tokens)

    def push(self, token: int) -> str:
        """Add a token; return the text that is complete."""
        self._tokens.append(token)
        new = self.flush()
        if not new or new.endswith("\ufffd"):  # bytes that are not (yet) a complete character
            return ""
        self._start = self._printed
        self._printed = len(self._tokens)
        return new

    def flush(self) -> str:
        """Return the text that was held back."""
        # decode with the preceding tokens, which determine whether a space is in between
        known = self._decode(self._tokens[self._start : self._printed])
        text = self._decode(self._tokens[self._start :])
        if not text.startswith(known):  # new tokens complete a character that the prompt ended in
            known = known.rstrip("\ufffd")
        return text[len(known) :]


class StoppingDecoder:
    """Incremental detokenizer that ends before a stop string: a string may begin in one token and end in another.

    Text that may be the beginning of a stop string is held back. `decode` and `prompt` are those of `StreamDecoder`.

    - `special_tokens`: ids of special tokens by spelling, which a stop string may contain. They have no text.

    **Raises** `ValueError` for an empty stop string.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        prompt: Sequence[int] = (),
        stop: Sequence[str] = (),
        special_tokens: Mapping[str, int] = {},
    ):
        if not all(stop):
            raise ValueError("stop: an empty string was given, which every text ends with")
        self._decoder = StreamDecoder(decode, prompt)
        self._marks, self._stop = _mark_special_tokens(stop, special_tokens)
        self._held = ""
        self.ended = False
        """True after a stop string; further tokens have no text."""

    def push(self, token: int) -> str:
        """Add a token; return the text that is complete and in no stop string."""
        if self.ended:
            return ""
        text = self._cut(self._held + self._decoder.push(token) + self._marks.get(token, ""))
        held = 0 if self.ended else max((_count_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - held :]
        return _MARKS.sub("", text[: len(text) - held])

    def flush(self) -> str:
        """Return the text that was held back."""
        if self.ended:
            return ""
        return _MARKS.sub("", self._cut(self._held + self._decoder.flush()))

    def _cut(self, text: str) -> str:
        cut = _cut_at_stop(text, self._stop)
        self.ended = len(cut) < len(text)
        return cut


def decode_until_stop(
    decode: Callable[[Any], str],
    tokens: Sequence[int] | Integer[np.ndarray, "tokens"],
    stop: Sequence[str],
    special_tokens: Mapping[str, int],
) -> str:
    """Decode tokens up to the first stop string. Ids of -1 after the end of a row have no text. `stop` and
    `special_tokens` are as in `StoppingDecoder`."""
    ids = np.asarray(tokens, np.int64)
    ids = ids[ids >= 0]
    marks, strings = _mark_special_tokens(stop, special_tokens)
    marked = ""
    shown = 0
    for place in np.flatnonzero(np.isin(ids, list(marks))).tolist():
        text = decode(ids[:place])
        marked += text[shown:] + marks[int(ids[place])]
        shown = len(text)
    marked += decode(ids)[shown:]
    return _MARKS.sub("", _cut_at_stop(marked, strings))


def end_at_stop(
    decode: Callable[[Sequence[int]], str],
    prompts: Sequence[Sequence[int]],
    stop: Sequence[str],
    special_tokens: Mapping[str, int],
) -> Callable[[Integer[np.ndarray, "batch"]], Bool[np.ndarray, "batch"]]:
    """Return a callback of `zoo.generate` that ends rows with a stop string. `stop` and `special_tokens` are as in
    `StoppingDecoder`."""
    decoders = [StoppingDecoder(decode, prompt, stop, special_tokens) for prompt in prompts]

    def end(newest: Integer[np.ndarray, "batch"]) -> Bool[np.ndarray, "batch"]:
        for decoder, token in zip(decoders, newest.tolist(), strict=True):
            if token >= 0:
                decoder.push(token)
        return np.array([decoder.ended for decoder in decoders])

    return end


def _mark_special_tokens(
    stop: Sequence[str], special_tokens: Mapping[str, int]
) -> tuple[dict[int, str], tuple[str, ...]]:
    """Return a mark for each special token that stop strings spell, and the stop strings, also with marks."""
    spelled = [spelling for spelling in special_tokens if spelling and any(spelling in each for each in stop)]
    spelled.sort(key=len, reverse=True)  # the longest match wins
    marks = {spelling: chr(_FIRST_MARK + number) for number, spelling in enumerate(spelled)}
    marked = list(stop)
    if marks:
        pattern = re.compile("|".join(map(re.escape, marks)))
        marked += [pattern.sub(lambda found: marks[found[0]], each) for each in stop]
    return {special_tokens[spelling]: mark for spelling, mark in marks.items()}, tuple(dict.fromkeys(marked))


def _cut_at_stop(text: str, stop: Sequence[str]) -> str:
    """Return a text up to the first of its stop strings."""
    return text[: min((place for each in stop if (place := text.find(each)) >= 0), default=len(text))]


def _count_overlap(text: str, stop: str) -> int:
    """Return the number of characters at the end of `text` that `stop` begins with, but not all of `stop`."""
    sizes = range(min(len(text), len(stop) - 1), 0, -1)
    return next((size for size in sizes if text.endswith(stop[:size])), 0)

"""Text to tokens and back, by the tokenizer that lies beside a checkpoint."""

import abc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int

TOKENIZER_FILE = "tokenizer.json"
_REPLACEMENT_CHARACTER = "\ufffd"
"""What bytes show as that are no whole letter (yet)."""


class CheckpointTokenizer(abc.ABC):
    """What a model's tokens stand for."""

    prefix: tuple[int, ...]
    """The tokens that every text begins with, as the model was trained."""

    @abc.abstractmethod
    def encode(self, text: str) -> tuple[Int[np.ndarray, "tokens"], Int[np.ndarray, "tokens"]]:
        """The tokens of a text without the prefix, and how many of its bytes each stands for: together all of them. A
        letter that several tokens share counts with the first of them."""

    @abc.abstractmethod
    def decode(self, tokens: Sequence[int]) -> str:
        """The text of these tokens; special ones have none."""


class RawByteTokenizer(CheckpointTokenizer):
    """One token a byte. Token 0 stands before every text, as in `zoo.train.text`."""

    prefix = (0,)

    def encode(self, text: str) -> tuple[Int[np.ndarray, "tokens"], Int[np.ndarray, "tokens"]]:
        tokens = np.frombuffer(text.encode(), np.uint8).astype(np.int64)
        return tokens, np.ones_like(tokens)

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(token for token in tokens if token).decode(errors="replace")


class HuggingFaceTokenizer(CheckpointTokenizer):
    """That of a `tokenizer.json`.

    **Raises** `ImportError` where the package `tokenizers` is not installed; `ValueError` for a file that it cannot
    read.
    """

    def __init__(self, path: Path):
        try:
            import tokenizers
        except ImportError:
            raise ImportError(f"{path} needs the package tokenizers: pip install 'equizoo[text]'") from None
        try:
            self._tokenizer: Any = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the package has no narrower class
            raise ValueError(f"{path} is no tokenizer that can be read: {error}") from None
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self.prefix = self._prefix()

    def _prefix(self) -> tuple[int, ...]:
        """What the file puts before a text, found by looking at one; what it puts after is of no use here."""
        whole = self._tokenizer.encode("a").ids
        bare = self._tokenizer.encode("a", add_special_tokens=False).ids
        starts = [i for i in range(len(whole)) if bare and whole[i : i + len(bare)] == bare]
        return tuple(whole[: starts[0]]) if starts else ()

    def encode(self, text: str) -> tuple[Int[np.ndarray, "tokens"], Int[np.ndarray, "tokens"]]:
        encoded = self._tokenizer.encode(text, add_special_tokens=False)
        tokens = np.array(encoded.ids, np.int64)
        letters = np.frombuffer(text.encode("utf-32-le"), np.uint32)
        end = np.cumsum(1 + (letters >= 0x80) + (letters >= 0x800) + (letters >= 0x10000))
        end = np.concatenate([[0], end])
        ends = np.maximum.accumulate(np.array([end[stop] for _, stop in encoded.offsets], np.int64))
        ends[-1:] = end[-1]  # what a tokenizer drops at the end belongs to the text all the same
        return tokens, np.diff(ends, prepend=0)

    def decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(list(tokens))


def find_tokenizer(directory: Path, vocab: int) -> CheckpointTokenizer | None:
    """The tokenizer of a checkpoint with so many tokens: its own, bytes where there are 256 of them, or None."""
    if (directory / TOKENIZER_FILE).is_file():
        return HuggingFaceTokenizer(directory / TOKENIZER_FILE)
    return RawByteTokenizer() if vocab == 256 else None


class StreamDecoder:
    """The text of tokens as they come. What is shown stays right whatever comes next: a letter is held back until all
    of its bytes are there, and a word keeps the space before it.

    `before` are the tokens that the new ones follow.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], prompt: Sequence[int] = ()):
        self._decode = decode
        self._tokens = list(prompt)
        self._start, self._shown = 0, len(self._tokens)

    def push(self, token: int) -> str:
        """What can be shown once `token` has come."""
        self._tokens.append(token)
        new = self.flush()
        if not new or new.endswith(_REPLACEMENT_CHARACTER):
            return ""
        self._start, self._shown = self._shown, len(self._tokens)
        return new

    def flush(self) -> str:
        """What was held back."""
        # decoded with the tokens just before, which decide whether a space stands in between
        known = self._decode(self._tokens[self._start : self._shown])
        return self._decode(self._tokens[self._start :])[len(known) :]

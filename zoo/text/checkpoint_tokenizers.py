"""Tokenizers of checkpoints: `tokenizer.json`, or bytes; incremental detokenization for streaming."""

import abc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int

from .tokenizer_file import TOKENIZER_FILE, TokenizerFile, name_faults

_REPLACEMENT_CHARACTER = "\ufffd"
"""Decoding of bytes that are not (yet) a complete character."""


class CheckpointTokenizer(abc.ABC):
    """Encode text to tokens, decode tokens to text."""

    prefix: tuple[int, ...]
    """Tokens that precede every text (BOS), as in training."""

    @abc.abstractmethod
    def encode(self, text: str) -> tuple[Int[np.ndarray, "tokens"], Int[np.ndarray, "tokens"]]:
        """Return the tokens of a text without the prefix, and the number of bytes of each token.

        The numbers sum to the bytes of the text. A character that spans several tokens counts for the first of them.
        """

    @abc.abstractmethod
    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of these tokens. Special tokens have none."""


class RawByteTokenizer(CheckpointTokenizer):
    """One token per byte. Token 0 precedes every text, as in `zoo.text`."""

    prefix = (0,)

    def encode(self, text: str) -> tuple[Int[np.ndarray, "tokens"], Int[np.ndarray, "tokens"]]:
        tokens = np.frombuffer(text.encode(), np.uint8).astype(np.int64)
        return tokens, np.ones_like(tokens)

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(token for token in tokens if token).decode(errors="replace")


class HuggingFaceTokenizer(CheckpointTokenizer):
    """The tokenizer of a `tokenizer.json`.

    **Raises** `ImportError` if the package `tokenizers` is not installed; `TokenizerError` for a file that it cannot
    read.
    """

    def __init__(self, path: Path):
        self._path = path
        self._tokenizer: Any = TokenizerFile.read(path).build()
        self.prefix = self._find_prefix()

    def _find_prefix(self) -> tuple[int, ...]:
        """Find the special tokens before a text by encoding one. Those after a text (EOS) are not used."""
        with_special = self._tokenizer.encode("a").ids
        plain = self._tokenizer.encode("a", add_special_tokens=False).ids
        starts = [i for i in range(len(with_special)) if plain and with_special[i : i + len(plain)] == plain]
        return tuple(with_special[: starts[0]]) if starts else ()

    def encode(self, text: str) -> tuple[Int[np.ndarray, "tokens"], Int[np.ndarray, "tokens"]]:
        codepoints = np.frombuffer(text.encode("utf-32-le"), np.uint32)
        utf8_lengths = 1 + (codepoints >= 0x80) + (codepoints >= 0x800) + (codepoints >= 0x10000)
        byte_offsets = np.concatenate([[0], np.cumsum(utf8_lengths)])
        with name_faults(self._path, "cannot tokenize a text"):
            encoded = self._tokenizer.encode(text, add_special_tokens=False)
            ends = np.array([byte_offsets[stop] for _, stop in encoded.offsets], np.int64)
        tokens, ends = np.array(encoded.ids, np.int64), np.maximum.accumulate(ends)
        ends[-1:] = byte_offsets[-1]  # characters that a tokenizer drops at the end count for the last token
        return tokens, np.diff(ends, prepend=0)

    def decode(self, tokens: Sequence[int]) -> str:
        with name_faults(self._path, "cannot decode tokens"):
            return self._tokenizer.decode(list(tokens))


def find_tokenizer(directory: Path, vocab: int) -> CheckpointTokenizer | None:
    """Return the tokenizer of a checkpoint: its tokenizer.json, else bytes if the vocabulary is 256, else None."""
    if (directory / TOKENIZER_FILE).exists():
        return HuggingFaceTokenizer(directory / TOKENIZER_FILE)
    return RawByteTokenizer() if vocab == 256 else None


class StreamDecoder:
    """Incremental detokenizer: turn a stream of tokens into pieces of text that later tokens do not change.

    A character is held back until all of its bytes have arrived, and a word keeps its leading space. `prompt` are the
    tokens before the first new one.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], prompt: Sequence[int] = ()):
        self._decode = decode
        self._tokens = list(prompt)
        self._start, self._printed = 0, len(self._tokens)

    def push(self, token: int) -> str:
        """Add a token; return the text that is complete."""
        self._tokens.append(token)
        new = self.flush()
        if not new or new.endswith(_REPLACEMENT_CHARACTER):
            return ""
        self._start, self._printed = self._printed, len(self._tokens)
        return new

    def flush(self) -> str:
        """Return the text that was held back."""
        # decode with the preceding tokens, which determine whether a space is in between
        known = self._decode(self._tokens[self._start : self._printed])
        return self._decode(self._tokens[self._start :])[len(known) :]

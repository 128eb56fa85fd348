"""Perplexity and bits per byte of texts."""

import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from zoo.text.tokenizers import Tokenizer, count_bytes

from .language_model import LanguageModel


def read_texts(paths: Sequence[Path]) -> list[str]:
    """Read every text file. **Raises** `FileNotFoundError` for a missing path, `ValueError` if no file has text."""
    texts = []
    for path in paths:
        if not path.exists():
            raise FileNotFoundError(f"{path}: no such file or directory to read text from")
        files = sorted(_list_files(path)) if path.is_dir() else [path]
        for file in files:
            content = file.read_bytes()
            try:
                text = content.decode()
            except UnicodeDecodeError:
                text = "\0"
            if text and "\0" not in text:
                texts.append(text)
    if not texts:
        raise ValueError(f"{', '.join(map(str, paths))}: no text: files are empty, contain NUL bytes or are not UTF-8")
    return texts


def _list_files(folder: Path) -> Iterator[Path]:
    """Yield every file below a directory, except hidden files and directories."""
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        files = (Path(parent) / name for name in names if not name.startswith("."))
        yield from (file for file in files if file.is_file())  # no pipe, whose writer would be waited for


class Window(NamedTuple):
    """Tokens of a text to score, and the tokens before them."""

    context: list[int]
    continuation: list[int]
    bytes: int
    """Number of bytes of the continuation."""


def split_into_windows(content: str, text: Tokenizer, length: int) -> list[Window]:
    """Split a text into windows that score each token once. Its first token is scored only if there is a prefix.

    **Raises** `ValueError` for a length that leaves no room after the prefix.
    """
    prefix = list(text.prefix)
    room = length - len(prefix)
    if room < 2:
        raise ValueError(f"--length {length} is too short: the tokenizer puts {len(prefix)} tokens before every window")
    ids, offsets = text.encode_with_offsets(content)
    tokens = ids.tolist()
    lengths = count_bytes(content, offsets)
    windows = []
    scored = 0 if prefix else 1
    while scored < len(tokens):
        start = max(scored - 1, 0)
        stop = min(start + room, len(tokens))
        context = [*prefix, *tokens[start:scored]]
        windows.append(Window(context, tokens[scored:stop], int(lengths[scored:stop].sum())))
        scored = stop
    return windows


def evaluate_texts(lm: LanguageModel, texts: Sequence[str], length: int, limit: int | None = None) -> dict[str, Any]:
    """Compute the mean negative log-likelihood of the tokens of texts, perplexity and bits per byte.

    - `length`: tokens of a window, at most one more than the model reads at a time.
    - `limit`: number of windows, evenly spaced over the text; None for all.

    **Raises** `ValueError` for a text without a token to score, and if a score is not finite.
    """
    windows = [window for content in texts for window in split_into_windows(content, lm.tokenizer, length)]
    if not windows:
        raise ValueError("the text is too short: no token has context to be predicted from")
    if limit is not None and limit < len(windows):
        windows = [windows[i * len(windows) // limit] for i in range(limit)]
    scores = lm.log_likelihoods([(window.context, window.continuation) for window in windows])
    nats = -sum(score.log_likelihood for score in scores)
    if not math.isfinite(nats):
        raise ValueError("a token's log-probability is not finite: try --dtype float32")
    tokens = sum(len(window.continuation) for window in windows)
    text_bytes = sum(window.bytes for window in windows)
    return {
        "files": len(texts),
        "windows": len(windows),
        "tokens": tokens,
        "bytes": text_bytes,
        "nats_per_token": nats / tokens,
        "perplexity": math.exp(min(nats / tokens, 700)),
        "bits_per_byte": nats / math.log(2) / text_bytes,
    }

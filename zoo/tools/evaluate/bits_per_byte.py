"""Perplexity and bits per byte of texts."""

import dataclasses
import math
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from zoo.models import Decoder
from zoo.models.scoring import score
from zoo.parallel import Mesh
from zoo.parallel.batch import place_batch
from zoo.parallel.spmd import spmd
from zoo.text.tokenizers import Tokenizer, count_bytes

from .progress import EvaluationProgress


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


@dataclasses.dataclass(frozen=True)
class _ScoredWindow:
    """A window of tokens. Tokens before `first` are context and not scored."""

    tokens: Int[np.ndarray, "tokens"]
    first: int
    bytes: int
    """Number of bytes of the scored tokens."""


def split_into_windows(content: str, text: Tokenizer, length: int) -> list[_ScoredWindow]:
    """Split a text into windows that score each token once. Its first token is scored only if there is a prefix.

    **Raises** `ValueError` for a length that leaves no room after the prefix.
    """
    prefix = np.array(text.prefix, np.int64)
    room = length - len(prefix)
    if room < 2:
        raise ValueError(f"--length {length} is too short: the tokenizer puts {len(prefix)} tokens before every window")
    tokens, offsets = text.encode_with_offsets(content)
    lengths = count_bytes(content, offsets)
    windows = []
    scored = 0 if len(prefix) else 1
    while scored < len(tokens):
        start = max(scored - 1, 0)
        stop = min(start + room, len(tokens))
        window = np.concatenate([prefix, tokens[start:stop]])
        windows.append(_ScoredWindow(window, len(prefix) + scored - start, int(lengths[scored:stop].sum())))
        scored = stop
    return windows


def evaluate_windows(
    model: Decoder, windows: Sequence[_ScoredWindow], length: int, batch: int, mesh: Mesh | None
) -> dict[str, Any]:
    """Compute the mean negative log-likelihood of the scored tokens, perplexity, bits per byte and throughput.

    **Raises** `ValueError` if a score is not finite.
    """
    shards = 1 if mesh is None else mesh.count_shards("seq")
    length = -(-min(length, max(len(window.tokens) for window in windows)) // shards) * shards
    if mesh is None:
        run = _score_on_one_device
    else:
        run = spmd(_score_tokens, mesh, out="batch seq")
    nats = 0.0
    counted = []
    times = [time.perf_counter()]
    bar = EvaluationProgress(len(windows))
    with bar:
        for start in range(0, len(windows), batch):
            rows = windows[start : start + batch]
            tokens, weights = _pad_windows(rows, batch, length)
            if mesh is None:
                placed = jnp.asarray(tokens)
            else:
                placed = place_batch({"tokens": tokens}, mesh)["tokens"]
            scores = np.asarray(jax.device_get(run(model, placed)), np.float64)
            nats -= float(np.where(weights, scores, 0).sum())
            if not math.isfinite(nats):
                raise ValueError("a token's log-probability is not finite: try --dtype float32")
            counted.append(int(weights.sum()))
            times.append(time.perf_counter())
            bar.advance(len(rows), f"perplexity {_perplexity(nats / sum(counted)):.4g}")
    # the first batch includes compilation: time it only if it is the only one
    skipped = min(1, len(counted) - 1)
    count = sum(counted)
    text_bytes = sum(window.bytes for window in windows)
    return {
        "tokens": count,
        "bytes": text_bytes,
        "nats_per_token": nats / count,
        "perplexity": _perplexity(nats / count),
        "bits_per_byte": nats / math.log(2) / text_bytes,
        "tokens_per_second": sum(counted[skipped:]) / (times[-1] - times[skipped]),
    }


def _score_tokens(model: Decoder, tokens: jax.Array) -> jax.Array:
    return score(model, tokens)


_score_on_one_device = eqx.filter_jit(_score_tokens)


def _pad_windows(
    rows: Sequence[_ScoredWindow], batch: int, length: int
) -> tuple[Int[np.ndarray, "batch seq"], Float[np.ndarray, "batch seq-1"]]:
    """Return windows as one batch of a fixed shape, and the weight of each score. Padding is on the right, where causal
    attention hides it from all scored tokens."""
    tokens = np.zeros((batch, length), np.int32)
    weights = np.zeros((batch, length - 1))
    for i, row in enumerate(rows):
        tokens[i, : len(row.tokens)] = row.tokens
        weights[i, row.first - 1 : len(row.tokens) - 1] = 1
    return tokens, weights


def _perplexity(nats: float) -> float:
    return math.exp(min(nats, 700))

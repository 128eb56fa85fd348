"""`zoo evaluate`."""

import dataclasses
import json
import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jaxtyping import Float, Int

import zoo
from zoo.parallel import Mesh
from zoo.text.checkpoint_tokenizers import TOKENIZER_FILE, CheckpointTokenizer, find_tokenizer
from zoo.weights.resolve import resolve_directory

from .devices import make_device_mesh


def evaluate(
    directory: Annotated[Path, tyro.conf.Positional],
    *,
    data: Annotated[tuple[Path, ...], tyro.conf.arg(metavar="PATH ...")],
    length: int = 512,
    batch: int = 8,
    limit: int | None = None,
    dtype: Literal["float32", "bfloat16", "float16"] | None = None,
    data_axis: int = 1,
    fsdp: int = 1,
    tensor: int = 1,
    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False,
) -> None:
    """Measure how well a checkpoint predicts a text: perplexity, bits per byte.

    Every file is a text of its own, and every token of it is scored once. Windows of --length tokens follow one
    another, each after the first beginning with the last token of the one before, from which its own first one is
    predicted: tokens early in a window see little of what came before, as is usual. What the tokenizer puts before a
    text stands before every window and is not scored. Where it puts nothing there, the first token of a file has
    nothing to be predicted from: then neither it nor its bytes are counted.

    Without a tokenizer.json a vocabulary of 256 is taken for bytes, with token 0 before a text, as in zoo.train.

    Args:
        directory: Holds config.json and safetensors, and tokenizer.json.
        data: Files of UTF-8 text, and folders of them; hidden files and those that are no text are passed over.
        length: Tokens in a window.
        batch: Windows that are computed at once, on all devices together.
        limit: Windows at most, spread evenly over the text; all of them unless given.
        dtype: What the model is read as and computes in; as it is stored unless given.
        data_axis: Devices that share the windows of a batch; -1 for all that remain.
        fsdp: Devices that share each copy of the parameters.
        tensor: Devices that share heads, MLP and vocabulary.
        as_json: Print one JSON object.
    """
    for name, number in (("length", length - 1), ("batch", batch), ("limit", 1 if limit is None else limit)):
        if number < 1:
            raise ValueError(f"--{name} is at least {2 if name == 'length' else 1}")
    path = resolve_directory(directory)
    files = read_texts(data)
    mesh = make_device_mesh(data=data_axis, fsdp=fsdp, tensor=tensor)
    model = zoo.load(path, mesh=mesh, dtype=dtype)
    vocab, _ = model.embedding.table_shape
    text = find_tokenizer(path, vocab)
    if text is None:
        raise ValueError(
            f"{path} has no {TOKENIZER_FILE}, and {vocab} tokens are no bytes: nothing says how text becomes tokens"
        )
    windows = [window for content in files for window in split_into_windows(content, text, length)]
    if (top := max((int(window.tokens.max()) for window in windows), default=0)) >= vocab:
        raise ValueError(f"{path / TOKENIZER_FILE} gives token {top}, and the model has {vocab}")
    if not windows:
        raise ValueError("the text is too short: there is no token that another one stands before")
    if limit is not None and limit < len(windows):
        windows = [windows[i * len(windows) // limit] for i in range(limit)]
    found = {"files": len(files), "windows": len(windows), **_evaluate_windows(model, windows, length, batch, mesh)}
    print(json.dumps(found, indent=2) if as_json else _format_results(found))


def read_texts(paths: Sequence[Path]) -> list[str]:
    """The text of every file. **Raises** `ValueError` where there is none, `FileNotFoundError` for no file at all."""
    found = []
    for path in paths:
        if not path.exists():
            raise FileNotFoundError(f"{path}: there is no such file or folder to read text from")
        for file in sorted(_list_files(path)) if path.is_dir() else [path]:
            content = file.read_bytes()
            try:
                text = content.decode()
            except UnicodeDecodeError:
                text = "\0"
            if text and "\0" not in text:
                found.append(text)
    if not found:
        raise ValueError(
            f"{', '.join(map(str, paths))}: no text there: files are empty, hold NUL bytes or are not UTF-8"
        )
    return found


def _list_files(folder: Path) -> Iterator[Path]:
    """Every file below a folder, hidden ones left out."""
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (Path(place) / name for name in names if not name.startswith("."))


@dataclasses.dataclass(frozen=True)
class _ScoredWindow:
    """Some tokens of a text, those before `first` there to be looked at only."""

    tokens: Int[np.ndarray, "tokens"]
    first: int
    bytes: int
    """What the tokens that are scored stand for."""


def split_into_windows(content: str, text: CheckpointTokenizer, length: int) -> list[_ScoredWindow]:
    """Windows that score every token of a text once; its first one only where something stands before it.

    **Raises** `ValueError` for a length that holds nothing besides the tokens before a text.
    """
    prefix = np.array(text.prefix, np.int64)
    room = length - len(prefix)
    if room < 2:
        raise ValueError(f"--length {length} is too short: {len(prefix)} tokens stand before every window")
    tokens, lengths = text.encode(content)
    found, scored = [], 0 if len(prefix) else 1
    while scored < len(tokens):
        start = max(scored - 1, 0)
        stop = min(start + room, len(tokens))
        window = np.concatenate([prefix, tokens[start:stop]])
        found.append(_ScoredWindow(window, len(prefix) + scored - start, int(lengths[scored:stop].sum())))
        scored = stop
    return found


def _evaluate_windows(
    model: zoo.models.Decoder, windows: Sequence[_ScoredWindow], length: int, batch: int, mesh: Mesh | None
) -> dict[str, Any]:
    """Mean negative log-likelihood of the tokens that are scored, and what follows from it.

    **Raises** `ValueError` where a score is not finite.
    """
    length = min(length, max(len(window.tokens) for window in windows))
    run = _score_on_one_device if mesh is None else zoo.spmd(_score_tokens, mesh, out="batch seq")
    nats, counted, times, bar = 0.0, [], [time.perf_counter()], _EvaluationProgress(len(windows))
    with bar:
        for start in range(0, len(windows), batch):
            rows = windows[start : start + batch]
            tokens, weights = _pad_windows(rows, batch, length)
            placed = jnp.asarray(tokens) if mesh is None else zoo.place_batch({"tokens": tokens}, mesh)["tokens"]
            scores = np.asarray(jax.device_get(run(model, placed)), np.float64)
            nats -= float(np.where(weights, scores, 0).sum())
            if not math.isfinite(nats):
                raise ValueError("a token's log-probability is not finite: try --dtype float32")
            counted.append(int(weights.sum()))
            times.append(time.perf_counter())
            bar.advance(len(rows), f"perplexity {_perplexity(nats / sum(counted)):.4g}")
    # the first batch waits for the compiler: it counts only where there is no other
    skipped = min(1, len(counted) - 1)
    count, text_bytes = sum(counted), sum(window.bytes for window in windows)
    return {
        "tokens": count,
        "bytes": text_bytes,
        "nats_per_token": nats / count,
        "perplexity": _perplexity(nats / count),
        "bits_per_byte": nats / math.log(2) / text_bytes,
        "tokens_per_second": sum(counted[skipped:]) / (times[-1] - times[skipped]),
    }


def _score_tokens(model: zoo.models.Decoder, tokens: jax.Array) -> jax.Array:
    return zoo.score(model, tokens)


_score_on_one_device = eqx.filter_jit(_score_tokens)


def _pad_windows(
    rows: Sequence[_ScoredWindow], batch: int, length: int
) -> tuple[Int[np.ndarray, "batch seq"], Float[np.ndarray, "batch seq-1"]]:
    """Windows as one batch of a fixed shape, and a weight for each score. Padding stands on the right, where no token
    that counts can see it."""
    tokens, weights = np.zeros((batch, length), np.int32), np.zeros((batch, length - 1))
    for i, row in enumerate(rows):
        tokens[i, : len(row.tokens)] = row.tokens
        weights[i, row.first - 1 : len(row.tokens) - 1] = 1
    return tokens, weights


def _perplexity(nats: float) -> float:
    return math.exp(min(nats, 700))


def _format_results(results: dict[str, Any]) -> str:
    return (
        f"{results['bits_per_byte']:.4f} bits per byte, perplexity {results['perplexity']:.4f} "
        f"({results['nats_per_token']:.4f} nats per token)\n"
        f"{results['tokens']:,} tokens, {results['bytes']:,} bytes, {results['windows']:,} windows, {results['files']:,} "
        f"files; {results['tokens_per_second']:,.0f} tokens/s"
    )


class _EvaluationProgress:
    """Progress on standard error, where that is a terminal."""

    def __init__(self, total: int):
        self._progress: Any = None
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            columns = MofNCompleteColumn(), BarColumn(), TimeRemainingColumn(), TextColumn("{task.description}")
            self._progress = Progress(*columns, console=Console(stderr=True), transient=True)
            self._task = self._progress.add_task("compiling", total=total)

    def __enter__(self) -> "_EvaluationProgress":
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()

    def advance(self, windows: int, message: str) -> None:
        if self._progress is not None:
            self._progress.update(self._task, advance=windows, description=message)

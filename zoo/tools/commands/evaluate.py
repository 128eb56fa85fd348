"""Implement `zoo evaluate`."""

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

from zoo._compile_cache import enable_compile_cache
from zoo._terminal import show
from zoo.models import Decoder
from zoo.models.scoring import score
from zoo.parallel import Mesh, place_batch, spmd
from zoo.parallel.devices import make_device_mesh
from zoo.text.tokenizer_file import TOKENIZER_FILE
from zoo.text.tokenizers import Tokenizer, count_bytes, find_tokenizer
from zoo.weights import load
from zoo.weights.directory import resolve_directory


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
    expert: int = 1,
    context: int = 1,
    tensor: int = 1,
    pipe: int = 1,
    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False,
    no_compile_cache: bool = False,
) -> None:
    """Evaluate perplexity and bits per byte of a checkpoint on text.

    Each file is one document, split into consecutive windows of --length tokens. Every token is scored once: a window
    starts with the last token of the window before it, as context for its first prediction. The tokenizer's prefix
    (BOS) precedes every window and is not scored. Without such a prefix the first token of a file has no context, so
    neither it nor its bytes are counted.

    Without tokenizer.json, a vocabulary of 256 means bytes, with token 0 before a document, as in zoo.train.

    Args:
        directory: Checkpoint directory with config.json, safetensors and tokenizer.json, or a name on the Hugging
            Face hub, with @REVISION behind it for another than the newest.
        data: UTF-8 text files, and directories of them. Hidden and binary files are skipped.
        length: Context length: tokens per window.
        batch: Windows per batch, over all devices.
        limit: Maximum number of windows, evenly spaced over the text. Default: all.
        dtype: Dtype of the parameters and the computation. Default: as stored.
        data_axis: Data parallelism: number of devices that shard the batch. -1 for all remaining devices.
        fsdp: Fully sharded data parallelism: number of devices that shard the parameters and the batch.
        expert: Expert parallelism: devices that share the experts of mixtures out, and the rows.
        context: Context parallelism: number of devices that shard the tokens of a window.
        tensor: Tensor parallelism: number of devices that shard heads, MLP and vocabulary.
        pipe: Pipeline parallelism: number of devices that share the layers out, as stages.
        as_json: Print a JSON object.
        no_compile_cache: Compile anew: neither read compiled programs from the user's cache folder nor keep them there.
    """
    if not no_compile_cache:
        enable_compile_cache()
    for name, number, least in (("length", length, 2), ("batch", batch, 1), ("limit", limit, 1)):
        if number is not None and number < least:
            raise ValueError(f"--{name} must be at least {least}")
    path = resolve_directory(directory)
    files = read_texts(data)
    mesh = make_device_mesh(data=data_axis, fsdp=fsdp, expert=expert, context=context, tensor=tensor, pipe=pipe)
    model = load(path, mesh=mesh, dtype=dtype)
    vocab, _ = model.embedding.table_shape
    text = find_tokenizer(path, vocab)
    if text is None:
        raise ValueError(
            f"{path} has no {TOKENIZER_FILE}, and a vocabulary of {vocab} is not bytes: text cannot be tokenized"
        )
    windows = [window for content in files for window in split_into_windows(content, text, length)]
    if (top := max((int(window.tokens.max()) for window in windows), default=0)) >= vocab:
        raise ValueError(f"{path / TOKENIZER_FILE} gives token {top}, and the model's vocabulary has {vocab}")
    if not windows:
        raise ValueError("the text is too short: no token has context to be predicted from")
    if limit is not None and limit < len(windows):
        windows = [windows[i * len(windows) // limit] for i in range(limit)]
    results = {"files": len(files), "windows": len(windows), **_evaluate_windows(model, windows, length, batch, mesh)}
    if as_json:
        show(json.dumps(results, indent=2))
    else:
        show(_format_results(results))


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


def _evaluate_windows(
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
    bar = _EvaluationProgress(len(windows))
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


def _format_results(results: dict[str, Any]) -> str:
    return (
        f"{results['bits_per_byte']:.4f} bits per byte, perplexity {results['perplexity']:.4f} "
        f"({results['nats_per_token']:.4f} nats per token)\n"
        f"{results['tokens']:,} tokens, {results['bytes']:,} bytes, {results['windows']:,} windows, "
        f"{results['files']:,} files; {results['tokens_per_second']:,.0f} tokens/s"
    )


class _EvaluationProgress:
    """Progress bar on standard error, if it is a terminal."""

    def __init__(self, total: int):
        self._progress: Any = None
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (
                MofNCompleteColumn(),
                BarColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.description}", markup=False),
            )
            self._progress = Progress(*columns, console=Console(stderr=True), transient=True)
            self._task = self._progress.add_task("first batch (compiles, unless cached)", total=total)

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

"""Data: from files of records to tokens on disk, from tokens to batches, and the plan of packed rows."""

import functools
import itertools
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int

from zoo import train
from zoo._optional import import_optional
from zoo.text import ChatTemplate
from zoo.text.batches import ShuffledBatches, TokenWindows
from zoo.text.packing import PackedRows
from zoo.text.tasks.docstrings import read_docstrings
from zoo.text.tokenizers import FileTokenizer, train_bpe

from .measure import Timing, contest

VOCAB = 4096
FILE_BYTES = 50_000_000
"""Size of the file of chats, and of the file of texts."""
WORKERS = (1, 2)
SEQ_LEN, BATCH, STEPS = 2048, 8, 200
PLANNED = 1_000_000
TURN_ENDS = ("<|im_start|>", "<|im_end|>")
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
Measured = dict[str, tuple[Timing, dict[str, Any]]]


def measure_data(rounds: int) -> dict[str, Measured]:
    """Time the writing of tokens, batches and plans; return timing and facts of each entrant, by part."""
    with tempfile.TemporaryDirectory() as folder:
        return {
            "tokens of records": _measure(*_make_writers(Path(folder)), rounds),
            "batches": _measure(*_make_readers(Path(folder)), 5 * rounds),
            "plans of packed rows": _measure(*_make_planners(), 5 * rounds),
        }


def _measure(runs: dict[str, Callable[[], object]], facts: dict[str, dict[str, Any]], rounds: int) -> Measured:
    timings = contest(runs, rounds)
    measured = {}
    for name, timing in timings.items():
        row = dict(facts[name])
        rival = row.pop("rival", None)
        if rival is not None:
            row |= {"rival": rival, "ratio": timing.relative_to(timings[rival])}
        measured[name] = timing, row
    return measured


def _make_writers(folder: Path) -> tuple[dict[str, Callable[[], object]], dict[str, dict[str, Any]]]:
    """Return `load_records` into an empty cache, and its rival on as many cores: the tokenizer and nothing else."""
    chats = read_docstrings()
    tokenizer = _train_tokenizer(chats, folder / "tokenizer.json")
    template = ChatTemplate(CHATML, {"eos_token": TURN_ENDS[1]})
    files = {"chats": folder / "chats.jsonl", "texts": folder / "texts.jsonl"}
    _write_lines(files["chats"], _vary(chats))
    _write_lines(files["texts"], ({"text": "\n".join(_list_contents(chat))} for chat in _vary(chats)))
    runs: dict[str, Callable[[], object]] = {}
    facts: dict[str, dict[str, Any]] = {}
    for name, path in files.items():
        with path.open() as lines:
            records = map(json.loads, lines)
            texts = [
                template.render(record["messages"]).text if name == "chats" else record["text"] for record in records
            ]
        num_tokens = _tokenize(folder / "tokenizer.json", texts, 1)
        for workers in WORKERS:
            alone = f"encode_batch_fast, {name}, {_count(workers, 'core')}"
            runs[alone] = functools.partial(_tokenize, folder / "tokenizer.json", texts, workers)
            ours = f"load_records, {name}, {_count(workers, 'worker')}"
            options = {"tokenizer": tokenizer, "template": template, "seq_len": SEQ_LEN, "processes": workers}
            runs[ours] = functools.partial(_load, path, folder, **options)
            facts[alone] = {"tokens": num_tokens, "bytes_read": path.stat().st_size}
            facts[ours] = {**facts[alone], "rival": alone}
    return runs, facts


def _make_readers(folder: Path) -> tuple[dict[str, Callable[[], object]], dict[str, dict[str, Any]]]:
    """Return readers of shuffled batches: of rows packed with whole texts, and of windows of the same tokens."""
    starts = _draw_starts(PLANNED // 50)
    path = folder / "tokens.bin"
    np.random.default_rng(0).integers(1, VOCAB, starts[-1], np.uint16).tofile(path)
    tokens = np.memmap(path, np.uint16, "r")
    mask = np.ones(len(tokens), np.uint8)
    datasets = {
        "PackedRows": PackedRows(tokens, mask, starts, SEQ_LEN),
        "TokenWindows": TokenWindows(tokens, SEQ_LEN),
        "TokenWindows, with segments": TokenWindows(tokens, SEQ_LEN, with_segments=True),
    }
    runs: dict[str, Callable[[], object]] = {
        name: functools.partial(_read_batches, dataset) for name, dataset in datasets.items()
    }
    return runs, {name: {"tokens": BATCH * SEQ_LEN * STEPS} for name in runs}


def _make_planners() -> tuple[dict[str, Callable[[], object]], dict[str, dict[str, Any]]]:
    """Return planners of rows for texts of random lengths."""
    starts = _draw_starts(PLANNED)
    tokens = np.broadcast_to(np.uint16(0), starts[-1:])  # a plan reads none
    runs: dict[str, Callable[[], object]] = {
        f"{PLANNED:,} texts into rows of {seq_len:,}": functools.partial(PackedRows, tokens, tokens, starts, seq_len)
        for seq_len in (SEQ_LEN, 4 * SEQ_LEN)
    }
    return runs, {name: {} for name in runs}


def _train_tokenizer(chats: Sequence[dict[str, Any]], path: Path) -> FileTokenizer:
    """Train a BPE, and give it the special tokens of ChatML."""
    train_bpe((text.encode() for chat in chats for text in _list_contents(chat)), VOCAB, path)
    tokenizer = import_optional("tokenizers", "pip install 'equizoo[text]'").Tokenizer.from_file(str(path))
    tokenizer.add_special_tokens(list(TURN_ENDS))
    tokenizer.save(str(path))
    return FileTokenizer(path, VOCAB + len(TURN_ENDS))


def _list_contents(chat: dict[str, Any]) -> list[str]:
    return [message["content"] for message in chat["messages"]]


def _vary(chats: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Repeat chats without an end, with a number in each question and answer."""
    for number, chat in enumerate(itertools.cycle(chats)):
        yield {
            "messages": [
                {"role": message["role"], "content": f"{number}. {message['content']}"} for message in chat["messages"]
            ]
        }


def _write_lines(path: Path, records: Iterable[dict[str, Any]]) -> None:
    """Write records up to `FILE_BYTES`."""
    size = 0
    with path.open("wb") as file:
        for record in records:
            size += file.write(json.dumps(record).encode() + b"\n")
            if size >= FILE_BYTES:
                break


def _tokenize(path: Path, texts: Sequence[str], cores: int) -> int:
    """Tokenize texts by the package, a thousand at once, on one core or all; return the number of tokens."""
    tokenizer = import_optional("tokenizers", "pip install 'equizoo[text]'").Tokenizer.from_file(str(path))
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = str(cores > 1).lower()
    num_tokens = 0
    for first in range(0, len(texts), 1000):
        encoded = tokenizer.encode_batch_fast(texts[first : first + 1000], add_special_tokens=False)
        num_tokens += sum(map(len, encoded))
    del os.environ["TOKENIZERS_PARALLELISM"]
    if before is not None:
        os.environ["TOKENIZERS_PARALLELISM"] = before
    return num_tokens


def _load(path: Path, folder: Path, **options: Any) -> None:
    with tempfile.TemporaryDirectory(dir=folder) as cache:
        train.load_records(path, cache=Path(cache), **options)


def _draw_starts(num_texts: int) -> Int[np.ndarray, "texts_and_one"]:
    """Draw lengths of texts, 300 tokens in the median and at most 4,096."""
    lengths = np.random.default_rng(0).lognormal(np.log(300), 1.0, num_texts).astype(np.int64).clip(2, 4096)
    return np.concatenate([[0], np.cumsum(lengths)])


def _read_batches(dataset: PackedRows | TokenWindows) -> None:
    batches = ShuffledBatches(dataset, BATCH, process=(0, 1))
    for _ in range(STEPS):
        next(batches)
    batches.close()


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number > 1)}"

"""Implement `zoo data`."""

import itertools
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import tyro
from jaxtyping import Bool, Int

from zoo._files import user_cache_folder
from zoo._terminal import escape_controls, show
from zoo.text.record_options import RecordOptions
from zoo.text.records.records import Records
from zoo.text.token_cache import verify_cache
from zoo.text.tokenizers import Tokenizer, read_tokenizer
from zoo.weights.directory import resolve_directory


def data(
    action: Annotated[Literal["show", "verify"], tyro.conf.Positional],
    source: Annotated[tuple[str, ...], tyro.conf.Positional] = (),
    *,
    checkpoint: Annotated[Path | None, tyro.conf.arg(metavar="DIR|NAME")] = None,
    texts: int = 3,
    seq_len: int = 2048,
    records: Annotated[RecordOptions, tyro.conf.OmitArgPrefixes],
) -> None:
    """Show what training on records reads, or verify cached tokens.

    zoo data show chats.jsonl --checkpoint Qwen/Qwen3-0.6B checks all records, prints what was read, kept, cut and
    dropped, and the first texts as the model gets them: what is trained on in color, in ⟦brackets⟧ in a pipe. The
    tokens stay cached for training. zoo data verify reads all cached tokens, or the caches that are named, and ends
    with status 1 if one is damaged.

    Args:
        action: show or verify.
        source: JSON lines, Parquet, ArrayRecord, datasets on disk or names on the Hugging Face hub (org/name:split):
            files, folders, patterns. For verify: directories of cached tokens.
        checkpoint: Model to train: its tokenizer and chat template are used.
        texts: Number of texts to print.
        seq_len: Targets in a row: longer texts are cut or dropped.
        records: How records are read.
    """
    if action == "verify":
        _verify([Path(path) for path in source])
        return
    if not source or checkpoint is None:
        raise ValueError("zoo data show takes records and a model: zoo data show chats.jsonl --checkpoint DIR")
    directory = resolve_directory(checkpoint, weights=False)
    tokenizer = read_tokenizer(directory)
    template = records.read_template(directory, tokenizer)
    options = {"tokenizer": tokenizer, "template": template, "seq_len": seq_len}
    show(str(records.load(source, **options)))
    unpacked = records.load(source, **options, pack=False, validation=0.0)  # of the same tokens, in their order
    for number in range(min(texts, len(unpacked.train.rows))):
        show(f"\n[{number}]")
        _show_row(unpacked, number)


def _show_row(records: Records, number: int) -> None:
    """Print the texts of a row, with what is trained on in color."""
    row = records.train.rows[number]
    for segment in range(1, 1 + int(row["segment_ids"].max())):
        inside = row["segment_ids"] == segment
        tokens = np.concatenate([row["tokens"][inside][:1], row["targets"][inside]])
        trained = np.concatenate([[False], row["weights"][inside] > 0])
        pieces = list(_split_pieces(records.tokenizer, tokens, trained))
        if sys.stdout.isatty():
            _print_colors(pieces)
        else:
            show("".join(f"⟦{text}⟧" if is_trained else text for text, is_trained in pieces).rstrip())


def _split_pieces(
    tokenizer: Tokenizer, tokens: Int[np.ndarray, "tokens"], trained: Bool[np.ndarray, "tokens"]
) -> Iterator[tuple[str, bool]]:
    """Yield the text of each run of tokens that are trained on, or are not, with special tokens spelled out."""
    spellings = {token: spelling for spelling, token in tokenizer.special_tokens.items()}
    bounds = [0, *(1 + np.flatnonzero(trained[1:] != trained[:-1])), len(tokens)]
    for start, stop in itertools.pairwise(bounds):
        text = ""
        plain: list[int] = []
        for token in tokens[start:stop].tolist():
            if token in spellings:
                text += tokenizer.decode(plain) + spellings[token]
                plain = []
            else:
                plain.append(token)
        yield text + tokenizer.decode(plain), bool(trained[start])


def _print_colors(pieces: Sequence[tuple[str, bool]]) -> None:
    from rich.console import Console
    from rich.text import Text

    text = Text()
    for piece, is_trained in pieces:
        text.append(escape_controls(piece, keep="\n\t"), style="bold green" if is_trained else "dim")
    Console().print(text)


def _verify(directories: Sequence[Path]) -> None:
    """Read all of the cached tokens, and print a line for each cache. Exits with status 1 if one is damaged."""
    if not directories:
        folders = [user_cache_folder() / name for name in ("text", "records")]
        directories = [path.parent for folder in folders for path in sorted(folder.glob("*/about.json"))]
    if not directories:
        show(f"no cached tokens in {user_cache_folder()}")
    damaged = 0
    for directory in directories:
        try:
            verify_cache(directory)
        except ValueError as fault:
            damaged += 1
            show(f"damaged  {directory}: {fault}; delete it, and it is made again")
        else:
            show(f"ok       {directory}")
    if damaged:
        sys.exit(1)

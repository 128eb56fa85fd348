"""Implement `zoo convert`."""

from collections.abc import Collection
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Literal

import jax
import tyro

import zoo
from zoo._files import copy_file
from zoo._terminal import escape_controls, format_bytes, show
from zoo.parallel.devices import use_cpu
from zoo.weights.directory import CONFIG_NAME, resolve_directory
from zoo.weights.safetensors import PICKLE_SUFFIXES, SAFE_WEIGHTS_INDEX_NAME
from zoo.weights.sentence_files import list_saved_files
from zoo.weights.tokenizer_files import TOKENIZER_FILES, leaves_directory

from .parts import list_weight_files

_COPIED_FILE_PATTERNS = (
    *TOKENIZER_FILES,
    *("LICENSE*", "README.md"),
)
"""Files of a checkpoint without weights that are copied: tokenizer, chat template, license."""


def convert(
    directory: Annotated[Path, tyro.conf.Positional],
    out: Annotated[Path, tyro.conf.Positional],
    *,
    dtype: Literal["float32", "bfloat16", "float16"] | None = None,
    shard_bytes: float = 5e9,
    overwrite: bool = False,
) -> None:
    """Convert a checkpoint to another dtype or shard size.

    Loads the model with zoo.load and saves it with zoo.save. Tensors that the model does not use, such as vision towers
    or modules of multi-token prediction, are written as they are stored. Copies tokenizer, chat template,
    generation_config.json, license and README.md. Skips pickled files, files of unknown kinds, and links that leave the
    directory, except into the cache of the Hugging Face hub that it belongs to; lists skipped files at the end.

    Args:
        directory: Checkpoint directory with config.json and safetensors, in one file or in shards, or a name on the
            Hugging Face hub, with @REVISION behind it for another than the newest.
        out: Output directory, created if missing.
        dtype: Dtype of all parameters. Default: as stored.
        shard_bytes: Maximum size of a shard in bytes. A larger tensor gets a shard of its own.
        overwrite: Write to a directory that is not empty. Replaces its weights and files of the same names.
    """
    source = resolve_directory(directory)
    _check_output_directory(source, out, overwrite)
    if shard_bytes < 1:
        raise ValueError(f"--shard-bytes must be at least 1, not {shard_bytes:g}")
    use_cpu()
    model = zoo.load(source, dtype=dtype)
    is_new = not out.exists()
    try:
        zoo.save(model, out, shard_bytes=int(shard_bytes), source=source)
        written = {Path(file).parts[0] for file in list_saved_files(model.origin)}
        copied, skipped = _list_extra_files(source, written)
        for file in copied:
            copy_file(file, out / file.name)
    except BaseException:
        if is_new and out.is_dir() and not any(out.iterdir()):
            out.rmdir()
        raise
    parameters = sum(x.size for x in jax.tree.leaves(model))
    show(f"read      {parameters:,} parameters from {source}")
    for file in [*list_weight_files(out), out / CONFIG_NAME]:
        show(f"wrote     {file} ({format_bytes(file.stat().st_size)})")
    if copied:
        show(f"copied    {', '.join(escape_controls(file.name) for file in copied)}")
    if skipped:
        show(f"skipped   {', '.join(map(escape_controls, skipped))}")


def _check_output_directory(source: Path, out: Path, overwrite: bool) -> None:
    """**Raises** `ValueError` for a file, the checkpoint itself, and, without `overwrite`, a non-empty directory."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file: pass an output directory")
    if out.exists() and out.samefile(source):
        raise ValueError(f"{out} is the checkpoint itself: pass another output directory")
    if not overwrite and out.exists() and any(out.iterdir()):
        raise ValueError(f"{out} is not empty: pass another output directory, or --overwrite")


def _list_extra_files(source: Path, written: Collection[str]) -> tuple[list[Path], list[str]]:
    """Return the files to copy, and the names of the files to skip, with the reason. Omits hidden files and the
    `written` ones."""
    weights = {file.name for file in list_weight_files(source)} | {CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME, *written}
    copied = []
    skipped = []
    for path in sorted(source.iterdir()):
        if path.name.startswith(".") or path.name in weights:
            continue
        if path.is_dir():
            skipped.append(f"{path.name} (directory)")
        elif not path.is_file():
            skipped.append(f"{path.name} (not a file)")
        elif path.suffix in PICKLE_SUFFIXES:
            skipped.append(f"{path.name} (pickled)")
        elif path.suffix == ".safetensors":
            skipped.append(f"{path.name} (not a shard of this checkpoint)")
        elif not any(fnmatchcase(path.name, pattern) for pattern in _COPIED_FILE_PATTERNS):
            skipped.append(f"{path.name} (unknown kind)")
        elif leaves_directory(path, source):
            skipped.append(f"{path.name} (link that leaves the directory)")
        else:
            copied.append(path)
    return copied, skipped

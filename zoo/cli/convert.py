"""`zoo convert`."""

import shutil
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Literal

import jax
import tyro

import zoo
from zoo.weights.resolve import CONFIG_NAME, resolve_directory
from zoo.weights.safetensors import PICKLE_SUFFIXES, SAFE_WEIGHTS_INDEX_NAME

from .devices import use_cpu
from .parts import list_weight_files
from .terminal import format_bytes

_COPIED_FILE_PATTERNS = (
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.model"),
    *("chat_template*", "generation_config.json", "LICENSE*", "README.md"),
)
"""Files that go with a checkpoint and hold no weights."""


def convert(
    directory: Annotated[Path, tyro.conf.Positional],
    out: Annotated[Path, tyro.conf.Positional],
    *,
    dtype: Literal["float32", "bfloat16", "float16"] | None = None,
    shard_bytes: float = 5e9,
    overwrite: bool = False,
) -> None:
    """Write a checkpoint anew: in another dtype, in larger or smaller shards.

    The model is read and written as zoo.load and zoo.save do, so that what is written is what was understood.
    Tokenizer, chat template, generation_config.json, license and README.md are copied. No file that is pickled or of
    a kind that we do not know is taken along; all of them are named at the end.

    Args:
        directory: Holds config.json and safetensors, in one file or in shards.
        out: Where to write; it is made where it is not there.
        dtype: Of all parameters; as they are stored unless given.
        shard_bytes: Bytes in a file of tensors at most, unless one tensor alone is larger.
        overwrite: Write even if something lies in `out`: files of the same names and other weights are replaced.
    """
    source = resolve_directory(directory)
    _check_output_directory(source, out, overwrite)
    if shard_bytes < 1:
        raise ValueError(f"--shard-bytes is at least 1, not {shard_bytes:g}")
    use_cpu()
    model = zoo.load(source, dtype=dtype)
    made = not out.exists()
    try:
        zoo.save(model, out, shard_bytes=int(shard_bytes))
        copied, left = _list_extra_files(source)
        for file in copied:
            shutil.copyfile(file, out / file.name)
    except BaseException:
        _remove_partial_files(out, made)
        raise
    numbers = sum(x.size for x in jax.tree.leaves(model))
    print(f"read      {numbers:,} parameters from {source}")
    for file in [*list_weight_files(out), out / CONFIG_NAME]:
        print(f"wrote     {file} ({format_bytes(file.stat().st_size)})")
    if copied:
        print(f"copied    {', '.join(file.name for file in copied)}")
    if left:
        print(f"left out  {', '.join(left)}")


def _check_output_directory(source: Path, out: Path, overwrite: bool) -> None:
    """**Raises** `ValueError` for a place that must not be written to, or not without being told."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file: name a directory to write to")
    if out.exists() and out.samefile(source):
        raise ValueError(f"{out} is the checkpoint itself: name another directory to write to")
    if not overwrite and out.exists() and any(out.iterdir()):
        raise ValueError(f"{out} holds files already: name an empty directory, or say --overwrite")


def _list_extra_files(source: Path) -> tuple[list[Path], list[str]]:
    """What is copied, and what is not, with the reason. Hidden files are passed over."""
    weights = {file.name for file in list_weight_files(source)} | {CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME}
    copied, left = [], []
    for path in sorted(source.iterdir()):
        if path.name.startswith(".") or path.name in weights:
            continue
        if path.is_dir():
            left.append(f"{path.name} (a folder)")
        elif path.suffix in PICKLE_SUFFIXES:
            left.append(f"{path.name} (pickled)")
        elif path.suffix == ".safetensors":
            left.append(f"{path.name} (no tensors of this checkpoint)")
        elif any(fnmatchcase(path.name, pattern) for pattern in _COPIED_FILE_PATTERNS):
            copied.append(path)
        else:
            left.append(f"{path.name} (of an unknown kind)")
    return copied, left


def _remove_partial_files(out: Path, created: bool) -> None:
    """Remove what was half written."""
    for pattern in ("model*.partial", f"{CONFIG_NAME}.partial"):
        for file in out.glob(pattern):
            file.unlink()
    if created and out.is_dir() and not any(out.iterdir()):
        out.rmdir()

"""`zoo convert`."""

import shutil
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Literal

import jax
import tyro

import zoo
from zoo.weights.directory import CONFIG, INDEX, PICKLED, find

from .devices import on_the_host
from .parts import weight_files
from .terminal import size

BESIDE = (
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
    Tokenizer, chat template, generation_config.json, licence and README.md are copied. No file that is pickled or of
    a kind that we do not know is taken along; all of them are named at the end.

    Args:
        directory: Holds config.json and safetensors, in one file or in shards.
        out: Where to write; it is made where it is not there.
        dtype: Of all parameters; as they are stored unless given.
        shard_bytes: Bytes in a file of tensors at most, unless one tensor alone is larger.
        overwrite: Write even if something lies in `out`: files of the same names and other weights are replaced.
    """
    source = find(directory)
    refuse(source, out, overwrite)
    if shard_bytes < 1:
        raise ValueError(f"--shard-bytes is at least 1, not {shard_bytes:g}")
    on_the_host()
    model = zoo.load(source, dtype=dtype)
    made = not out.exists()
    try:
        zoo.save(model, out, shard_bytes=int(shard_bytes))
        copied, left = beside(source)
        for file in copied:
            shutil.copyfile(file, out / file.name)
    except BaseException:
        clear(out, made)
        raise
    numbers = sum(x.size for x in jax.tree.leaves(model))
    print(f"read      {numbers:,} parameters from {source}")
    for file in [*weight_files(out), out / CONFIG]:
        print(f"wrote     {file} ({size(file.stat().st_size)})")
    if copied:
        print(f"copied    {', '.join(file.name for file in copied)}")
    if left:
        print(f"left out  {', '.join(left)}")


def refuse(source: Path, out: Path, overwrite: bool) -> None:
    """**Raises** `ValueError` for a place that must not be written to, or not without being told."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file: name a directory to write to")
    if out.exists() and out.samefile(source):
        raise ValueError(f"{out} is the checkpoint itself: name another directory to write to")
    if not overwrite and out.exists() and any(out.iterdir()):
        raise ValueError(f"{out} holds files already: name an empty directory, or say --overwrite")


def beside(source: Path) -> tuple[list[Path], list[str]]:
    """What is copied, and what is not, with the reason. Hidden files are passed over."""
    weights = {file.name for file in weight_files(source)} | {CONFIG, INDEX}
    copied, left = [], []
    for path in sorted(source.iterdir()):
        if path.name.startswith(".") or path.name in weights:
            continue
        if path.is_dir():
            left.append(f"{path.name} (a folder)")
        elif path.suffix in PICKLED:
            left.append(f"{path.name} (pickled)")
        elif path.suffix == ".safetensors":
            left.append(f"{path.name} (no tensors of this checkpoint)")
        elif any(fnmatchcase(path.name, pattern) for pattern in BESIDE):
            copied.append(path)
        else:
            left.append(f"{path.name} (of an unknown kind)")
    return copied, left


def clear(out: Path, made: bool) -> None:
    """Remove what was half written."""
    for pattern in ("model*.partial", f"{CONFIG}.partial"):
        for file in out.glob(pattern):
            file.unlink()
    if made and out.is_dir() and not any(out.iterdir()):
        out.rmdir()

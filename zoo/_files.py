"""Write files so that none is followed, torn or lost, and read JSON of unknown origin within limits.

A file is created under a random name that did not exist, and renamed once it is complete. A link that lies at its place
is replaced, never followed. A directory that is a link is the caller's own choice, and is used.
"""

import contextlib
import dataclasses
import json
import os
import secrets
import shutil
import stat
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

JSON_BYTES = 100_000_000
"""Largest JSON file that is read. The largest tokenizers and indexes of shards take a third of it."""
_JSON_DEPTH = 100  # the C parser recurses, and so do all that write the value again


@contextlib.contextmanager
def create_files(directory: Path) -> Iterator[Callable[[str], BinaryIO]]:
    """Create files that take their names together, once all of them are complete and on the disk.

    `with create_files(directory) as create: create("a.json").write(...)`. A file of the same name, or a link, is
    replaced. If the block raises, nothing is left behind, and what was there before is unchanged.
    """
    created: dict[str, tuple[Path, BinaryIO]] = {}

    def create(name: str) -> BinaryIO:
        part = directory / f"{name}.{secrets.token_hex(8)}.part"
        try:
            file = part.open("xb")
        except OSError as error:
            error.filename = str(directory / name)  # rather than a random name
            raise
        created[name] = part, file
        return file

    try:
        yield create
        for _, file in created.values():
            file.flush()
            os.fsync(file.fileno())
            file.close()
        for name, (part, _) in created.items():
            os.replace(part, directory / name)
    except BaseException:
        for part, file in created.values():
            with contextlib.suppress(OSError):  # a full disk fails again when the rest of the buffer is flushed
                file.close()
            part.unlink(missing_ok=True)
        raise


def user_cache_folder() -> Path:
    """Return `equizoo` in the user's cache folder: `XDG_CACHE_HOME`, or `~/Library/Caches` on macOS and `~/.cache`.

    **Raises** `OSError` for a user without a home.
    """
    if given := os.environ.get("XDG_CACHE_HOME"):
        return Path(given) / "equizoo"
    try:
        home = Path.home()
    except RuntimeError:
        raise OSError("there is no home to keep a cache in: set XDG_CACHE_HOME to a folder") from None
    if sys.platform == "darwin":
        return home / "Library" / "Caches" / "equizoo"
    return home / ".cache" / "equizoo"


def open_to_append(path: Path) -> BinaryIO:
    """Open a file to append to it, created if missing. **Raises** `OSError` if it is a link."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_NOFOLLOW", 0)
    return os.fdopen(os.open(path, flags, 0o666), "ab")


def write_text(path: Path, text: str) -> None:
    """Write `text` to `path` atomically: a concurrent reader sees the old file or the new one, never a partial one."""
    with create_files(path.parent) as create:
        create(path.name).write(text.encode(errors="backslashreplace"))


def write_json(path: Path, value: object) -> None:
    """Write `value` to `path` as JSON, atomically, converted by `to_jsonable`."""
    write_text(path, json.dumps(to_jsonable(value), indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def copy_file(source: Path, target: Path) -> None:
    """Copy a regular file to `target`, atomically. **Raises** as `open_regular` does."""
    with open_regular(source) as file, create_files(target.parent) as create:
        shutil.copyfileobj(file, create(target.name))


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading, through links too. Never waits for the writer of a pipe.

    **Raises** `ValueError` for a directory, a pipe, a socket or a device; `OSError` for a file that cannot be opened.
    """
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise ValueError(f"{path} is a {_FILE_TYPES.get(stat.S_IFMT(mode), 'socket')}: expected a file")
    return os.fdopen(descriptor, "rb")


_FILE_TYPES = {stat.S_IFDIR: "directory", stat.S_IFIFO: "pipe", stat.S_IFCHR: "device", stat.S_IFBLK: "device"}


def explain_wrong_folder(folder: Path, config: str = "config.json") -> str:
    """Return what a folder is, and where to look, if it holds no model, or, with `config="adapter_config.json"`, no
    adapter; "" if it may hold one."""
    part, noun = {"config.json": ("export", "a model"), "adapter_config.json": ("adapter", "an adapter")}[config]
    names = ("config.json", "adapter_config.json", "env.json", "metrics.jsonl", "export", "adapter")
    names += ("model.safetensors", "model.safetensors.index.json")
    held = {name for name in names if os.path.exists(folder / name)}
    is_run = bool(held & {"env.json", "metrics.jsonl"})
    # A run's own config.json has its flags. Weights beside it are of a model that was saved over them.
    has_flags = is_run and config == "config.json" and not any(name.startswith("model.") for name in held)
    if config in held and not has_flags:
        return ""
    if is_run and part in held:
        return f"{folder} is a run's folder: its {noun.split()[1]} is in {folder / part}"
    if is_run:
        return f"{folder} is a run's folder, and has no {part}/ with {noun}"
    if "adapter_config.json" in held:
        return (
            f"{folder} is an adapter and not a model: load its base, then zoo.adapters.load(base, {str(folder)!r}), or "
            f"pass --adapter {folder} where a command has it"
        )
    if "config.json" in held:
        return f"{folder} is a model and not an adapter: it has no {config}"
    found = min(folder.glob(f"*/{part}/{config}"), default=None)
    advice = "" if found is None else f"; did you mean {found.parent}?"
    return f"{folder} has no {config}, which {noun} has{advice}"


def walk_files(root: Path, excluded: Iterable[str] = ()) -> Iterator[Path]:
    """Yield every file below `root` except hidden files and `excluded` folders. Links to folders are not followed."""
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in excluded]
        yield from (Path(folder) / name for name in files if not name.startswith("."))


def read_limited(path: Path, limit: int) -> bytes:
    """Read a file of at most `limit` bytes. **Raises** `ValueError` for a larger one, and as `open_regular` does."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise ValueError(f"{path} has {size:,} bytes: expected at most {limit:,}")
        return file.read(limit)


def read_json(path: Path, *, limit: int = JSON_BYTES) -> Any:
    """Read a JSON file of at most `limit` bytes.

    **Raises** `ValueError` with the file's name for one that is damaged, too large or too deeply nested, or no regular
    file; `OSError` for one that cannot be opened.
    """
    content = read_limited(path, limit)
    try:
        return parse_json(content)
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from None


def parse_json(
    content: bytes,
    make_object: Callable[[list[tuple[str, Any]]], Any] | None = None,
    make_constant: Callable[[str], Any] | None = None,
) -> Any:
    """Parse JSON, in UTF-8. `make_object` builds an object from its names and values, a dict by default.

    `make_constant` gets the names NaN, Infinity and -Infinity, which JSON does not have; by default they are floats.

    **Raises** `ValueError` for a damaged or too deeply nested text.
    """
    try:
        value = json.loads(content.decode(), object_pairs_hook=make_object, parse_constant=make_constant)
        # No value is deeper than it has brackets.
        is_deep = content.count(b"[") + content.count(b"{") > _JSON_DEPTH and _measure_depth(value) > _JSON_DEPTH
    except RecursionError:
        is_deep = True
    if is_deep:
        raise ValueError(f"values are nested more than {_JSON_DEPTH} deep")
    return value


def _measure_depth(value: Any) -> int:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return 1 + max(map(_measure_depth, value), default=0)
    return 0


def to_jsonable(value: object) -> Any:
    """Convert `value` to JSON types: tuples to lists, dataclasses to objects, NaN, infinity and others to strings."""
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return str(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): to_jsonable(item) for key, item in value.items()}
    if isinstance(value, set | frozenset):
        value = sorted(value, key=str)
    if isinstance(value, list | tuple):
        return [to_jsonable(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_jsonable(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return str(value)

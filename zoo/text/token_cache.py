"""The cache of a corpus's tokens. It gets its name once it is complete and on disk, and is verified when opened.

Opening reads the sizes of its files and the first and last MiB of each; `verify_cache` reads all of them.
"""

import contextlib
import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock

from zoo._files import read_json, write_json

_log = logging.getLogger("zoo")

_ABOUT_FILE = "about.json"
_EDGE_BYTES = 2**20


def open_cache(directory: Path, write: Callable[[Path], dict[str, Any]]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the metadata of a cached directory, and the digest of each of its files.

    `write(directory)` writes the files and returns the metadata. It is called if the cache is missing; of several
    processes on one file system one writes, and the others wait. A damaged cache, with other sizes or digests than were
    written, is rebuilt with a warning.

    **Raises** `OSError` for a cache that is missing or damaged, in a folder that cannot be written.
    """
    if not directory.exists():
        _make_writable(directory.parent)
        lock = directory.parent / f".lock-{directory.name}"
        try:
            with FileLock(lock):
                if not directory.exists():
                    _write_atomically(directory, write)
        finally:
            lock.unlink(missing_ok=True)
    try:
        return _read_verified(directory)
    except ValueError as damage:
        _log.warning("%s: the cache is damaged, %s: it is written again", directory, damage)
    _write_atomically(directory, write)
    return _read_verified(directory)


def choose_token_dtype(vocab: int) -> type[np.unsignedinteger]:
    """Return the smallest dtype that holds the tokens of a vocabulary."""
    if vocab <= 2**8:
        return np.uint8
    if vocab <= 2**16:
        return np.uint16
    return np.uint32


def verify_cache(directory: Path) -> dict[str, Any]:
    """Read all of a cached directory; return its metadata. **Raises** `ValueError` with the first fault."""
    metadata, digests = _read_verified(directory)
    for name, digest in digests.items():
        if _digest_file(directory / name) != digest:
            raise ValueError(f"the digest of {name} differs from the digest that was written")
    return metadata


def _read_verified(directory: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """**Raises** `ValueError` with the first fault."""
    try:
        about = read_json(directory / _ABOUT_FILE)
        files = about["files"]
        metadata = about["metadata"]
        is_damaged = about["digest"] != _digest_json(files, metadata)
    except (OSError, ValueError, KeyError, TypeError):
        is_damaged = True
        files = {}
        metadata = {}
    if is_damaged:
        raise ValueError(f"{_ABOUT_FILE} is missing or not as it was written")
    for name, entry in files.items():
        try:
            size = (directory / name).stat().st_size
            edges = _digest_edges(directory / name)
        except OSError as error:
            raise ValueError(f"{name} cannot be read ({error.strerror})") from None
        if size != entry["bytes"]:
            raise ValueError(f"{name} has {size:,} bytes instead of {entry['bytes']:,}")
        if edges != entry["edges"]:
            raise ValueError(f"the digest of {name} differs from the digest that was written")
    return metadata, {name: entry["digest"] for name, entry in files.items()}


def _make_writable(folder: Path) -> None:
    """Make a folder, if need be, and try to write into it. **Raises** `OSError` if that is impossible."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise OSError(
            f"{folder} cannot hold a cache ({error.strerror}): set XDG_CACHE_HOME to a folder that can, or pass cache="
        ) from error


def _write_atomically(directory: Path, write: Callable[[Path], dict[str, Any]]) -> None:
    """Write into a temporary directory, sync its files and then itself, and rename it."""
    _make_writable(directory.parent)
    part = Path(tempfile.mkdtemp(prefix=".part-", dir=directory.parent))
    try:
        metadata = write(part)
        paths = sorted(part.iterdir())
        for path in paths:
            _sync(path)
        files = {path.name: _describe_file(path) for path in paths}
        digest = _digest_json(files, metadata)
        write_json(part / _ABOUT_FILE, {"files": files, "metadata": metadata, "digest": digest})
        part.chmod(0o755)
        _sync(part)
        _rename(part, directory)
        _sync(directory.parent)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _rename(part: Path, directory: Path) -> None:
    """Rename `part` to `directory`. A damaged directory of that name is replaced; a whole one, of another process,
    stays."""
    try:
        part.rename(directory)
    except OSError:
        with contextlib.suppress(ValueError):
            _read_verified(directory)
            return
        # Processes that have mapped its files keep them: only their names go.
        damaged = Path(tempfile.mkdtemp(prefix=".part-", dir=directory.parent))
        with contextlib.suppress(FileNotFoundError):
            directory.rename(damaged / directory.name)
        part.rename(directory)
        shutil.rmtree(damaged, ignore_errors=True)


def _sync(path: Path) -> None:
    """Wait until a file or a directory is on the disk. Does nothing for a directory on systems that cannot sync one."""
    ignored = (OSError,) if path.is_dir() else ()
    with contextlib.suppress(*ignored):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _describe_file(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "digest": _digest_file(path), "edges": _digest_edges(path)}


def _digest_edges(path: Path) -> str:
    """Return the digest of the first and the last MiB of a file, between which a large one is not read."""
    with path.open("rb") as file:
        first = file.read(_EDGE_BYTES)
        end = file.seek(0, os.SEEK_END)
        file.seek(max(end - _EDGE_BYTES, len(first)))
        return _blake2b(first + file.read()).hexdigest()


def _digest_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, _blake2b).hexdigest()


def _digest_json(*values: Any) -> str:
    return _blake2b(json.dumps(values, sort_keys=True).encode()).hexdigest()


def _blake2b(content: bytes = b"") -> Any:
    return hashlib.blake2b(content, digest_size=16)

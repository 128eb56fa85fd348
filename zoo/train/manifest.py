"""List of a checkpoint's files, with sizes and SHA-256 digests, to find damage before anything is restored.

    {"files": {"state/d/1f2e": {"bytes": 13000, "sha256": "9c56..."}, ...}, "metric": 2.31, "sha256": "47a0..."}

The last entry is the digest of the others, so the list checks itself. Earlier versions wrote only `{name: bytes}`.
"""

import concurrent.futures
import hashlib
import json
from pathlib import Path
from typing import Any, NamedTuple

from zoo._files import read_json, write_json

MANIFEST_FILE = "files.json"
_HASHING_THREADS = 8


class Manifest(NamedTuple):
    """The files of a checkpoint, and the metric that ranks it."""

    sizes: dict[str, int]
    digests: dict[str, str]
    """SHA-256 by file; empty for a checkpoint of an earlier version."""
    metric: float | None = None


def write_manifest(folder: Path, metric: float | None = None) -> None:
    """Write the manifest of `folder`: all files in its subfolders.

    Files of `folder` itself are Orbax's notes on when it was written, which are never read.
    """
    paths = sorted(path for path in folder.glob("*/**/*") if path.is_file())
    with concurrent.futures.ThreadPoolExecutor(_HASHING_THREADS) as pool:
        digests = pool.map(_hash_file, paths)
        files = {
            path.relative_to(folder).as_posix(): dict(bytes=path.stat().st_size, sha256=digest)
            for path, digest in zip(paths, digests, strict=True)
        }
    content = dict(files=files, metric=metric)
    write_json(folder / MANIFEST_FILE, content | dict(sha256=_hash_json(content)))


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a checkpoint. **Raises** `ValueError`, or `OSError`, if it is missing or damaged."""
    content = read_json(folder / MANIFEST_FILE)
    if not isinstance(content, dict):
        raise ValueError("not an object")
    if content and all(type(size) is int for size in content.values()):
        return Manifest(sizes=content, digests={})
    if content.pop("sha256", None) != _hash_json(content):
        raise ValueError("its own digest differs")
    files = content["files"]
    sizes, digests = ({name: file[entry] for name, file in files.items()} for entry in ("bytes", "sha256"))
    return Manifest(sizes, digests, content["metric"])


def find_damage(folder: Path, *, by_digest: bool = True) -> str | None:
    """Compare the files of a checkpoint with its manifest; return the first difference in words, or None.

    Without `by_digest`, compares only names and sizes, and reads no file.
    """
    try:
        manifest = read_manifest(folder)
    except (OSError, ValueError, RecursionError) as error:
        return f"its list of files ({MANIFEST_FILE}) is missing or damaged ({str(error).splitlines()[0]})"
    for name, size in manifest.sizes.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes instead of {size}"
    if not by_digest:
        return None
    with concurrent.futures.ThreadPoolExecutor(_HASHING_THREADS) as pool:
        try:
            found = list(pool.map(lambda name: _hash_file(folder / name), manifest.digests))
        except OSError as error:
            return f"a file cannot be read ({error})"
    for (name, digest), other in zip(manifest.digests.items(), found, strict=True):
        if digest != other:
            return f"the bytes of {name} have changed (SHA-256 {other[:12]} instead of {digest[:12]})"
    return None


def _hash_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _hash_json(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

"""Files of object stores, by URL: copied once into the user's cache folder, then read as local files.

fsspec has the file systems: `s3://` needs the package s3fs, `gs://` gcsfs, `az://` adlfs; the extra `cloud` has the
first two. These packages look for credentials in the environment and in the files of the store's own tools.
"""

import hashlib
import json
import logging
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

from filelock import FileLock

from zoo._files import user_cache_folder
from zoo._optional import import_optional

_log = logging.getLogger("zoo")

_URL = re.compile(r"([a-z][a-z0-9]+):/+(.+)", re.DOTALL)
_PACKAGES = {
    **dict.fromkeys(("s3", "s3a"), "s3fs"),
    **dict.fromkeys(("gs", "gcs"), "gcsfs"),
    **dict.fromkeys(("az", "abfs", "adl"), "adlfs"),
}
_STAMPS = ("size", "ETag", "etag", "md5Hash", "mtime", "LastModified", "last_modified", "updated", "created")
"""Fields of the description of an object that change with its bytes."""


def is_url(source: str | Path) -> bool:
    """Return True for `s3://bucket/folder` and the like; a `Path` of it, which has one slash less, is one too."""
    return _URL.fullmatch(str(source)) is not None


def download(source: str | Path) -> Path:
    """Copy the file, the folder or the matches of the pattern that a URL names; return the local file or folder.

    A copy is kept under a hash of the URL and of what the store says of its files, sizes and ETags among them: what has
    changed is copied anew, with all other files of its URL.

    **Raises** `FileNotFoundError` if nothing is there, `ImportError` without the package of the file system, and
    `ValueError` for an unknown file system, a name that leaves its folder and a file that changes meanwhile.
    """
    store, path = _open_store(str(source))
    store.invalidate_cache()  # of listings, which s3fs and gcsfs keep
    files, is_file = _list_objects(store, path)
    if not files:
        raise FileNotFoundError(f"{source}: no such file or folder, or nothing in it")
    about = json.dumps([store.unstrip_protocol(path), files], sort_keys=True)
    folder = hashlib.blake2b(about.encode(), digest_size=12).hexdigest()
    target = user_cache_folder() / "remote" / folder
    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(target.parent / f".lock-{folder}"):
        if not target.exists():
            size = sum(info["size"] or 0 for info in files.values())
            _log.info("%s: copying %d files, %s bytes, to %s", source, len(files), f"{size:,}", target)
            _copy_objects(store, files, target)
    return target / next(iter(files.values()))["relative"] if is_file else target


def _list_objects(store: Any, path: str) -> tuple[dict[str, dict[str, Any]], bool]:
    """Return what the store says of each file, with its name below the path, and whether the path is a file."""
    magic = re.search(r"[*\[]", path)  # a question mark begins the query of an HTTP URL
    is_file = magic is None and store.isfile(path)
    if is_file:
        found = {path: store.info(path)}
    elif magic is not None:
        found = store.glob(path, detail=True)
    else:
        found = store.find(path, detail=True)
    files = {name: info for name, info in sorted(found.items()) if info["type"] == "file" and not name.endswith("/")}
    root = path.rstrip("/")
    if is_file:
        root = path.rpartition("/")[0]
    elif magic is not None:
        root = path[: magic.start()].rpartition("/")[0]
    listed = {}
    for name, info in files.items():
        relative = name.removeprefix(root).lstrip("/")
        if ".." in Path(relative).parts:
            raise ValueError(f"{name}: a name with .. leaves its folder")
        listed[name] = {"relative": relative, "size": info.get("size"), "stamp": [str(info.get(x)) for x in _STAMPS]}
    return listed, is_file


def _copy_objects(store: Any, files: dict[str, dict[str, Any]], target: Path) -> None:
    """Copy into a temporary folder, and rename it once all files are whole."""
    part = Path(tempfile.mkdtemp(prefix=".part-", dir=target.parent))
    try:
        paths = [part / info["relative"] for info in files.values()]
        for path in paths:
            path.parent.mkdir(parents=True, exist_ok=True)
        store.get(list(files), [str(path) for path in paths])
        for path, (name, info) in zip(paths, files.items(), strict=True):
            if info["size"] is not None and path.stat().st_size != info["size"]:
                raise ValueError(f"{name} changed while it was copied: let nothing write to it, and try again")
        os.rename(part, target)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _open_store(url: str) -> tuple[Any, str]:
    """Return the file system of a URL, and the path in it."""
    scheme, _, rest = re.sub("^([a-z0-9]+):/+", r"\1://", url).partition("://")
    fsspec = import_optional("fsspec.core", "pip install 'equizoo[cloud]'")
    package = _PACKAGES.get(scheme)
    try:
        return fsspec.url_to_fs(f"{scheme}://{rest}")
    except ImportError as error:
        advice = f"pip install {package}" if package else str(error)
        raise ImportError(f"{url}: the package that reads {scheme}:// is missing: {advice}") from error

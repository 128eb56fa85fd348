"""Persistent compilation cache of the recipes and the command line: a second start reads the programs of the first.

The cache is JAX's own (`jax_compilation_cache_dir`); this file decides where it is, who may write it, how large it
grows and what a user sees of its errors. Importing the library never turns it on.

JAX's key of an entry covers the program, the compiler's flags, jaxlib's version and the devices, with the instruction
sets of a CPU: machines of several kinds may share a home. Entries are the executables of a fresh compilation, so a
cached program computes the same numbers, bit for bit.
"""

import contextlib
import logging
import os
import re
import stat
import tempfile
import warnings
from pathlib import Path
from typing import Any

import jax

from ._files import user_cache_folder

VARIABLE = "ZOO_COMPILE_CACHE"
_OFF = ("off", "0", "false", "no")
_DEFAULT = ("", "on", "1", "true", "yes")
_MOST_BYTES = 2**30
_MOST_ENTRIES = 5000
_THRESHOLDS = {  # small programs too: before the first step there are twenty, and each takes longer than its entry
    "jax_persistent_cache_min_compile_time_secs": 0.0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
}
_WARNING = "Error (reading|writing) persistent compilation cache entry"
_PROBLEM = re.compile(_WARNING + r" for '(.*?)': ((\w+).*)", re.DOTALL)

_log = logging.getLogger("zoo")


def enable_compile_cache(*, exact_names: bool = False) -> None:
    """Turn on JAX's persistent compilation cache, in a folder that only this user can write.

    The folder is `equizoo/compiled` in the user's cache folder, or the one that the environment variable
    `ZOO_COMPILE_CACHE` names; "off" is none. A cache that the user has chosen or switched off in JAX's own settings
    (`JAX_COMPILATION_CACHE_DIR`, `JAX_ENABLE_COMPILATION_CACHE`) is left as it is.

    At most 1 GiB is kept, or `JAX_COMPILATION_CACHE_MAX_SIZE` bytes: the entries last used. They are counted here, once
    per process. JAX, given that size, would lock the folder for every program, and count all entries for each new one.

    - `exact_names`: a program whose scopes or source lines differ is another one, as traces of a profiler need it.

    A folder that cannot be written, that belongs to somebody else, or that others may write (an entry is a program that
    this process runs) is not used; one line is logged, and programs are compiled as without a cache.
    """
    settings: Any = jax.config
    choice, most_bytes = os.environ.get(VARIABLE, "").strip(), settings.jax_compilation_cache_max_size
    is_chosen = settings.jax_compilation_cache_dir is not None or not settings.jax_enable_compilation_cache
    if choice.lower() in _OFF or is_chosen or most_bytes == 0:
        return
    try:
        is_default = choice.lower() in _DEFAULT
        folder = user_cache_folder() / "compiled" if is_default else Path(choice).expanduser().absolute()
        _prepare(folder)
        _evict(folder, _MOST_BYTES if most_bytes < 0 else most_bytes)
    except (OSError, RuntimeError) as error:  # RuntimeError: no home
        reason = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.strerror else error
        _log.warning("compiled programs are not cached (%s): set %s to another folder, or to off", reason, VARIABLE)
        return
    for name, value in _THRESHOLDS.items():
        if name.upper() not in os.environ:
            settings.update(name, value)
    if exact_names:
        settings.update("jax_compilation_cache_include_metadata_in_key", True)
    settings.update("jax_compilation_cache_max_size", -1)
    settings.update("jax_compilation_cache_dir", str(folder))
    warnings.filterwarnings("always", _WARNING, UserWarning)
    warnings.showwarning = _ProblemFilter(folder, warnings.showwarning)


def _prepare(folder: Path) -> None:
    """Make the folder, if need be. **Raises** `OSError` if it is not one to keep this user's programs in."""
    folder.mkdir(mode=stat.S_IRWXU, parents=True, exist_ok=True)
    status = folder.stat()
    if hasattr(os, "getuid") and status.st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to another user")
    if os.name == "posix" and status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"others may write {folder}; chmod go-w forbids it")
    with tempfile.TemporaryFile(dir=folder, prefix="."):
        pass


def _evict(folder: Path, most_bytes: int) -> None:
    """Delete the entries whose last use is the longest ago, until the others are few and small enough."""
    entries = []
    with os.scandir(folder) as found:
        for entry in found:
            with contextlib.suppress(FileNotFoundError):  # another process evicts, too
                if entry.name.endswith("-cache"):
                    status = entry.stat()
                    entries.append((max(status.st_atime_ns, status.st_mtime_ns), status.st_size, entry.path))
    total = 0
    for number, (_, size, path) in enumerate(sorted(entries, reverse=True), start=1):
        total += size
        if total > most_bytes or number > _MOST_ENTRIES:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)


class _ProblemFilter:
    """Replacement of `warnings.showwarning` that makes one line of all of JAX's warnings about the cache.

    JAX compiles for itself what it cannot read. It writes no entry where there is one, so a damaged one is deleted,
    with those of programs of the same name.
    """

    def __init__(self, folder: Path, show: Any):
        self._folder = folder
        self._show = show
        self._is_reported = False

    def __call__(self, message: Any, *arguments: Any, **options: Any) -> None:
        found = _PROBLEM.match(str(message))
        if found is None:
            return self._show(message, *arguments, **options)
        action, program, reason, kind = found.groups()
        if action == "reading":
            if kind == "FileNotFoundError":  # evicted by another process
                return
            with contextlib.suppress(OSError):
                for path in self._folder.glob("*-cache"):
                    if path.name.startswith(f"{program}-"):
                        path.unlink(missing_ok=True)
        if not self._is_reported:
            self._is_reported = True
            fault, remedy = ("read", "it is compiled again") if action == "reading" else ("written", "the run goes on")
            reason = reason.splitlines()[0]
            _log.warning("%s: %s cannot be %s (%s); %s", self._folder, program, fault, reason, remedy)

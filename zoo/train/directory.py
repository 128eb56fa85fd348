"""The directory of a run: checked before data and model are made, then locked by one process."""

import contextlib
import datetime
import logging
import os
import socket
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from zoo._files import read_json

from .checkpoint_folder import CheckpointFolder, parse_url

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None

_log = logging.getLogger("zoo")

_LOCK_FILE = "run.lock"
_PATIENCE = 0.5  # seconds
_RUN_FILES = ("checkpoints", "metrics.jsonl", "env.json")
_LOG_SUFFIXES = (".log", ".out", ".err")  # a scheduler's, which opens them before the run starts


class DirectoryLock:
    """Lock of a run's directory, which one `Run` at a time may hold, until it ends or its process dies.

    The lock is `flock` on the file `run.lock`, which names its holder. The kernel releases it with the process: a file
    left by a dead process locks nothing. On systems without `flock`, warns and locks nothing.
    """

    def __init__(self, directory: Path):
        self.directory = Path(directory)
        self._path = self.directory / _LOCK_FILE
        self._descriptor: int | None = None

    def acquire(self) -> None:
        """Lock the directory. **Raises** `BlockingIOError`, with process and host, if another one holds it."""
        if fcntl is None:
            _log.warning("%s cannot be locked on this system: start no second run in it", self.directory)
            return
        give_up = time.monotonic() + _PATIENCE  # processes of one run may check its directory at the same time
        while self._descriptor is None:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if self._is_current(descriptor):
                    self._descriptor = descriptor
                    descriptor = -1
            except BlockingIOError:
                if time.monotonic() < give_up:
                    time.sleep(0.02)
                    continue
                holder = os.read(descriptor, 200).decode(errors="replace").strip() or "another process"
                raise BlockingIOError(
                    f"{self.directory} is in use by {holder}: end that run, or choose another folder (--out)"
                ) from None
            except OSError as error:
                _log.warning("%s cannot be locked (%s): start no second run in it", self.directory, error.strerror)
                return
            finally:
                if descriptor >= 0:
                    os.close(descriptor)
        now = datetime.datetime.now(datetime.UTC)
        holder = f"process {os.getpid()} on {socket.gethostname()} since {now:%Y-%m-%d %H:%M:%S} UTC\n"
        try:
            os.ftruncate(self._descriptor, 0)
            os.write(self._descriptor, holder.encode())
        except OSError:  # a full disk: the lock holds all the same
            pass

    def release(self) -> None:
        """Unlock the directory, and delete the file."""
        if self._descriptor is not None:
            self._path.unlink(missing_ok=True)
            os.close(self._descriptor)
            self._descriptor = None

    def __del__(self):
        # A run that was made but never entered.
        descriptor = getattr(self, "_descriptor", None)
        if descriptor is not None:
            os.close(descriptor)

    def _is_current(self, descriptor: int) -> bool:
        """Return False if the file was deleted, by the release of another lock, after it was opened."""
        try:
            return os.path.samestat(os.fstat(descriptor), os.stat(self._path))
        except FileNotFoundError:
            return False


def claim_directory(lock: DirectoryLock, *, resume: bool | int = False, checkpoints: Path | str | None = None) -> None:
    """Make the directory of a run, if need be, try to write into it, and lock it.

    - `checkpoints`: their folder or URL, by default `checkpoints` in the directory.

    **Raises** `OSError` if that is impossible; `FileExistsError` if the directory holds other things, or, unless
    `resume`, checkpoints; `FileNotFoundError` if it holds checkpoints, but not of the step that `resume` names;
    `BlockingIOError` if another run is in it; `ValueError` for a run to resume whose checkpoints are at a URL that is
    not given.
    """
    directory = lock.directory
    _check_writable(directory)
    directory.mkdir(parents=True, exist_ok=True)
    names = sorted(path.name for path in directory.iterdir() if not _is_ignored(path))
    if names and not any(_holds_run(path) for path in (directory, *directory.iterdir())):
        shown = ", ".join(names[:3])
        if len(names) > 3:
            shown += ", ..."
        raise FileExistsError(f"{directory} holds other things than a run ({shown}): choose another folder (--out)")
    lock.acquire()
    try:
        if resume is not False and not isinstance(checkpoints, str):
            _require_url(directory)
        folder = CheckpointFolder(checkpoints or directory / "checkpoints")
        steps = folder.list_steps()
        if steps and resume is False:
            place = checkpoints if isinstance(checkpoints, str) else directory
            raise FileExistsError(
                f"{place} holds a run of {steps[-1]} steps: resume it (--resume), or choose another folder (--out), or "
                "delete this one"
            )
        if steps and not isinstance(resume, bool) and resume not in steps:
            folder.require_whole(resume)
    except (OSError, ValueError, ImportError):
        lock.release()
        raise


def check_directory(directory: Path, *, resume: bool | int = False, checkpoints: Path | str | None = None) -> None:
    """Raise the errors of `claim_directory`, and leave nothing behind.

    Makes no directory, so that several processes may check a new one at the same time: the write is tried in the
    nearest existing directory above it.
    """
    if os.path.isdir(directory):
        lock = DirectoryLock(directory)
        claim_directory(lock, resume=resume, checkpoints=checkpoints)
        lock.release()
    else:
        _check_writable(directory)
        if isinstance(checkpoints, str):
            parse_url(checkpoints)


def _require_url(directory: Path) -> None:
    """**Raises** `ValueError` if the run of `directory` keeps its checkpoints at a URL, without which it would
    restart."""
    try:
        config = read_json(directory / "config.json")
    except (OSError, ValueError):
        return  # none, or damaged, which is reported where its flags are read
    if isinstance(config, Mapping) and (url := config.get("checkpoint_url")) is not None:
        raise ValueError(f"{directory} keeps its checkpoints at a URL: resume it with --checkpoint-url {url}")


def _check_writable(directory: Path) -> None:
    """**Raises** `OSError` if no file can be made in `directory`, or in the nearest one above it that exists."""
    try:
        nearest = next(path for path in (directory, *directory.absolute().parents) if os.path.lexists(path))
        if not nearest.is_dir():
            kind = "a file" if nearest.exists() else "a link to nothing"
            raise NotADirectoryError(f"{nearest} is {kind}")
        with tempfile.TemporaryFile(dir=nearest, prefix=".") as probe:
            probe.write(b"\0")
            probe.flush()
        with contextlib.suppress(FileNotFoundError):
            os.lstat(directory)  # raises for a name that no file can have
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise OSError(f"{directory} cannot hold a run ({reason}): choose another folder (--out)") from error


def _is_ignored(path: Path) -> bool:
    # A config.json by itself may belong to a run, but an exported model has one, too.
    return path.suffix in _LOG_SUFFIXES or path.name.startswith(".") or path.name in ("config.json", _LOCK_FILE)


def _holds_run(directory: Path) -> bool:
    return any(os.path.exists(directory / name) for name in _RUN_FILES)

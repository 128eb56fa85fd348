"""The folder of a run's checkpoints, on a disk or in an object store: the steps it holds, and which of them are whole.

On a disk a checkpoint gets its name once all of it is written, and is whole if its files have the digests of its
manifest. A store, `gs://bucket/run`, renames nothing and keeps checksums of its own. A checkpoint there is whole once
it has the last object that Orbax writes, `commit_success.txt`. `file:///folder` takes the same steps as a store.
"""

import json
import logging
import re
import shutil
from pathlib import Path
from typing import Any

from zoo._files import JSON_BYTES, parse_json
from zoo._optional import import_optional

from .manifest import find_damage, read_manifest, write_manifest
from .progress import format_si

_log = logging.getLogger("zoo")

TRASH = "deleted"
"""Folder to which checkpoints are moved before they are deleted: a half-deleted one would look damaged."""
_UNFINISHED_SUFFIX = ".orbax-checkpoint-tmp"
_COMMIT_FILE = "commit_success.txt"  # Orbax's
_METRIC_FILE = "metric.json"  # in a store, which has no manifest


class CheckpointFolder:
    """One folder per step below `location`, a path or a URL. Warns of each damaged checkpoint once.

    Reads no arrays. With several processes, the first one calls these methods and tells the others.
    """

    def __init__(self, location: Path | str):
        self.in_store = "://" in str(location)
        self.path = _open_path(location)
        if self.in_store:
            self.location = str(location).rstrip("/")
        else:
            self.location = str(self.path)
        self._warned: set[str] = set()
        self._verified: set[int] = set()
        self._unreadable: dict[int, str] = {}

    def list_steps(self) -> list[int]:
        """List the steps that have a finished checkpoint, oldest first. It may be damaged."""
        return sorted(int(folder.name) for folder in self._list_folders() if self._is_finished(folder))

    def list_whole_steps(self) -> list[int]:
        """List the steps whose files have the right names and sizes, oldest first."""
        self._warn_of_unfinished()
        return [step for step in self.list_steps() if not self._find_damage(step)]

    def find_newest(self) -> int | None:
        """Return the newest step whose files all match their digests; None if there is no checkpoint at all.

        **Raises** `FileNotFoundError` if all are damaged.
        """
        self._warn_of_unfinished()
        damages = []
        for step in reversed(self.list_steps()):
            damage = self._find_damage(step, by_digest=True)
            if damage is None:
                return step
            damages.append(f"\n  {step}: {damage}")
        if damages:
            raise FileNotFoundError(
                f"{self.location}: no whole checkpoint here; all are damaged, and nothing was deleted:"
                + "".join(damages)
            )
        return None

    def require_whole(self, step: int) -> int:
        """Return `step` if all files of its checkpoint match their digests.

        **Raises** `FileNotFoundError`, with the available steps, if it is absent or damaged.
        """
        steps = self.list_steps()
        reason = ""
        if step in steps:
            damage = self._find_damage(step, by_digest=True)
            if not damage:
                return step
            reason = f", because {damage}"
        others = [other for other in steps if other != step] or "none"
        raise FileNotFoundError(f"{self.location}: no whole checkpoint of step {step} here{reason}; it holds {others}")

    def read_metadata(self, step: int) -> Any:
        """Read the JSON that was saved next to the arrays of a checkpoint."""
        path = self.path / str(step) / "about" / "metadata"
        content = path.read_bytes()
        if len(content) > JSON_BYTES:
            raise ValueError(f"{path} has {len(content):,} bytes: expected at most {JSON_BYTES:,}")
        return parse_json(content)

    def read_metric(self, step: int) -> float | None:
        """Read the metric that ranks a checkpoint; None if it has none, or if it is damaged."""
        folder = self.path / str(step)
        try:
            if self.in_store:
                return json.loads((folder / _METRIC_FILE).read_text())
            return read_manifest(folder).metric
        except (OSError, ValueError):
            return None

    def mark_unreadable(self, step: int, reason: str) -> None:
        """Count a checkpoint without digests as damaged, because reading it failed."""
        self._unreadable[step] = reason

    def has_digests(self, step: int) -> bool:
        """Return False in a store, and for a checkpoint of an earlier version, which lists the sizes of files only."""
        return not self.in_store and bool(read_manifest(self.path / str(step)).digests)

    def make_room(self, step: int, size: int) -> str | None:
        """Delete the checkpoint that a save of `step` replaces, and the unfinished files of earlier saves.

        Returns the reason if the disk has no room for `size` bytes; the checkpoint is not deleted then.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        self.delete_unfinished()
        if not self.in_store and shutil.disk_usage(self.path).free < size:
            return f"{self.location}: no room for the checkpoint of step {step}: {self.describe_room(size)}"
        self._verified.discard(step)
        self._unreadable.pop(step, None)
        if (self.path / str(step)).exists():
            self._delete(self.path / str(step))
        return None

    def describe_room(self, size: int) -> str:
        """Say how much room a checkpoint needs, how much there is, and which one is the newest."""
        whole = self.list_whole_steps()
        if whole:
            newest = f"the newest whole one is of step {whole[-1]}"
        else:
            newest = "there is none before it"
        if self.in_store:
            return newest
        free = shutil.disk_usage(self.path).free
        return f"its arrays take {format_si(size)}B, and {format_si(free)}B are free; {newest}"

    def delete_unfinished(self) -> None:
        """Delete the remains of interrupted saves and deletions."""
        self.empty_trash()
        for folder in self._list_unfinished():
            self._delete(folder)

    def empty_trash(self) -> None:
        """Delete the checkpoints that were moved to `TRASH`."""
        if not self.in_store:
            for path in (self.path / TRASH, *self.path.glob(f"*.{TRASH}")):  # earlier versions: `6.deleted`
                _remove(path)

    def finish(self, step: int, metric: float | None) -> None:
        """Add the manifest to a complete checkpoint, just before Orbax makes it count."""
        if self.in_store:
            (self.path / str(step) / _METRIC_FILE).write_text(json.dumps(metric))
            return
        for folder in self.path.glob(f"{step}{_UNFINISHED_SUFFIX}*"):
            write_manifest(folder, metric)

    def _list_folders(self) -> list[Any]:
        """List the folders that have a step for a name, finished or not."""
        if not self.path.is_dir():
            return []
        folders = [path for path in self.path.iterdir() if re.fullmatch("0|[1-9][0-9]*", path.name)]
        return [folder for folder in folders if folder.is_dir()]

    def _is_finished(self, folder: Any) -> bool:
        return not self.in_store or (folder / _COMMIT_FILE).exists()

    def _list_unfinished(self) -> list[Any]:
        if self.in_store:
            return [folder for folder in self._list_folders() if not self._is_finished(folder)]
        return sorted(self.path.glob(f"*{_UNFINISHED_SUFFIX}*"))

    def _find_damage(self, step: int, *, by_digest: bool = False) -> str | None:
        damage = self._unreadable.get(step) or self._compare_files(step, by_digest=by_digest)
        if damage:
            self._warn_once(f"{self.location}/{step}: passed over, {damage}")
        return damage

    def _compare_files(self, step: int, *, by_digest: bool) -> str | None:
        if self.in_store:
            return None
        verifies = by_digest and step not in self._verified
        damage = find_damage(self.path / str(step), by_digest=verifies)
        if verifies and damage is None:
            self._verified.add(step)
            if not self.has_digests(step):
                self._warn_once(
                    f"{self.location}/{step}: of an earlier version, without digests; only sizes were verified"
                )
        return damage

    def _delete(self, folder: Any) -> None:
        try:
            if self.in_store:
                (folder / _COMMIT_FILE).unlink(missing_ok=True)  # first: half of it must not be taken for a whole one
                folder.rmtree()
            else:
                trash = self.path / TRASH
                trash.mkdir(exist_ok=True)
                folder.rename(trash / folder.name)
                self.empty_trash()
        except OSError as error:
            self._warn_once(f"{folder}: cannot be deleted ({error.strerror or error})")

    def _warn_of_unfinished(self) -> None:
        for folder in self._list_unfinished():
            self._warn_once(f"{self.location}/{folder.name}: passed over, it was never finished")

    def _warn_once(self, text: str) -> None:
        if text not in self._warned:
            _log.warning("%s", text)
            self._warned.add(text)


def parse_url(url: str) -> Any:
    """Return the `etils.epath` path of a `gs://` or `file://` URL.

    **Raises** `ValueError` for another scheme, and `ImportError` without the package that reads the store.
    """
    found = re.fullmatch(r"(gs|file)://(.+?)/*", url)
    if found is None or (found[1] == "file" and not found[2].startswith("/")):
        advice = ""
        if url.startswith(("s3://", "az://")):
            advice = ". Orbax writes to Google's store only: mount the bucket, and give a path of the file system"
        raise ValueError(f"{url!r}: expected gs://BUCKET/FOLDER or file:///FOLDER{advice}")
    epath = import_optional("etils.epath", "pip install 'equizoo[train]'")
    if found[1] == "gs":
        import_optional("gcsfs", "pip install gcsfs")
        return epath.Path(url.rstrip("/"))
    return epath.Path(found[2])


def refuse_url(path: Path) -> None:
    """**Raises** `ValueError` for a URL that was taken for a path of the file system."""
    if re.match(r"[a-z][a-z0-9]+:/", str(path)):
        url = str(path).replace(":/", "://", 1)
        raise ValueError(
            f"{url} is a URL, and --out a folder of the file system: metrics and the report are written there. "
            f"Checkpoints can be elsewhere: --out runs/{path.name} --checkpoint-url {url}"
        )


def _open_path(location: Path | str) -> Any:
    if "://" in str(location):
        return parse_url(str(location))
    refuse_url(Path(location))
    return Path(location).absolute()


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)

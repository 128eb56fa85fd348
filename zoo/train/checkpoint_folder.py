"""The folder of a run's checkpoints: which are whole, which to keep, and room for another. It reads no arrays.

With several processes, the first one alone looks into the folder, and the others are told.
"""

import logging
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from zoo._files import read_json

from .manifest import find_damage, read_manifest, write_manifest
from .progress import format_si

_log = logging.getLogger("zoo")

_UNFINISHED_SUFFIX = ".orbax-checkpoint-tmp"
_DELETED_SUFFIX = ".deleted"


class CheckpointFolder:
    """One folder per step below `path`, named by the step. Warns of each damaged checkpoint once."""

    def __init__(self, path: Path):
        self.path = path
        self._warned: set[str] = set()
        self._verified: set[int] = set()
        self._unreadable: dict[int, str] = {}

    def list_steps(self) -> list[int]:
        """List the steps that have a folder, oldest first, whole or not."""
        if not self.path.is_dir():
            return []
        names = [path.name for path in self.path.iterdir() if path.is_dir()]
        return sorted(int(name) for name in names if name.isdecimal() and name == str(int(name)))

    def list_whole_steps(self) -> list[int]:
        """List the steps whose files have their names and sizes, oldest first."""
        self._warn_of_unfinished()
        return [step for step in self.list_steps() if not self._find_damage(step)]

    def find_newest(self) -> int | None:
        """Return the newest step all of whose files have their digests; None if there is no checkpoint at all.

        **Raises** `FileNotFoundError` if all are damaged.
        """
        self._warn_of_unfinished()
        steps = self.list_steps()
        for step in reversed(steps):
            if not self._find_damage(step, by_digest=True):
                return step
        if steps:
            damages = [f"\n  {step}: {self._find_damage(step, by_digest=True)}" for step in reversed(steps)]
            raise FileNotFoundError(
                f"{self.path}: no whole checkpoint here; all are damaged, and nothing was deleted:{''.join(damages)}"
            )
        return None

    def require_whole(self, step: int) -> int:
        """Return `step` if all files of its checkpoint have their digests.

        **Raises** `FileNotFoundError`, with the steps that there are, if it is absent or damaged.
        """
        steps = self.list_steps()
        damage = self._find_damage(step, by_digest=True) if step in steps else None
        if step not in steps or damage:
            others = [other for other in steps if other != step] or "none"
            reason = f", because {damage}" if damage else ""
            raise FileNotFoundError(f"{self.path}: no whole checkpoint of step {step} here{reason}; it holds {others}")
        return step

    def read_metadata(self, step: int) -> Any:
        """Read the JSON that was saved beside the arrays of a checkpoint."""
        return read_json(self.path / str(step) / "about" / "metadata")

    def mark_unreadable(self, step: int, reason: str) -> None:
        """Count a checkpoint without digests as damaged, because reading it failed."""
        self._unreadable[step] = reason

    def has_digests(self, step: int) -> bool:
        """Return False for a checkpoint of an earlier version, of which only the sizes of files are known."""
        return bool(read_manifest(self.path / str(step)).digests)

    def make_room(self, step: int, size: int) -> str | None:
        """Delete the checkpoint that a save of `step` replaces, and what earlier saves left unfinished.

        Returns the reason if the disk has no room for `size` bytes; the checkpoint is not deleted then.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        self.delete_unfinished()
        if shutil.disk_usage(self.path).free < size:
            return f"{self.path}: no room for the checkpoint of step {step}: {self.describe_room(size)}"
        self._verified.discard(step)
        self._unreadable.pop(step, None)
        if (self.path / str(step)).exists():
            self.delete([step])
        return None

    def describe_room(self, size: int) -> str:
        """Say how much room a checkpoint needs, how much there is, and which one is the newest."""
        newest = max(self.list_whole_steps(), default=None)
        free = shutil.disk_usage(self.path).free
        return f"its arrays take {format_si(size)}B, and {format_si(free)}B are free; " + (
            "there is none before it" if newest is None else f"the newest whole one is of step {newest}"
        )

    def find_superfluous(self, newest: int, *, keep_last: int, keep_best: int) -> list[int]:
        """List the steps to delete after `newest` was saved: later ones, and all but the last and the best."""
        steps = self.list_steps()
        return choose_superfluous(steps, self._read_metric, newest, keep_last=keep_last, keep_best=keep_best)

    def delete(self, steps: Iterable[int]) -> None:
        """Delete the checkpoints of `steps`."""
        for step in steps:
            # Renamed first: half of a checkpoint would be taken for a damaged one.
            try:
                _remove((self.path / str(step)).rename(self.path / f"{step}{_DELETED_SUFFIX}"))
            except OSError as error:
                self._warn_once(f"{self.path / str(step)}: cannot be deleted ({error.strerror})")

    def delete_unfinished(self) -> None:
        """Delete what interrupted saves and deletions left."""
        for suffix in (_UNFINISHED_SUFFIX, _DELETED_SUFFIX):
            for folder in self.path.glob(f"*{suffix}*"):
                _remove(folder)

    def finish(self, step: int, metric: float | None) -> None:
        """Write the manifest of a complete checkpoint, just before Orbax renames it to its final name."""
        for folder in self.path.glob(f"{step}{_UNFINISHED_SUFFIX}*"):
            write_manifest(folder, metric)

    def _find_damage(self, step: int, *, by_digest: bool = False) -> str | None:
        folder = self.path / str(step)
        verifies = by_digest and step not in self._verified
        damage = self._unreadable.get(step) or find_damage(folder, by_digest=verifies)
        if damage:
            self._warn_once(f"{folder}: passed over, {damage}")
        elif verifies:
            self._verified.add(step)
            if not self.has_digests(step):
                self._warn_once(f"{folder}: of an earlier version, without digests; verified by size alone")
        return damage

    def _warn_of_unfinished(self) -> None:
        for path in sorted(self.path.glob(f"*{_UNFINISHED_SUFFIX}*")):
            self._warn_once(f"{path}: passed over, it was never finished")

    def _read_metric(self, step: int) -> float | None:
        try:
            return read_manifest(self.path / str(step)).metric
        except (OSError, ValueError):
            return None

    def _warn_once(self, text: str) -> None:
        if text not in self._warned:
            _log.warning("%s", text)
            self._warned.add(text)


def choose_superfluous(
    steps: Sequence[int],
    read_metric: Callable[[int], float | None],
    newest: int,
    *,
    keep_last: int,
    keep_best: int,
) -> list[int]:
    """List the steps to delete after `newest` was saved: later ones, and all but the last and the best.

    The best are those with the lowest metric; of equal ones, the later.
    """
    earlier = [step for step in steps if step <= newest]
    metrics = {step: metric for step in earlier if (metric := read_metric(step)) is not None}
    best = sorted(metrics, key=lambda step: (metrics[step], -step))[:keep_best]
    last = sorted(earlier, reverse=True)[:keep_last]
    return sorted({*steps} - {*best} - {*last})


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)

"""Checkpoints below a URL: those of Google Cloud Storage, `gs://bucket/run`, and of a file system, `file:///folder`.

An object store renames nothing. A checkpoint is written under its final name, and is whole once Orbax has written its
last object, `commit_success.txt`. The store keeps its own checksums, so that there is no list of files with digests.
`file://` takes the same steps.
"""

import json
import logging
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from zoo._files import JSON_BYTES, parse_json
from zoo._optional import import_optional

from .checkpoint_folder import choose_superfluous

_log = logging.getLogger("zoo")

_COMMIT_FILE = "commit_success.txt"  # Orbax's
_METRIC_FILE = "metric.json"


def parse_url(url: str) -> Any:
    """Return the path, of `etils.epath`, to which a URL of `gs://` or `file://` leads.

    **Raises** `ValueError` for another scheme, and `ImportError` without the package that reads the store.
    """
    found = re.fullmatch(r"(gs|file)://(.+?)/*", url)
    if found is None or (found[1] == "file" and not found[2].startswith("/")):
        advice = ""
        if url.startswith(("s3://", "az://")):
            advice = ". Orbax writes to Google's store alone: mount the bucket, and give a path of the file system"
        raise ValueError(f"{url!r} was expected to be gs://BUCKET/FOLDER or file:///FOLDER{advice}")
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


class ObjectStoreFolder:
    """One folder per step below a URL; the counterpart of `CheckpointFolder`, with the same methods."""

    def __init__(self, url: str):
        self.url = url.rstrip("/")
        self.path = parse_url(url)
        self._unreadable: dict[int, str] = {}

    def list_steps(self) -> list[int]:
        """List the steps that have a folder, oldest first, whole or not."""
        if not self.path.is_dir():
            return []
        names = [path.name for path in self.path.iterdir()]
        return sorted(int(name) for name in names if name.isdecimal() and name == str(int(name)))

    def list_whole_steps(self) -> list[int]:
        """List the steps whose checkpoints were finished, oldest first. Warns of each other one."""
        steps = self.list_steps()
        whole = [step for step in steps if self._find_damage(step) is None]
        for step in set(steps) - set(whole) - set(self._unreadable):
            _log.warning("%s/%d: passed over, %s", self.url, step, self._find_damage(step))
        return whole

    def find_newest(self) -> int | None:
        """Return the newest whole step, or None if there is none at all.

        **Raises** `FileNotFoundError` if some were written and none of them can be read.
        """
        whole = self.list_whole_steps()
        if not whole and self._unreadable:
            reasons = "".join(f"\n  {step}: {reason}" for step, reason in self._unreadable.items())
            raise FileNotFoundError(f"{self.url}: no whole checkpoint here; all are damaged:{reasons}")
        return whole[-1] if whole else None

    def require_whole(self, step: int) -> int:
        """Return `step` if its checkpoint is whole. **Raises** `FileNotFoundError`, with the steps that there are."""
        steps = self.list_steps()
        damage = self._find_damage(step) if step in steps else "there is none"
        if damage is not None:
            others = [other for other in steps if other != step] or "none"
            raise FileNotFoundError(
                f"{self.url}: no whole checkpoint of step {step} here, because {damage}; it holds {others}"
            )
        return step

    def read_metadata(self, step: int) -> Any:
        """Read the JSON that was saved beside the arrays of a checkpoint."""
        path = self.path / str(step) / "about" / "metadata"
        content = path.read_bytes()
        if len(content) > JSON_BYTES:
            raise ValueError(f"{path} has {len(content):,} bytes, and at most {JSON_BYTES:,} were expected")
        return parse_json(content)

    def mark_unreadable(self, step: int, reason: str) -> None:
        """Count a checkpoint as damaged, because reading it failed."""
        self._unreadable[step] = reason
        _log.warning("%s/%d: passed over, %s", self.url, step, reason)

    def has_digests(self, step: int) -> bool:
        """Return False: the store itself compares what it reads with its checksums."""
        return False

    def make_room(self, step: int, size: int) -> str | None:
        """Delete the checkpoint that a save of `step` replaces, and unfinished ones. Returns None: a store has room."""
        self.path.mkdir(parents=True, exist_ok=True)
        self.delete_unfinished()
        self._unreadable.pop(step, None)
        self.delete({step} & set(self.list_steps()))
        return None

    def describe_room(self, size: int) -> str:
        """Say which checkpoint is the newest."""
        newest = max(self.list_whole_steps(), default=None)
        return "there is none before it" if newest is None else f"the newest whole one is of step {newest}"

    def find_superfluous(self, newest: int, *, keep_last: int, keep_best: int) -> list[int]:
        """List the steps to delete after `newest` was saved: later ones, and all but the last and the best."""
        steps = self.list_steps()
        return choose_superfluous(steps, self._read_metric, newest, keep_last=keep_last, keep_best=keep_best)

    def delete(self, steps: Iterable[int]) -> None:
        """Delete the checkpoints of `steps`."""
        for step in steps:
            folder = self.path / str(step)
            (folder / _COMMIT_FILE).unlink(missing_ok=True)  # first: half of a checkpoint must not be taken for one
            folder.rmtree()

    def delete_unfinished(self) -> None:
        """Delete what interrupted saves and deletions left."""
        self.delete([step for step in self.list_steps() if not (self.path / str(step) / _COMMIT_FILE).exists()])

    def finish(self, step: int, metric: float | None) -> None:
        """Write the metric of a checkpoint all of whose arrays are there, before Orbax's last object."""
        (self.path / str(step) / _METRIC_FILE).write_text(json.dumps(metric))

    def _find_damage(self, step: int) -> str | None:
        if step in self._unreadable:
            return self._unreadable[step]
        return None if (self.path / str(step) / _COMMIT_FILE).exists() else "it was never finished"

    def _read_metric(self, step: int) -> float | None:
        try:
            return json.loads((self.path / str(step) / _METRIC_FILE).read_text())
        except (OSError, ValueError):
            return None

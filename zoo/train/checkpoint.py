"""Checkpoints of a run: saved asynchronously and atomically, verified, restored onto any mesh.

    checkpoints = Checkpoints(out / "checkpoints")
    checkpoints.save(step, (model, opt_state), data=batches.state, config=config, metric=validation)
    step, (model, opt_state), data, config = checkpoints.restore((model, opt_state))

Only this module uses Orbax, through its `AsyncCheckpointer`: the newer interface, still experimental, reports every
failed read as "incompatible handler" and stores a configuration as arrays, and `CheckpointManager` forgets the metrics
of earlier processes.
"""

import concurrent.futures
import logging
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from zoo._files import to_jsonable
from zoo._optional import import_optional
from zoo.parallel.mesh import is_array_or_shape
from zoo.parallel.rounds import merge_rounds, reshape_layers

from .array_names import (
    describe_arrays,
    flatten_with_names,
    format_key_path,
    require_same_arrays,
)
from .checkpoint_folder import CheckpointFolder
from .fingerprint import fingerprint_arrays, require_same_fingerprints
from .object_store import ObjectStoreFolder, refuse_url
from .processes import run_on_first

_orbax_log = logging.getLogger("absl")


class UnwrittenCheckpointError(OSError):
    """A checkpoint could not be written, for want of room or another fault of the disk. Earlier ones are intact."""


class RestoredCheckpoint(NamedTuple):
    """A restored checkpoint: the step after which it was saved, the state, the data iterator's state, the config."""

    step: int
    state: PyTree
    data: Any
    config: dict[str, Any]


class Checkpoints:
    """Manager of a run's checkpoints, one folder per step below `directory`, a path or a URL, `gs://bucket/run`.

    Keeps the newest `keep_last` and the `keep_best` with the lowest metric, those of earlier processes included. Only
    arrays are saved; static fields come from the tree passed to `restore`. Layers are saved in one round, whatever the
    `rounds` of the mesh, and restored in those of that tree. With several processes, every process makes
    every call, and the first one decides which checkpoints are whole.

    `frozen` is a tree that training reads but does not change, such as the base model of an adapter. Checkpoints hold
    only a fingerprint of it (`zoo.train.fingerprint`), which `restore` compares.
    """

    def __init__(self, directory: Path | str, *, keep_last: int = 2, keep_best: int = 1, frozen: PyTree = None):
        self.folder = open_checkpoint_folder(directory)
        self.directory = self.folder.path
        self._keep = dict(keep_last=keep_last, keep_best=keep_best)
        self._frozen = fingerprint_arrays(frozen)
        self._orbax = import_optional("orbax.checkpoint", "pip install 'equizoo[train]'")
        self._writer = self._orbax.AsyncCheckpointer(
            self._orbax.CompositeCheckpointHandler(
                state=_make_state_handler(self._orbax), about=self._orbax.JsonCheckpointHandler()
            ),
            async_options=self._orbax.options.AsyncOptions(post_finalization_callback=self._finish_files),
            temporary_path_class=(
                self._orbax.path.atomicity.CommitFileTemporaryPath
                if isinstance(self.folder, ObjectStoreFolder)
                else None
            ),
        )
        self._background = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: concurrent.futures.Future[None] | None = None
        self._saving: tuple[int, float | None] = (-1, None)
        self._saved_bytes = 0

    def save(
        self,
        step: int,
        state: PyTree,
        *,
        data: Any = None,
        config: Mapping[str, Any] | None = None,
        metric: float | int | None = None,
    ) -> None:
        """Save `state` after `step` steps. Returns once the arrays are copied to the host, so they may be donated; they
        are written to disk in the background. Layers in rounds are on the devices twice until then.

        - `data`: the state of the data iterator, JSON; `config`: stored with it.
        - `metric`: lower is better.

        Deletes an earlier checkpoint of this step first, and once this one is on disk those of later steps.
        **Raises** `UnwrittenCheckpointError`, before anything is deleted, if the disk has no room for the arrays.
        """
        self.wait()
        arrays = flatten_with_names(merge_rounds(eqx.filter(state, eqx.is_array)))
        self._saved_bytes = sum(x.nbytes for x in arrays.values())
        if obstacle := run_on_first(lambda: self.folder.make_room(step, self._saved_bytes)):
            raise UnwrittenCheckpointError(obstacle)
        about = dict(step=step, data=data, config=config or {}, leaves=describe_arrays(arrays), frozen=self._frozen)
        args = self._orbax.args
        _orbax_log.addFilter(_has_no_traceback)
        self._saving = step, float(metric) if metric is not None and math.isfinite(metric) else None
        try:
            self._writer.save(
                self.directory / str(step),
                # Orbax refuses empty arrays; their shapes are in `about`.
                args=args.Composite(
                    state=args.PyTreeSave({name: x for name, x in arrays.items() if x.size}),
                    about=args.JsonSave(to_jsonable(about)),
                ),
            )
        except OSError as error:
            raise self._explain_failed_write(error) from error
        self._pending = self._background.submit(self._finish_save)

    def wait(self) -> None:
        """Block until the last save is on disk. **Raises** `UnwrittenCheckpointError`, once, if that failed."""
        pending, self._pending = self._pending, None
        if pending is not None:
            try:
                pending.result()
            except Exception as error:
                raise self._explain_failed_write(error) from error
            finally:
                _orbax_log.removeFilter(_has_no_traceback)

    def restorable_steps(self) -> list[int]:
        """List the steps whose files have their names and sizes, oldest first; `latest_step` verifies digests, too.

        Warns once about each damaged one, with the reason.
        """
        self.wait()
        return run_on_first(self.folder.list_whole_steps)

    def latest_step(self) -> int | None:
        """Return the newest step all of whose files have their digests, or None if there is no checkpoint at all.

        Warns about the damaged ones that it passes over. **Raises** `FileNotFoundError` if all are damaged.
        """
        self.wait()
        return run_on_first(self.folder.find_newest)

    def verify(self, step: int) -> int:
        """Return `step` if all files of its checkpoint have their digests.

        **Raises** `FileNotFoundError`, with the steps that there are, if it is absent or damaged.
        """
        self.wait()
        return run_on_first(lambda: self.folder.require_whole(step))

    def restore(self, like: PyTree, step: int | None = None) -> RestoredCheckpoint:
        """Restore the checkpoint of `step`, by default the newest whole one.

        - `like`: a state like the one the run starts with, already placed on its mesh: modules, optimizer states, keys,
          arrays, or `jax.ShapeDtypeStruct`s with shardings. Names, shapes, dtypes, shardings and everything that is not
          an array come from it.

        **Raises** `FileNotFoundError` if there is no such checkpoint or it is damaged, and `ValueError`, with the first
        names that differ, if it belongs to another model or to other `frozen` parameters.
        """
        return self._read_whole(step, lambda found: self._restore_step(found, like))

    def read_config(self, step: int | None = None) -> dict[str, Any]:
        """Read the configuration saved with the checkpoint of `step`, by default the newest whole one."""
        return self._read_whole(step, self._read_metadata)["config"]

    def close(self) -> None:
        """Wait for the last save and stop the threads. **Raises** `UnwrittenCheckpointError` if it failed."""
        try:
            self.wait()
        finally:
            self._background.shutdown()
            self._writer.close()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _finish_save(self) -> None:
        """Wait until the checkpoint has its final name, then delete those that it makes superfluous."""
        self._writer.wait_until_finished()
        if jax.process_index() == 0:
            self.folder.delete(self.folder.find_superfluous(self._saving[0], **self._keep))

    def _finish_files(self) -> None:
        """Add to a complete checkpoint, before Orbax makes it count."""
        if jax.process_index() == 0:
            self.folder.finish(*self._saving)

    def _explain_failed_write(self, error: Exception) -> Exception:
        """Delete what a failed save has written, and return the error to raise: itself, if no fault of the disk."""
        text = str(error)
        if not isinstance(error, OSError) and "OS error" not in text and "No space left" not in text:
            return error
        if jax.process_index() == 0:
            self.folder.delete_unfinished()
        reason = "no space was left on the disk" if "No space left" in text else text.splitlines()[0]
        room = self.folder.describe_room(self._saved_bytes)
        return UnwrittenCheckpointError(
            f"{self.directory}: the checkpoint of step {self._saving[0]} was not written ({reason}): {room}"
        )

    def _read_whole(self, step: int | None, read: Callable[[int], Any]) -> Any:
        """Read the checkpoint of `step`, or of the newest one that can be read."""
        while True:
            found = self.latest_step() if step is None else self.verify(step)
            if found is None:
                raise FileNotFoundError(f"{self.directory}: no whole checkpoint here; it holds none")
            try:
                return read(found)
            except _UnreadableError as error:
                # Digests are right, so that it is no damage that the next checkpoint would be free of.
                if self.folder.has_digests(found):
                    raise error.__cause__ or error from None
                self.folder.mark_unreadable(found, str(error))

    def _read_metadata(self, step: int) -> dict[str, Any]:
        try:
            about = self.folder.read_metadata(step)
            return {name: about[name] for name in ("data", "config", "leaves")} | {"frozen": about.get("frozen", {})}
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise _UnreadableError(f"its metadata cannot be read ({type(error).__name__}: {error})") from error

    def _restore_step(self, step: int, like: PyTree) -> RestoredCheckpoint:
        folder = self.directory / str(step)
        about = self._read_metadata(step)
        require_same_fingerprints(about["frozen"], self._frozen, folder)
        expected = flatten_with_names(merge_rounds(jax.tree.map(_to_shape, eqx.filter(like, is_array_or_shape))))
        require_same_arrays(about["leaves"], describe_arrays(expected), folder)
        targets = {name: x for name, x in expected.items() if x.size}
        arrays = self._read_arrays(folder, targets)

        def fill_leaf(path: tuple, leaf: Any) -> Any:
            if not is_array_or_shape(leaf):
                return leaf
            if not leaf.size:
                return jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding)
            x = arrays.pop(format_key_path(path))  # so that it is freed once it is copied
            # On several devices, arrays restored by Orbax cannot be donated; copies can.
            return (
                jnp.copy(x) if x.shape == leaf.shape else jax.device_put(reshape_layers(x, leaf.shape), leaf.sharding)
            )

        state = jax.tree_util.tree_map_with_path(fill_leaf, like)
        return RestoredCheckpoint(step, state, about["data"], about["config"])

    def _read_arrays(self, folder: Any, targets: Mapping[str, Any]) -> dict[str, Any]:
        orbax, epath = self._orbax, import_optional("etils.epath", "pip install 'equizoo[train]'")
        read = orbax.args.PyTreeRestore(targets, restore_args=orbax.checkpoint_utils.construct_restore_args(targets))
        try:
            # The handler itself reads this folder alone: not Orbax's notes beside it, which the manifest does not list.
            return orbax.PyTreeCheckpointHandler().restore(epath.Path(folder / "state"), args=read)
        except (jax.errors.JaxRuntimeError, MemoryError):
            raise
        except Exception as error:
            raise _UnreadableError(f"its arrays cannot be read ({type(error).__name__}: {error})") from error


def open_checkpoint_folder(location: Path | str) -> CheckpointFolder | ObjectStoreFolder:
    """Return the folder of checkpoints at a path, or at a URL of `gs://` or `file://`."""
    if "://" in str(location):
        return ObjectStoreFolder(str(location))
    refuse_url(Path(location))
    return CheckpointFolder(Path(location).absolute())


_MIN_SLICE_BYTES = 4 * 2**20


def _make_state_handler(orbax: ModuleType) -> Any:
    """Return a handler that lets the copies of a replicated array write a slice each only if the slices are large.

    Each slice of each shape is a program to compile: with Orbax's default, which has no least size, the first save of
    30 small arrays on 8 CPU devices takes 17 s, and with this one 0.2 s.
    """
    default = orbax.type_handlers.get_type_handler(jax.Array)
    arrays = orbax.type_handlers.ArrayHandler(
        min_slice_bytes_for_replica_parallel=_MIN_SLICE_BYTES,
        array_metadata_store=default._array_metadata_store,  # keys need one, and no public function makes it
    )
    registry = orbax.type_handlers.create_type_handler_registry((jax.Array, arrays))
    return orbax.PyTreeCheckpointHandler(type_handler_registry=registry)


def _to_shape(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)


def _has_no_traceback(record: logging.LogRecord) -> bool:
    """Drop what Orbax's threads log when a save fails, hundreds of lines, since `wait` raises the error."""
    return not record.exc_info


class _UnreadableError(Exception):
    """A checkpoint whose files have their sizes cannot be read."""


def diff_configs(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """Return one line per entry that differs between two configurations."""
    saved, current = to_jsonable(saved), to_jsonable(current)
    names = [*saved, *(name for name in current if name not in saved)]
    return [
        f"{name}: {saved.get(name, 'absent')} in the checkpoint, {current.get(name, 'absent')} now"
        for name in names
        if saved.get(name, "absent") != current.get(name, "absent")
    ]

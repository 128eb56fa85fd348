"""Checkpoints of a run: saved asynchronously and atomically, verified, restored onto any mesh.

    with Checkpoints(out / "checkpoints") as checkpoints:
        step, (model, opt_state), data, config = checkpoints.restore((model, opt_state))
        ...
        checkpoints.save(step, (model, opt_state), data=batches.state, config=config, metric=validation)

Only this module uses Orbax. Its `CheckpointManager` writes a checkpoint in the background, gives it its name once it is
complete, and then deletes superfluous ones. `checkpoint_folder` decides which checkpoints are whole: Orbax keeps no
digests, and its errors at a damaged file do not say what to do.
"""

import concurrent.futures.thread
import logging
import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NamedTuple, get_args

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from zoo._files import to_jsonable
from zoo._optional import import_optional
from zoo._terminal import show_error
from zoo.parallel.fingerprint import fingerprint_arrays, require_same_fingerprints
from zoo.parallel.mesh import is_array_or_shape
from zoo.parallel.rounds import merge_rounds, reshape_layers

from .array_names import describe_arrays, flatten_with_names, format_key_path, require_same_arrays
from .checkpoint_folder import TRASH, CheckpointFolder
from .processes import run_on_first

_log = logging.getLogger("zoo")
_orbax_log = logging.getLogger("absl")

_MIN_SLICE_BYTES = 4 * 2**20

Best = Literal["lowest", "highest"]
"""Value of a metric that is the best: the lowest loss, the highest reward."""

_saving: "dict[Checkpoints, int]" = {}
"""Checkpoints with a save under way, and the process that began it."""


def finish_saves() -> None:
    """Wait for all saves under way; print an error for each that was not written. At the end of the program, Python
    calls this before it stops the threads that write."""
    for checkpoints, process in list(_saving.items()):
        if process != os.getpid():  # this one is a fork, without the threads
            continue
        try:
            checkpoints.wait()
        except Exception as error:
            show_error(f"error: {error}")
        except BaseException:
            show_error(f"error: {checkpoints.folder.location}: the save under way was cut off")
            raise


# `atexit` is too late: executors take no work any more. The later function is called first, before the executors' own.
threading._register_atexit(finish_saves)  # pyright: ignore[reportAttributeAccessIssue]


class UnwrittenCheckpointError(OSError):
    """Raised if a checkpoint cannot be written, because the disk has no room or another fault. Earlier ones are
    intact."""


class RestoredCheckpoint(NamedTuple):
    """A restored checkpoint: the step after which it was saved, the state, the data iterator's state, the config."""

    step: int
    state: PyTree
    data: Any
    config: dict[str, Any]


class Checkpoints:
    """Manager of a run's checkpoints, one folder per step below `directory`, a path or a URL, `gs://bucket/run`.

    Keeps the newest `keep_last` and the `keep_best` with the lowest metric, or, with `best="highest"`, the highest,
    including checkpoints of earlier processes. Only arrays, of JAX and NumPy, are saved; static fields come from the
    tree passed to `restore`. Layers are saved in one round, whatever the `rounds` of the mesh, and restored in the
    rounds of that tree. With several processes, every process makes every call, and the first one decides which
    checkpoints are whole.

    Use it in a `with` statement, whose end waits for the last save and raises its error. Without it, the end of the
    program waits for the save, and an error is only printed.

    `frozen` is a tree that training reads but does not change, such as the base model of an adapter. Checkpoints hold
    only a fingerprint of it (`zoo.train.fingerprint`), which `restore` compares.
    """

    def __init__(
        self,
        directory: Path | str,
        *,
        keep_last: int = 2,
        keep_best: int = 1,
        best: Best = "lowest",
        frozen: PyTree = None,
    ):
        """**Raises** `ValueError` for another `best`."""
        if best not in get_args(Best):
            raise ValueError(f"best={best!r}: expected one of {', '.join(get_args(Best))}")
        self._orbax = import_optional("orbax.checkpoint", "pip install 'equizoo[train]'")
        self.folder = CheckpointFolder(directory)
        self.directory = self.folder.path
        self._keep_last = keep_last
        self._keep_best = keep_best
        self._best: Best = best
        self._frozen = fingerprint_arrays(frozen)
        self._background = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: concurrent.futures.Future[None] | None = None
        self._saving = _Save(-1, 0, None)

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
        are written to disk in the background, of which the next call, `wait` or `close` raises the errors. Layers in
        rounds are on the devices twice until then.

        - `data`: the state of the data iterator, JSON; `config`: stored with it.
        - `metric`: what ranks checkpoints, as `best` says.

        Deletes an earlier checkpoint of this step first, and once this one is on disk the checkpoints of later steps.
        **Raises** `UnwrittenCheckpointError`, before anything is deleted, if the disk has no room for the arrays, and
        `ValueError` for arrays that cannot be saved: donated ones, and NumPy's of strings, dates or objects.
        """
        self.wait()
        arrays = flatten_with_names(merge_rounds(eqx.filter(state, eqx.is_array)))
        _require_savable(arrays)
        numpy_scalars = {name: np.asarray(x) for name, x in arrays.items() if isinstance(x, np.generic)}
        arrays = {**arrays, **numpy_scalars}
        size = sum(x.nbytes for x in arrays.values())
        if metric is not None:
            metric = float(metric)
            if not math.isfinite(metric):
                metric = None
        self._saving = _Save(step, size, metric)
        if obstacle := run_on_first(lambda: self.folder.make_room(step, size)):
            raise UnwrittenCheckpointError(obstacle)
        about = dict(step=step, data=data, config=config or {}, leaves=describe_arrays(arrays), frozen=self._frozen)
        items = self._orbax.args.Composite(
            # Orbax refuses empty arrays; their shapes are in `about`.
            state=self._orbax.args.PyTreeSave({name: x for name, x in arrays.items() if x.size}),
            about=self._orbax.args.JsonSave(to_jsonable(about)),
        )
        manager = self._make_manager()
        _orbax_log.addFilter(_has_no_traceback)
        try:
            manager.save(step, args=items, force=True)
        except BaseException as error:
            _orbax_log.removeFilter(_has_no_traceback)
            manager.close()
            self._raise_unwritten(error)
            raise
        self._pending = self._background.submit(self._finish_save, manager)
        _saving[self] = os.getpid()

    def wait(self) -> None:
        """Block until the last save is on disk. **Raises** `UnwrittenCheckpointError`, once, if that failed."""
        pending = self._pending
        if pending is None:
            return
        try:
            pending.result()
        except Exception as error:
            self._raise_unwritten(error)
            raise
        finally:
            if pending.done():  # else Ctrl-C came
                self._pending = None
                _saving.pop(self, None)
                _orbax_log.removeFilter(_has_no_traceback)

    def restorable_steps(self) -> list[int]:
        """List the steps whose files have the right names and sizes, oldest first; `latest_step` verifies digests, too.

        Warns once about each damaged one, with the reason.
        """
        self.wait()
        return run_on_first(self.folder.list_whole_steps)

    def latest_step(self) -> int | None:
        """Return the newest step whose files all match their digests, or None if there is no checkpoint at all.

        Warns about the damaged ones that it passes over. **Raises** `FileNotFoundError` if all are damaged.
        """
        self.wait()
        return run_on_first(self.folder.find_newest)

    def verify(self, step: int) -> int:
        """Return `step` if all files of its checkpoint match their digests.

        **Raises** `FileNotFoundError`, with the available steps, if it is absent or damaged.
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

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    # Writing

    def _make_manager(self) -> Any:
        """Make the manager of one save: after a failed save, a manager forgets which checkpoints it had to delete."""
        ocp = self._orbax
        in_store = self.folder.in_store
        if in_store:
            mode = ocp.options.AtomicityMode.COMMIT_FILE
        else:
            mode = ocp.options.AtomicityMode.AUTO
        trash = None if in_store else TRASH
        options = ocp.CheckpointManagerOptions(
            step_name_format=_StepNames(self.folder, ocp.path.step.Metadata),
            preservation_policy=_LastAndBest(self.folder, self._saving, self._keep_last, self._keep_best, self._best),
            lightweight_initialize=True,  # otherwise it reads files of each checkpoint, which may be damaged
            save_root_metadata=False,
            todelete_subdir=trash,
            atomicity_options=ocp.options.AtomicityOptions(mode=mode),
            async_options=ocp.options.AsyncOptions(
                post_finalization_callback=self._finish_files,
                # Otherwise its threads wait for a folder that a failed save never makes, and the process does not end.
                create_directories_asynchronously=False,
            ),
        )
        handlers = {"state": _make_state_handler(ocp), "about": ocp.JsonCheckpointHandler()}
        return ocp.CheckpointManager(self.directory, options=options, item_handlers=handlers)

    def _finish_files(self) -> None:
        """Add the manifest to a complete checkpoint, before Orbax makes it count. Called in the first process only."""
        self.folder.finish(self._saving.step, self._saving.metric)

    def _finish_save(self, manager: Any) -> None:
        """Wait until the checkpoint counts, and the superfluous ones are deleted."""
        try:
            manager.wait_until_finished()
        except Exception as error:
            if jax.process_index() != 0 or self._saving.step not in self.folder.list_steps():
                raise
            _log.warning("%s: superfluous checkpoints were not deleted (%s)", self.folder.location, error)
        finally:
            manager.close()
            if jax.process_index() == 0:
                self.folder.empty_trash()

    def _raise_unwritten(self, error: BaseException) -> None:
        """**Raises** `UnwrittenCheckpointError` if `error` is a fault of the disk, and deletes the partial
        checkpoint."""
        text = str(error)
        if not isinstance(error, OSError) and "OS error" not in text and "No space left" not in text:
            return
        if jax.process_index() == 0:
            self.folder.delete_unfinished()
        step, size, _ = self._saving
        if "No space left" in text:
            reason = "no space was left on the disk"
        else:
            reason = text.splitlines()[0]
        raise UnwrittenCheckpointError(
            f"{self.folder.location}: the checkpoint of step {step} was not written ({reason}): "
            f"{self.folder.describe_room(size)}"
        ) from error

    # Reading

    def _read_whole(self, step: int | None, read: Callable[[int], Any]) -> Any:
        """Read the checkpoint of `step`, or of the newest one that can be read."""
        while True:
            if step is None:
                found = self.latest_step()
            else:
                found = self.verify(step)
            if found is None:
                raise FileNotFoundError(f"{self.folder.location}: no whole checkpoint here; it holds none")
            try:
                return read(found)
            except _UnreadableError as error:
                # Its digests match, so it is not damaged: the next one would fail in the same way.
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
        path = self.directory / str(step)
        about = self._read_metadata(step)
        require_same_fingerprints(about["frozen"], self._frozen, path)
        expected = flatten_with_names(merge_rounds(jax.tree.map(_to_shape, eqx.filter(like, is_array_or_shape))))
        require_same_arrays(about["leaves"], describe_arrays(expected), path)
        arrays = self._read_arrays(path, {name: x for name, x in expected.items() if x.size})

        def fill_leaf(path: tuple, leaf: Any) -> Any:
            if not is_array_or_shape(leaf):
                return leaf
            if not leaf.size:
                if _is_numpy(leaf):
                    return leaf
                return jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding)
            x = arrays.pop(format_key_path(path))  # so that it is freed once it is copied
            if isinstance(leaf, np.generic):
                return x[()]
            if _is_numpy(leaf):
                return x
            if x.shape != leaf.shape:
                return jax.device_put(reshape_layers(x, leaf.shape), leaf.sharding)
            return jnp.copy(x)  # on several devices, arrays restored by Orbax cannot be donated; copies can

        state = jax.tree_util.tree_map_with_path(fill_leaf, like)
        return RestoredCheckpoint(step, state, about["data"], about["config"])

    def _read_arrays(self, path: Any, targets: Mapping[str, Any]) -> dict[str, Any]:
        ocp = self._orbax
        epath = import_optional("etils.epath", "pip install 'equizoo[train]'")
        read = ocp.args.PyTreeRestore(targets, restore_args=ocp.checkpoint_utils.construct_restore_args(targets))
        try:
            # The handler itself reads this folder only: not Orbax's notes next to it, which the manifest does not list.
            arrays = ocp.PyTreeCheckpointHandler().restore(epath.Path(path / "state"), args=read)
            if describe_arrays(arrays) != describe_arrays(targets):  # keys without their metadata are integers
                raise ValueError("their dtypes or shapes differ from what was saved")
            return arrays
        except (jax.errors.JaxRuntimeError, MemoryError):
            raise
        except Exception as error:
            raise _UnreadableError(f"its arrays cannot be read ({type(error).__name__}: {error})") from error


class _Save(NamedTuple):
    """A checkpoint that is being saved, and the size of its arrays in bytes."""

    step: int
    size: int
    metric: float | None


class _LastAndBest(NamedTuple):
    """Orbax's `PreservationPolicy`: keep the last and the best checkpoints up to the one that is being saved.

    The best have the lowest or highest metric; of equal ones, the later.
    """

    folder: CheckpointFolder
    saving: _Save
    keep_last: int
    keep_best: int
    best: Best

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """Return for each checkpoint whether it is kept."""
        steps = [checkpoint.step for checkpoint in checkpoints]
        earlier = [step for step in steps if step <= self.saving.step]
        metrics = {step: metric for step in earlier if (metric := self._read_metric(step)) is not None}
        sign = 1 if self.best == "lowest" else -1
        best = sorted(metrics, key=lambda step: (sign * metrics[step], -step))[: self.keep_best]
        last = sorted(earlier, reverse=True)[: self.keep_last]
        return [step in best or step in last for step in steps]

    def _read_metric(self, step: int) -> float | None:
        if step == self.saving.step:
            return self.saving.metric
        return self.folder.read_metric(step)


class _StepNames(NamedTuple):
    """Orbax's `NameFormat`: the steps that the first process finds. Orbax's own asks Google's API for the bucket."""

    folder: CheckpointFolder
    make_metadata: Callable[..., Any]

    def build_name(self, step: int) -> str:
        """Return the name of a step's folder."""
        return str(step)

    def find_all(self, base_path: Any) -> Iterator[Any]:
        """Find all checkpoints."""
        return iter([self.find_step(base_path, step) for step in run_on_first(self.folder.list_steps)])

    def find_step(self, base_path: Any, step: int) -> Any:
        """Find the checkpoint of a step."""
        return self.make_metadata(step=step, path=base_path / str(step))


def _make_state_handler(ocp: Any) -> Any:
    """Return a handler that splits the writing of a replicated array among its copies only if the slices are large.

    Each slice of each shape is a program to compile: with Orbax's default, which has no least size, the first save of
    30 small arrays on 8 CPU devices takes 17 s, and with this one 0.2 s.
    """
    default = ocp.type_handlers.get_type_handler(jax.Array)
    arrays = ocp.type_handlers.ArrayHandler(
        min_slice_bytes_for_replica_parallel=_MIN_SLICE_BYTES,
        array_metadata_store=default._array_metadata_store,  # keys need one, and no public function makes it
    )
    types = (jax.Array, arrays), (np.ndarray, ocp.type_handlers.NumpyHandler())
    registry = ocp.type_handlers.create_type_handler_registry(*types)
    return ocp.PyTreeCheckpointHandler(type_handler_registry=registry)


def _require_savable(arrays: Mapping[str, Any]) -> None:
    for name, x in arrays.items():
        if isinstance(x, jax.Array) and x.is_deleted():
            raise ValueError(f"{name} was donated to a program, and cannot be saved: save what the program returned")
        if _is_numpy(x) and not _is_stored(x.dtype):
            raise ValueError(f"{name} is an array of {x.dtype}, which checkpoints cannot hold: pass it as `data`")


def _is_stored(dtype: np.dtype) -> bool:
    """Return True for the dtypes of TensorStore: booleans, and numbers except long doubles."""
    is_number = jnp.issubdtype(dtype, jnp.number) and dtype.char not in "gG"
    return is_number or jnp.issubdtype(dtype, jnp.bool_)


def _is_numpy(x: Any) -> bool:
    return isinstance(x, np.ndarray | np.generic)


def _to_shape(x: Any) -> Any:
    if _is_numpy(x):
        return np.asarray(x)
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)


def _has_no_traceback(record: logging.LogRecord) -> bool:
    """Drop the hundreds of lines that Orbax's threads log when a save fails, since `wait` raises the error."""
    return not record.exc_info


class _UnreadableError(Exception):
    """Raised if a checkpoint whose files have the right sizes cannot be read."""


def diff_configs(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """Return one line per entry that differs between two configurations."""
    saved = to_jsonable(saved)
    current = to_jsonable(current)
    names = [*saved, *(name for name in current if name not in saved)]
    return [
        f"{name}: {saved.get(name, 'absent')} in the checkpoint, {current.get(name, 'absent')} now"
        for name in names
        if saved.get(name, "absent") != current.get(name, "absent")
    ]

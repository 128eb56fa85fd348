"""Checkpoints: written beside the training, whole or not there, and read back onto any mesh.

    checkpoints = Checkpoints(out / "checkpoints")
    checkpoints.save(step, (model, opt_state), data=batches.state, config=config, metric=validation)
    step, (model, opt_state), data, config = checkpoints.restore((model, opt_state))

This is the one module that knows Orbax. We use its `CheckpointManager`: the newer interface, still called experimental,
reports every failed read as "incompatible handler", and stores a configuration as arrays.
"""

import logging
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from zoo._files import read_json, to_jsonable, write_json
from zoo._optional import import_optional

from .fingerprint import fingerprint_arrays, require_same_fingerprints

_log = logging.getLogger("zoo")

_MANIFEST_FILE = "files.json"
_UNFINISHED_SUFFIX = ".orbax-checkpoint-tmp"


class RestoredCheckpoint(NamedTuple):
    """What a checkpoint held: the step it was saved after, the state, where the data stood, the configuration."""

    step: int
    state: PyTree
    data: Any
    config: dict[str, Any]


class Checkpoints:
    """The checkpoints of one run, a folder each in `directory`, named by step.

    The newest `keep_last` are kept, and the `keep_best` of lowest metric. Only arrays are saved; what is static comes
    from the tree that `restore` is given. In a run of several processes all of them make every call.

    Of `frozen`, which training reads and does not change, each checkpoint holds no numbers, but a fingerprint
    (`zoo.train.fingerprint`), and `restore` compares it.
    """

    def __init__(self, directory: Path, *, keep_last: int = 2, keep_best: int = 1, frozen: PyTree = None):
        self.directory = Path(directory).absolute()
        self._frozen = fingerprint_arrays(frozen)
        self._orbax = import_optional("orbax.checkpoint", "pip install 'equizoo[train]'")
        policies = self._orbax.checkpoint_managers
        best = policies.BestN(
            get_metric_fn=lambda metrics: metrics["metric"],
            reverse=True,
            n=keep_best,
            keep_checkpoints_without_metrics=False,
        )
        options = self._orbax.CheckpointManagerOptions(
            preservation_policy=policies.AnyPreservationPolicy([policies.LatestN(keep_last), best]),
            async_options=self._orbax.options.AsyncOptions(post_finalization_callback=self._write_manifest),
        )
        self._manager = self._orbax.CheckpointManager(self.directory, options=options)
        self._saving = -1
        self._told: set[Path] = set()

    def save(
        self,
        step: int,
        state: PyTree,
        *,
        data: Any = None,
        config: Mapping[str, Any] | None = None,
        metric: float | int | None = None,
    ) -> None:
        """Save `state` as it is after `step` steps. Returns when the arrays are copied to the host; the rest is written
        while training goes on, and the arrays may be donated at once.

        **Arguments:** `data` says where the data stands (JSON), `config` is kept beside it, `metric` is better where it
        is lower. What a run that went further, or broke off, left behind is deleted: this step and later ones.
        """
        self.wait()
        for later in [other for other in self._manager.all_steps() if other >= step]:
            self._manager.delete(later)
        if jax.process_index() == 0:
            for unfinished in self.directory.glob(f"*{_UNFINISHED_SUFFIX}*"):
                shutil.rmtree(unfinished)
        arrays = _flatten_with_names(eqx.filter(state, eqx.is_array))
        about = dict(step=step, data=data, config=config or {}, leaves=_describe_arrays(arrays), frozen=self._frozen)
        args = self._orbax.args
        self._saving = step
        self._manager.save(
            step,
            # Orbax refuses arrays without elements; their shape is all there is to know.
            args=args.Composite(
                state=args.PyTreeSave({name: x for name, x in arrays.items() if x.size}),
                about=args.JsonSave(to_jsonable(about)),
            ),
            metrics=dict(metric=float(metric)) if metric is not None and math.isfinite(metric) else None,
            force=True,
        )

    def wait(self) -> None:
        """Return when the last save is on disk. **Raises** what went wrong while it was written."""
        self._manager.wait_until_finished()

    def restorable_steps(self) -> list[int]:
        """The steps that can be restored, oldest first. Says, once for each, which ones are passed over and why."""
        self.wait()
        for path in sorted(self.directory.glob(f"*{_UNFINISHED_SUFFIX}*")):
            self._warn_skipped(path, "it was never finished")
        found = {step: self._find_damage(step) for step in sorted(self._manager.all_steps())}
        for step, damage in found.items():
            if damage:
                self._warn_skipped(self.directory / str(step), damage)
        return [step for step, damage in found.items() if not damage]

    def latest_step(self) -> int | None:
        """The newest step that can be restored; None where there is none."""
        return max(self.restorable_steps(), default=None)

    def restore(self, like: PyTree, step: int | None = None) -> RestoredCheckpoint:
        """The checkpoint of `step`, or the newest whole one.

        **Arguments:** `like` is a state as the run starts with, already placed: modules, optimizer states, keys, loose
        arrays (or `jax.ShapeDtypeStruct`s with shardings). Names, shapes, dtypes and shardings are taken from it, and
        all that is no array.

        **Raises** `FileNotFoundError` where there is no such checkpoint; `ValueError` where it is of another model,
        with the first names that differ, or was learnt on top of other numbers than `frozen` has.
        """
        step = self._resolve_step(step)
        about = self._read_metadata(step)
        require_same_fingerprints(about.get("frozen", {}), self._frozen, self.directory / str(step))
        wanted = _flatten_with_names(eqx.filter(like, _is_array))
        _require_same_arrays(about["leaves"], _describe_arrays(wanted), self.directory / str(step))
        targets = {
            name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for name, x in wanted.items() if x.size
        }
        read = self._orbax.args.PyTreeRestore(
            targets, restore_args=self._orbax.checkpoint_utils.construct_restore_args(targets)
        )
        arrays = self._manager.restore(step, args=self._orbax.args.Composite(state=read)).state
        for name in targets:
            # What Orbax hands back on several devices is never reused by a step that donates it; a copy is.
            arrays[name] = jnp.copy(arrays[name])

        def take(path: tuple, leaf: Any) -> Any:
            if not _is_array(leaf):
                return leaf
            return (
                arrays[_format_key_path(path)] if leaf.size else jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding)
            )

        state = jax.tree_util.tree_map_with_path(take, like)
        return RestoredCheckpoint(step, state, about["data"], about["config"])

    def read_config(self, step: int | None = None) -> dict[str, Any]:
        """The configuration saved with the checkpoint of `step`, or with the newest whole one."""
        return self._read_metadata(self._resolve_step(step))["config"]

    def close(self) -> None:
        """Wait for the last save, and end Orbax's threads."""
        self._manager.close()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _resolve_step(self, step: int | None) -> int:
        steps = self.restorable_steps()
        if not steps or step not in (None, *steps):
            which = "" if step is None else f" of step {step}"
            raise FileNotFoundError(f"{self.directory}: no whole checkpoint{which} here; it holds {steps or 'none'}")
        return steps[-1] if step is None else step

    def _warn_skipped(self, path: Path, reason: str) -> None:
        if path not in self._told:
            _log.warning("%s: passed over, %s", path, reason)
            self._told.add(path)

    def _read_metadata(self, step: int) -> dict[str, Any]:
        return self._manager.restore(step, args=self._orbax.args.Composite(about=self._orbax.args.JsonRestore())).about

    def _write_manifest(self) -> None:
        """List the files of a checkpoint that is complete but has not got its final name yet."""
        if jax.process_index() == 0:
            for folder in self.directory.glob(f"{self._saving}{_UNFINISHED_SUFFIX}*"):
                files = [path for path in folder.glob("*/**/*") if path.is_file()]
                write_json(
                    folder / _MANIFEST_FILE,
                    {str(path.relative_to(folder)): path.stat().st_size for path in sorted(files)},
                )

    def _find_damage(self, step: int) -> str | None:
        """What is wrong with a checkpoint, found by names and sizes: Orbax's own errors come late and do not say."""
        folder = self.directory / str(step)
        try:
            files = read_json(folder / _MANIFEST_FILE)
        except (OSError, ValueError):
            return f"its list of files ({_MANIFEST_FILE}) is missing or cut off"
        for name, size in files.items():
            path = folder / name
            if not path.exists():
                return f"{name} is missing"
            if path.stat().st_size != size:
                return f"{name} has {path.stat().st_size} bytes instead of {size}"
        return None


def diff_configs(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """A line for each entry of two configurations that is not the same in both."""
    saved, current = to_jsonable(saved), to_jsonable(current)
    names = [*saved, *(name for name in current if name not in saved)]
    return [
        f"{name}: {saved.get(name, 'absent')} in the checkpoint, {current.get(name, 'absent')} now"
        for name in names
        if saved.get(name, "absent") != current.get(name, "absent")
    ]


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | jax.ShapeDtypeStruct)


def _flatten_with_names(tree: PyTree) -> dict[str, Any]:
    """The leaves by readable paths: `[0].stack.segments[1].norm.weight`."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    named = {_format_key_path(path): leaf for path, leaf in leaves}
    if len(named) < len(leaves):
        raise ValueError("two leaves of the state have the same path: a key of a mapping holds a dot or a bracket")
    return named


def _format_key_path(path: tuple) -> str:
    return "".join(map(_format_key, path)).removeprefix(".")


def _format_key(key: Any) -> str:
    match key:
        case jax.tree_util.GetAttrKey(name):
            return f".{name}"
        case jax.tree_util.DictKey(name):
            return f".{name}"
        case jax.tree_util.SequenceKey(index) | jax.tree_util.FlattenedIndexKey(index):
            return f"[{index}]"
    return str(key)


def _describe_arrays(arrays: Mapping[str, Any]) -> dict[str, str]:
    return {name: f"{x.dtype} {list(x.shape)}" for name, x in arrays.items()}


def _require_same_arrays(
    saved: Mapping[str, str], expected: Mapping[str, str], checkpoint_path: Path, max_lines: int = 8
) -> None:
    """**Raises** `ValueError` unless both have the same names, dtypes and shapes."""
    names = [*expected, *(name for name in saved if name not in expected)]
    lines = [
        f"  {name}: {saved.get(name, 'absent')} in the checkpoint, {expected.get(name, 'absent')} here"
        for name in names
        if saved.get(name) != expected.get(name)
    ]
    if lines:
        more = f"  and {len(lines) - max_lines} more\n" if len(lines) > max_lines else ""
        raise ValueError(
            f"{checkpoint_path} is of another model, or of another optimizer:\n"
            + "\n".join(lines[:max_lines])
            + f"\n{more}"
            "Restore with the configuration that it was saved with, or start a run in another folder."
        )

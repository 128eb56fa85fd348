"""Checkpoints of a run: saved asynchronously and atomically, restored onto any mesh.

    checkpoints = Checkpoints(out / "checkpoints")
    checkpoints.save(step, (model, opt_state), data=batches.state, config=config, metric=validation)
    step, (model, opt_state), data, config = checkpoints.restore((model, opt_state))

Only this module uses Orbax, through its `CheckpointManager`: the newer interface, still experimental, reports every
failed read as "incompatible handler" and stores a configuration as arrays.
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
    """A restored checkpoint: the step after which it was saved, the state, the data iterator's state, the config."""

    step: int
    state: PyTree
    data: Any
    config: dict[str, Any]


class Checkpoints:
    """Manager of a run's checkpoints, one folder per step below `directory`.

    Keeps the newest `keep_last` and the `keep_best` with the lowest metric. Only arrays are saved; static fields come
    from the tree passed to `restore`. With several processes, every process makes every call.

    `frozen` is a tree that training reads but does not change, such as the base model of an adapter. Checkpoints hold
    only a fingerprint of it (`zoo.train.fingerprint`), which `restore` compares.
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
        self._warned: set[Path] = set()

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
        are written to disk in the background.

        - `data`: the state of the data iterator, JSON; `config`: stored with it.
        - `metric`: lower is better.

        Deletes checkpoints of this and later steps, and unfinished ones.
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
            # Orbax refuses empty arrays; their shapes are in `about`.
            args=args.Composite(
                state=args.PyTreeSave({name: x for name, x in arrays.items() if x.size}),
                about=args.JsonSave(to_jsonable(about)),
            ),
            metrics=dict(metric=float(metric)) if metric is not None and math.isfinite(metric) else None,
            force=True,
        )

    def wait(self) -> None:
        """Block until the last save is on disk. **Raises** the error of a failed write."""
        self._manager.wait_until_finished()

    def restorable_steps(self) -> list[int]:
        """List the steps that can be restored, oldest first. Warns once about each damaged one, with the reason."""
        self.wait()
        for path in sorted(self.directory.glob(f"*{_UNFINISHED_SUFFIX}*")):
            self._warn_skipped(path, "it was never finished")
        found = {step: self._find_damage(step) for step in sorted(self._manager.all_steps())}
        for step, damage in found.items():
            if damage:
                self._warn_skipped(self.directory / str(step), damage)
        return [step for step, damage in found.items() if not damage]

    def latest_step(self) -> int | None:
        """Return the newest step that can be restored, or None."""
        return max(self.restorable_steps(), default=None)

    def restore(self, like: PyTree, step: int | None = None) -> RestoredCheckpoint:
        """Restore the checkpoint of `step`, by default the newest complete one.

        - `like`: a state like the one the run starts with, already placed on its mesh: modules, optimizer states, keys,
          arrays, or `jax.ShapeDtypeStruct`s with shardings. Names, shapes, dtypes, shardings and everything that is not
          an array come from it.

        **Raises** `FileNotFoundError` if there is no such checkpoint, and `ValueError`, with the first names that
        differ, if it belongs to another model or to other `frozen` parameters.
        """
        step = self._resolve_step(step)
        about = self._read_metadata(step)
        require_same_fingerprints(about.get("frozen", {}), self._frozen, self.directory / str(step))
        expected = _flatten_with_names(eqx.filter(like, _is_array))
        _require_same_arrays(about["leaves"], _describe_arrays(expected), self.directory / str(step))
        targets = {
            name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for name, x in expected.items() if x.size
        }
        read = self._orbax.args.PyTreeRestore(
            targets, restore_args=self._orbax.checkpoint_utils.construct_restore_args(targets)
        )
        arrays = self._manager.restore(step, args=self._orbax.args.Composite(state=read)).state
        for name in targets:
            # On several devices, arrays restored by Orbax cannot be donated; copies can.
            arrays[name] = jnp.copy(arrays[name])

        def fill_leaf(path: tuple, leaf: Any) -> Any:
            if not _is_array(leaf):
                return leaf
            return (
                arrays[_format_key_path(path)] if leaf.size else jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding)
            )

        state = jax.tree_util.tree_map_with_path(fill_leaf, like)
        return RestoredCheckpoint(step, state, about["data"], about["config"])

    def read_config(self, step: int | None = None) -> dict[str, Any]:
        """Read the configuration saved with the checkpoint of `step`, by default the newest complete one."""
        return self._read_metadata(self._resolve_step(step))["config"]

    def close(self) -> None:
        """Wait for the last save and stop Orbax's threads."""
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
        if path not in self._warned:
            _log.warning("%s: passed over, %s", path, reason)
            self._warned.add(path)

    def _read_metadata(self, step: int) -> dict[str, Any]:
        return self._manager.restore(step, args=self._orbax.args.Composite(about=self._orbax.args.JsonRestore())).about

    def _write_manifest(self) -> None:
        """Write the manifest of a complete checkpoint, just before Orbax renames it to its final name."""
        if jax.process_index() == 0:
            for folder in self.directory.glob(f"{self._saving}{_UNFINISHED_SUFFIX}*"):
                files = [path for path in folder.glob("*/**/*") if path.is_file()]
                write_json(
                    folder / _MANIFEST_FILE,
                    {str(path.relative_to(folder)): path.stat().st_size for path in sorted(files)},
                )

    def _find_damage(self, step: int) -> str | None:
        """Check a checkpoint's files against its manifest, by name and size; Orbax's own errors come late and vague."""
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
    """Return one line per entry that differs between two configurations."""
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
    """Map readable paths to leaves: `[0].stack.segments[1].norm.weight`."""
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

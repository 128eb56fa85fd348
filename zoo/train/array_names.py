"""Names, dtypes and shapes of a state's arrays, which a checkpoint stores next to the arrays and `restore` compares."""

import re
from collections.abc import Iterable, Mapping
from pathlib import PurePath
from typing import Any

import jax
from jaxtyping import PyTree


def flatten_with_names(tree: PyTree) -> dict[str, Any]:
    """Map readable paths to leaves: `[0].stack.segments[1].norm.weight`."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    named = {format_key_path(path): leaf for path, leaf in leaves}
    if len(named) < len(leaves):
        raise ValueError("two leaves of the state have the same path: a key of a mapping holds a dot or a bracket")
    return named


def format_key_path(path: tuple) -> str:
    """Format a key path of `jax.tree_util`: `[0].stack.segments[1].norm.weight`."""
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


def describe_arrays(arrays: Mapping[str, Any]) -> dict[str, str]:
    """Map each name to dtype and shape: `float32 [4, 128]`."""
    return {name: f"{x.dtype} {list(x.shape)}" for name, x in arrays.items()}


def require_same_arrays(
    saved: Mapping[str, str], expected: Mapping[str, str], checkpoint_path: PurePath, max_lines: int = 8
) -> None:
    """**Raises** `ValueError` unless both have the same names, dtypes and shapes."""
    names = [*expected, *(name for name in saved if name not in expected)]
    lines = [
        f"  {name}: {saved.get(name, 'absent')} in the checkpoint, {expected.get(name, 'absent')} here"
        for name in names
        if saved.get(name) != expected.get(name)
    ]
    if lines:
        if len(lines) > max_lines:
            more = f"  and {len(lines) - max_lines} more\n"
        else:
            more = ""
        advice = "Restore with the configuration that it was saved with, or start a run in another folder."
        if saved.keys() != expected.keys() and _drop_segments(saved) == _drop_segments(expected):
            advice += (
                " If only segments differ, another version split the layers otherwise: restore with that one, and pass "
                "the model on with zoo.save and zoo.load."
            )
        raise ValueError(
            f"{checkpoint_path} is of another model, or of another optimizer:\n"
            + "\n".join(lines[:max_lines])
            + f"\n{more}"
            f"{advice}"
        )


def _drop_segments(names: Iterable[str]) -> set[str]:
    """Return the names without the places of blocks in their stack."""
    return {re.sub(r"\.segments\[\d+\]\.blocks\[\d+\]", "", name) for name in names}

"""Read the model of a checkpoint in shapes, with the dtypes of its files."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from .directory import resolve_directory
from .resolve import Checkpoint, open_checkpoint


def read_shapes(directory: Path) -> Any:
    """Return the model of a checkpoint in shapes, with dtypes as stored. Reads headers only.

    **Raises** `CheckpointError` as `zoo.load` before it reads a tensor.
    """
    checkpoint = open_checkpoint(resolve_directory(directory))
    return set_dtypes(checkpoint.model, [array_dtypes[0] for array_dtypes in list_stored_dtypes(checkpoint)])


def list_stored_dtypes(checkpoint: Checkpoint) -> list[list[np.dtype]]:
    """Return the dtypes of each array of a checkpoint's model, as stored, or as built if no tensor holds it."""
    leaves = jax.tree.leaves(checkpoint.model)
    dtypes: list[dict[np.dtype, None]] = [{} for _ in leaves]
    for name, tensor in checkpoint.tensor_plans.items():
        for part in tensor.slices:
            dtypes[part.leaf][checkpoint.tensors[name].dtype] = None
    return [list(found) or [np.dtype(x.dtype)] for found, x in zip(dtypes, leaves, strict=True)]


def set_dtypes(model: Any, dtypes: Sequence[np.dtype]) -> Any:
    """Return a model in shapes with the dtypes of its arrays replaced."""
    leaves, treedef = jax.tree.flatten(model)
    retyped = [jax.ShapeDtypeStruct(x.shape, dtype) for x, dtype in zip(leaves, dtypes, strict=True)]
    return jax.tree.unflatten(treedef, retyped)

"""Read a training run that scripts/train_in_torch.py stored: hyperparameters, and the results of every step."""

import dataclasses
import itertools
import math
from pathlib import Path

import numpy as np

from zoo.models.hf.values import (
    NON_NEGATIVE_NUMBER,
    POSITIVE_NUMBER,
    WORD,
    ValueKind,
    integer,
    is_any_of,
    list_of,
    optional,
    table_of,
)
from zoo.weights.safetensors import CheckpointError, open_safetensors, read_json

INITIAL = "initial"
"""Folder of the checkpoint before the first step."""
_FACTS = "run.json"
_BELOW_ONE = ValueKind("a number from 0 to below 1", lambda value: NON_NEGATIVE_NUMBER.fits(value) and value < 1)
_KINDS = {
    "learning_rates": list_of(NON_NEGATIVE_NUMBER),
    "b1": _BELOW_ONE,
    "b2": _BELOW_ONE,
    "eps": NON_NEGATIVE_NUMBER,
    "weight_decay": NON_NEGATIVE_NUMBER,
    "clip": optional(POSITIVE_NUMBER),
    "dtype": ValueKind('"float32" or "bfloat16"', lambda value: is_any_of(value, ("float32", "bfloat16"))),
    "decayed": list_of(WORD),
    "parameters": table_of(list_of(integer(minimum=0))),
}


@dataclasses.dataclass(frozen=True)
class StepResults:
    """Results of one step. Tensors are by their names in the checkpoint."""

    loss: float
    gradient_norm: float
    """Norm of all gradients together, before clipping."""
    gradients: dict[str, np.ndarray]
    """Before clipping."""
    first_moments: dict[str, np.ndarray]
    second_moments: dict[str, np.ndarray]
    weights: dict[str, np.ndarray]
    """After the step, as are the moments."""


@dataclasses.dataclass(frozen=True)
class StoredRun:
    """Hyperparameters of AdamW, and where the steps are stored."""

    directory: Path
    learning_rates: list[float]
    """One per step."""
    b1: float
    b2: float
    eps: float
    weight_decay: float
    clip: float | None
    """Largest norm of all gradients together."""
    dtype: str
    """Dtype of the forward pass."""
    decayed: list[str]
    """Names of the parameters with weight decay."""
    parameters: dict[str, list[int]]
    """Shape of each parameter, in the order in which steps store them."""

    def read_step(self, step: int) -> tuple[dict[str, np.ndarray], StepResults]:
        """Return the batch of one step, `tokens` and `targets`, and PyTorch's results.

        **Raises** `CheckpointError` for a file that is missing or damaged, or lacks a result.
        """
        path = self.directory / f"step-{step:04}.safetensors"
        tensors = open_safetensors(path)

        def read(name: str) -> np.ndarray:
            if name not in tensors:
                raise CheckpointError(f"{path} has no {name}, but {', '.join(tensors)}")
            return tensors[name].read()

        joined = ("gradients", "first_moments", "second_moments", "weights")
        loss = _read_number(path, read("loss"))
        norm = _read_number(path, read("gradient_norm"))
        results = StepResults(loss, norm, **{name: self._split(path, name, read(name)) for name in joined})
        return {name: read(name) for name in ("tokens", "targets")}, results

    def _split(self, path: Path, name: str, joined: np.ndarray) -> dict[str, np.ndarray]:
        """Return the arrays of all parameters, which lie one after another."""
        sizes = [math.prod(shape) for shape in self.parameters.values()]
        if joined.shape != (sum(sizes),):
            raise CheckpointError(
                f"{path}: {name} is {list(joined.shape)}: expected [{sum(sizes)}], the numbers of all "
                f"parameters of {_FACTS}"
            )
        stops = itertools.accumulate(sizes)
        named = zip(self.parameters.items(), sizes, stops, strict=True)
        return {name: joined[stop - size : stop].reshape(shape) for (name, shape), size, stop in named}


def _read_number(path: Path, x: np.ndarray) -> float:
    if x.size != 1:
        raise CheckpointError(f"{path}: a loss or a norm is {list(x.shape)}: expected one number")
    return float(x.item())


def read_run(directory: str | Path) -> StoredRun:
    """Read the hyperparameters of a stored run.

    **Raises** `CheckpointError` if run.json is missing or damaged, or lacks a key.
    """
    path = Path(directory) / _FACTS
    if not path.is_file():
        raise CheckpointError(f"there is no {path}: expected a run of scripts/train_in_torch.py")
    facts = read_json(path)
    for name, kind in _KINDS.items():
        if name not in facts:
            raise CheckpointError(f"{path} has no {name}")
        if error := kind.find_error(facts[name]):
            raise CheckpointError(f"{path}: {name} {error}")
    return StoredRun(Path(directory), **{name: facts[name] for name in _KINDS})

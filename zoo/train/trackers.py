"""Experiment trackers for a run's metrics: TensorBoard, Weights & Biases, any object with `log` and `close`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from zoo._optional import import_optional


@runtime_checkable
class Tracker(Protocol):
    """The interface of a tracker."""

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Log `values`, plain Python numbers, for `step`. Steps are in order."""
        ...

    def close(self) -> None:
        """Write everything pending. The last call."""
        ...


class TensorBoard:
    """Write scalars to TensorBoard event files in `directory`."""

    def __init__(self, directory: Path):
        self._writer = import_optional("tensorboardX", "pip install tensorboardX").SummaryWriter(str(directory))

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            if isinstance(value, int | float):
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """Log to a Weights & Biases run; `options` go to `wandb.init` (project, name, mode="offline", ...)."""

    def __init__(self, directory: Path, *, config: Mapping[str, Any], **options: Any):
        wandb = import_optional("wandb", "pip install wandb")
        self._run = wandb.init(dir=str(directory), config=dict(config), **options)

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()

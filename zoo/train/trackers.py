"""Other places for metrics: anything with `log` and `close`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from zoo._optional import import_optional


@runtime_checkable
class Tracker(Protocol):
    """Takes numbers by step, already fetched and plain."""

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Take `values` of `step`; steps come in order."""
        ...

    def close(self) -> None:
        """Write what is outstanding. Nothing comes after it."""
        ...


class TensorBoard:
    """Scalars for TensorBoard, in event files in `directory`."""

    def __init__(self, directory: Path):
        self._writer = import_optional("tensorboardX", "pip install tensorboardX").SummaryWriter(str(directory))

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            if isinstance(value, int | float):
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run of Weights & Biases; `options` are those of `wandb.init` (project, name, mode="offline", ...)."""

    def __init__(self, directory: Path, *, config: Mapping[str, Any], **options: Any):
        wandb = import_optional("wandb", "pip install wandb")
        self._run = wandb.init(dir=str(directory), config=dict(config), **options)

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()

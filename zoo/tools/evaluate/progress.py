"""A progress bar of an evaluation on the terminal."""

import sys
from typing import Any


class EvaluationProgress:
    """Progress bar on standard error, if it is a terminal and the bar is `shown`."""

    def __init__(self, total: int, *, shown: bool = True):
        self._progress: Any = None
        if shown and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (
                MofNCompleteColumn(),
                BarColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.description}", markup=False),
            )
            self._progress = Progress(*columns, console=Console(stderr=True), transient=True)
            self._task = self._progress.add_task("first batch (compiles, unless cached)", total=total)

    def __enter__(self) -> "EvaluationProgress":
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()

    def advance(self, count: int, message: str) -> None:
        if self._progress is not None:
            self._progress.update(self._task, advance=count, description=message)

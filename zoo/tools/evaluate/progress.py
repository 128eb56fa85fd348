"""A progress bar of an evaluation on the terminal."""

import contextlib
import sys
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def show_progress(total: int, unit: str, *, shown: bool) -> Iterator[Callable[[int], object]]:
    """Show a bar on standard error, if it is a terminal and the bar is `shown`. Yields a function that advances it."""
    if not (shown and sys.stderr.isatty()):
        yield lambda count: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = MofNCompleteColumn(), BarColumn(), TimeRemainingColumn(), TextColumn("{task.description}", markup=False)
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("first batch (compiles, unless cached)", total=total)
        yield lambda count: bar.update(task, advance=count, description=unit)

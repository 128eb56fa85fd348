"""Progress of a run: a bar on a terminal, plain lines elsewhere."""

import math
import sys
import time
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from zoo._terminal import escape_controls, show

_FIRST_STEP = "first step (compiles, unless cached)"


class Throughput:
    """Steps, tokens and FLOPs per second between two calls of `tick`, and the time left.

    `tokens` and `flops` are per step, over all processes, and may be set later; 0 is not reported. `peak` are the FLOPs
    per second of all devices by their data sheet; with them `mfu` is model FLOPs utilization (PaLM, arXiv:2204.02311,
    appendix B). The time before the first tick, which includes compilation, counts only toward `seconds`.
    """

    def __init__(self, total: int, *, tokens: int = 0, flops: float | int = 0, peak: float | int = 0):
        self._total = total
        self.tokens = tokens
        self.flops = flops
        self._peak = peak
        self._start = time.perf_counter()
        self._first: tuple[int, float] | None = None
        self._before: tuple[int, float] | None = None

    def tick(self, step: int) -> dict[str, float | int]:
        """Measure after `step` steps: `seconds`, and from the second call on rates and `seconds_left`."""
        now = time.perf_counter()
        measured = dict(seconds=now - self._start)
        if self._first is None or self._before is None:
            self._first = self._before = step, now
        elif step > self._before[0]:
            speed = (step - self._before[0]) / (now - self._before[1])
            for name, amount in (("steps", 1), ("tokens", self.tokens), ("flops", self.flops)):
                if amount:
                    measured[f"{name}_per_second"] = speed * amount
            if self.flops and self._peak:
                measured["mfu"] = speed * self.flops / self._peak
            measured["seconds_left"] = (self._total - step) * (now - self._first[1]) / (step - self._first[0])
            self._before = step, now
        return measured


@runtime_checkable
class Progress(Protocol):
    """The interface of a progress display."""

    def update(self, step: int, values: Mapping[str, Any], throughput: Mapping[str, float | int]) -> None:
        """Show the metrics of `step` and the result of `Throughput.tick`."""
        ...

    def print_line(self, text: str) -> None:
        """Print a line above the display."""
        ...

    def close(self) -> None:
        """Stop updating; the last state stays on the screen."""
        ...


class LineProgress:
    """One line per update: for pipes, files and CI."""

    def __init__(self, total: int):
        self._total = total

    def update(self, step: int, values: Mapping[str, Any], throughput: Mapping[str, float | int]) -> None:
        show(f"{step:>{len(str(self._total))}}/{self._total}  {format_metrics(values, throughput)}")

    def print_line(self, text: str) -> None:
        show(text)

    def close(self) -> None:
        pass


class ProgressBar:
    """A progress bar with a line of metrics, each at its last logged value."""

    def __init__(self, total: int, *, start: int = 0):
        from rich.console import Group
        from rich.live import Live
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
        from rich.progress import Progress as RichProgress
        from rich.table import Column
        from rich.text import Text

        self._values: dict[str, Any] = {}
        self._text = Text()
        one_line = TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True))
        self._bar = RichProgress(MofNCompleteColumn(), BarColumn(bar_width=24), one_line)
        self._task = self._bar.add_task(_FIRST_STEP, total=total, completed=start)
        self._live = Live(Group(self._bar, self._text), refresh_per_second=4)
        self._live.start()

    def update(self, step: int, values: Mapping[str, Any], throughput: Mapping[str, float | int]) -> None:
        self._values |= values
        self._text.plain = format_metrics(self._values, {})
        self._bar.update(self._task, completed=step, description=format_metrics({}, throughput))

    def print_line(self, text: str) -> None:
        self._live.console.print(escape_controls(text, keep="\n\t"), markup=False, emoji=False, highlight=False)

    def close(self) -> None:
        self._live.stop()


class SilentProgress:
    """No display: for all processes but the first, and for tests."""

    def update(self, step: int, values: Mapping[str, Any], throughput: Mapping[str, float | int]) -> None:
        pass

    def print_line(self, text: str) -> None:
        pass

    def close(self) -> None:
        pass


def make_progress(total: int, *, start: int = 0) -> Progress:
    """Return a bar if stdout is a terminal, else plain lines. Both begin by saying that the first step may compile."""
    if sys.stdout.isatty():
        return ProgressBar(total, start=start)
    if start < total:
        show(_FIRST_STEP)
    return LineProgress(total)


def format_metrics(values: Mapping[str, Any], throughput: Mapping[str, float | int]) -> str:
    """Format metrics, time left and rates in one line: `loss 1.234  1:05 left  51.2k tokens/s  310G FLOP/s`.

    Most important first, since a narrow terminal cuts off the end. Skips arrays.
    """
    values = {name: value for name, value in values.items() if not isinstance(value, list)}
    parts = [f"{name.replace('_', ' ')} {_format_number(value)}" for name, value in values.items()]
    if throughput.get("seconds_left"):
        parts.append(f"{format_duration(throughput['seconds_left'])} left")
    return "  ".join(parts + [write(throughput[name]) for name, write in RATE_FORMATS.items() if name in throughput])


def format_si(value: float | int) -> str:
    """Format with three digits and an SI prefix: `51.2k`, `1.3M`."""
    power = 0
    if abs(value) >= 1:
        power = min(int(math.log10(abs(value)) // 3), 5)
    return f"{value / 1000**power:.3g}{('', 'k', 'M', 'G', 'T', 'P')[power]}"


RATE_FORMATS = {
    "tokens_per_second": lambda value: f"{format_si(value)} tokens/s",
    "flops_per_second": lambda value: f"{format_si(value)} FLOP/s",
    "mfu": lambda value: f"{value:.1%} MFU",
}


def format_duration(seconds: float | int) -> str:
    """Format as hours, minutes and seconds: `1:02:03`, `2:03`."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02}:{seconds:02}"
    return f"{minutes}:{seconds:02}"


def _format_number(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    if 1e-2 <= abs(value) < 1e4:
        return f"{value:.3f}"
    return f"{value:.3g}"

"""How far a run is: a bar on a terminal, plain lines elsewhere."""

import math
import sys
import time
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable


class Throughput:
    """Steps, tokens and floating-point operations a second, from one `tick` to the next, and the time that is left.

    `tokens` and `flops` are those of one step in all processes together; what is 0 is not reported. The time before the
    first tick, which holds the compilation, counts for `seconds` alone.
    """

    def __init__(self, total: int, *, tokens: int = 0, flops: float | int = 0):
        self._total = total
        self._per_step = {"steps": 1, "tokens": tokens, "flops": flops}
        self._start = time.perf_counter()
        self._first: tuple[int, float] | None = None
        self._before: tuple[int, float] | None = None

    def tick(self, step: int) -> dict[str, float | int]:
        """What the clock says now that `step` steps are done."""
        now = time.perf_counter()
        pace = dict(seconds=now - self._start)
        if self._first is None or self._before is None:
            self._first = self._before = step, now
        elif step > self._before[0]:
            speed = (step - self._before[0]) / (now - self._before[1])
            pace |= {f"{name}_per_second": speed * each for name, each in self._per_step.items() if each}
            pace["seconds_left"] = (self._total - step) * (now - self._first[1]) / (step - self._first[0])
            self._before = step, now
        return pace


@runtime_checkable
class Progress(Protocol):
    """Shows where a run of `total` steps is."""

    def update(self, step: int, values: Mapping[str, Any], throughput: Mapping[str, float | int]) -> None:
        """Show the metrics of `step` and the pace, as `Pace.tick` gives it."""
        ...

    def print_line(self, text: str) -> None:
        """Show a line of text that stays."""
        ...

    def close(self) -> None:
        """Leave the last state on the screen."""
        ...


class LineProgress:
    """A line for each update: for pipes, files and machines that run tests."""

    def __init__(self, total: int):
        self._total = total

    def update(self, step: int, values: Mapping[str, Any], throughput: Mapping[str, float | int]) -> None:
        print(f"{step:>{len(str(self._total))}}/{self._total}  {format_metrics(values, throughput)}", flush=True)

    def print_line(self, text: str) -> None:
        print(text, flush=True)

    def close(self) -> None:
        pass


class ProgressBar:
    """A bar and a line of metrics at the foot of a terminal. Metrics that are logged seldom stay as they were last."""

    def __init__(self, total: int, *, start: int = 0):
        from rich.console import Group
        from rich.live import Live
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
        from rich.progress import Progress as RichProgress
        from rich.table import Column
        from rich.text import Text

        self._values: dict[str, Any] = {}
        self._text = Text()
        one_line = TextColumn("{task.description}", table_column=Column(no_wrap=True))
        self._bar = RichProgress(MofNCompleteColumn(), BarColumn(bar_width=24), one_line)
        self._task = self._bar.add_task("compiling", total=total, completed=start)
        self._live = Live(Group(self._bar, self._text), refresh_per_second=4)
        self._live.start()

    def update(self, step: int, values: Mapping[str, Any], throughput: Mapping[str, float | int]) -> None:
        self._values |= values
        self._text.plain = format_metrics(self._values, {})
        self._bar.update(self._task, completed=step, description=format_metrics({}, throughput))

    def print_line(self, text: str) -> None:
        self._live.console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        self._live.stop()


class SilentProgress:
    """Shows nothing: for all processes but the first, and for tests."""

    def update(self, step: int, values: Mapping[str, Any], throughput: Mapping[str, float | int]) -> None:
        pass

    def print_line(self, text: str) -> None:
        pass

    def close(self) -> None:
        pass


def make_progress(total: int, *, start: int = 0) -> Progress:
    """A bar where the output is a terminal, lines where it is not."""
    return ProgressBar(total, start=start) if sys.stdout.isatty() else LineProgress(total)


def format_metrics(values: Mapping[str, Any], throughput: Mapping[str, float | int]) -> str:
    """Metrics, time left and speed in one line: `loss 1.234  1:05 left  51.2k tokens/s  310G FLOP/s`.

    What a narrow terminal cuts off stands last. Arrays, which no line could hold, are left out.
    """
    values = {name: value for name, value in values.items() if not isinstance(value, list)}
    parts = [f"{name.replace('_', ' ')} {_format_number(value)}" for name, value in values.items()]
    if throughput.get("seconds_left"):
        parts.append(f"{format_duration(throughput['seconds_left'])} left")
    return "  ".join(parts + [write(throughput[name]) for name, write in RATE_FORMATS.items() if name in throughput])


def format_si(value: float | int) -> str:
    """Three digits and a decimal prefix: `51.2k`, `1.3M`."""
    power = min(int(math.log10(abs(value)) // 3), 5) if abs(value) >= 1 else 0
    return f"{value / 1000**power:.3g}{('', 'k', 'M', 'G', 'T', 'P')[power]}"


RATE_FORMATS = {
    "tokens_per_second": lambda value: f"{format_si(value)} tokens/s",
    "flops_per_second": lambda value: f"{format_si(value)} FLOP/s",
}


def format_duration(seconds: float | int) -> str:
    """Hours, minutes and seconds: `1:02:03`, `2:03`."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def _format_number(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:.3f}" if 1e-2 <= abs(value) < 1e4 else f"{value:.3g}"

"""Run cases in a process of their own, which may hang, die or take all memory, and count their outcomes."""

import collections
import multiprocessing
import resource
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

MEMORY = 2**30
RAW, HANG, LARGE = "raw traceback", "hang, or dead", "memory of 1 GB"


class Watched:
    """A process that calls `function(case)` for one case after another.

    `function` returns an outcome and a detail. A case that takes longer than `seconds` is a hang, and the next one
    gets a new process. `first` is a case that warms the process up, with all the time it needs.
    """

    def __init__(self, function: Callable[[Any], tuple[str, str]], first: Any, *, seconds: float):
        self._function, self._first, self._seconds = function, first, seconds
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, there = context.Pipe()
        self._process = context.Process(target=_work, args=(there, self._function), daemon=True)
        self._process.start()
        there.close()
        self._connection.send(self._first)
        self._connection.recv()

    def run(self, case: Any) -> tuple[str, str]:
        """Return the outcome of one case, and a detail."""
        try:
            self._connection.send(case)
            if self._connection.poll(self._seconds):
                return self._connection.recv()
        except (EOFError, OSError):
            pass
        self.close()
        self._start()
        return HANG, ""

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.join()


def _work(connection: Any, function: Callable[[Any], tuple[str, str]]) -> None:
    while True:
        case = connection.recv()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        try:
            outcome, detail = function(case)
        except BaseException:
            outcome, detail = RAW, traceback.format_exc()
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
        connection.send((LARGE, f"{grown:,} bytes more") if grown > MEMORY else (outcome, detail))


def print_table(
    counts: Mapping[str, Mapping[str, int]], outcomes: Sequence[str], forbidden: Mapping[str, list[str]], show: int
) -> int:
    """Print a row of outcomes per kind of case, and details of the forbidden ones. Return 1 if there is any, else 0."""
    total = collections.Counter()
    for row in counts.values():
        total.update(row)
    shown = [outcome for outcome in outcomes if total[outcome] or outcome not in (LARGE,)]
    width = max(map(len, [*counts, "kind"]))
    print("  ".join([f"{'kind':{width}}", *(f"{outcome:>15}" for outcome in shown)]))
    for kind, row in [*sorted(counts.items()), ("all", total)]:
        print("  ".join([f"{kind:{width}}", *(f"{row.get(outcome, 0):>15,}" for outcome in shown)]))
    for outcome, details in forbidden.items():
        for detail in details[:show]:
            print(f"\n{outcome}: {detail}")
    return int(any(forbidden.values()))

"""Run cases in a process of their own, which may hang, die or take all memory, and count their outcomes."""

import argparse
import collections
import multiprocessing
import random
import resource
import shutil
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
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


def parse_options(description: str | None, *, cases: int) -> argparse.Namespace:
    """Parse the flags that all attacks by mutation share; `cases` is the default number of mutations."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=cases, help="number of mutations")
    parser.add_argument("--seed", type=int, default=0, help="seed of the mutations")
    parser.add_argument("--show", type=int, default=3, help="details to print of each forbidden outcome")
    return parser.parse_args()


def attack(
    read: Callable[[Any], tuple[str, str]],
    sources: Sequence[Path],
    make_case: Callable[[int, random.Random, Path], tuple[str, str, Path]],
    options: argparse.Namespace,
    *,
    outcomes: Sequence[str],
    num_allowed: int,
    seconds: float,
) -> int:
    """Read mutated directories one by one in a watched process, and print the table of outcomes.

    - `make_case(number, rng, directory)` writes a mutated directory, and returns the kind of mutation, what it did,
      and the directory that it mutated. `read` gets both directories.
    - `outcomes`: the first `num_allowed` are allowed.

    Returns 1 if there was a forbidden one, else 0.
    """
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    forbidden: dict[str, list[str]] = {outcome: [] for outcome in outcomes[num_allowed:]}
    with tempfile.TemporaryDirectory() as folder:
        watched = Watched(read, (sources[0], sources[0]), seconds=seconds)
        for number in range(options.cases):
            directory = Path(folder) / str(number)
            kind, what, source = make_case(number, random.Random(f"{options.seed} {number}"), directory)
            outcome, detail = watched.run((directory, source))
            shutil.rmtree(directory)
            counts[kind][outcome] += 1
            if outcome in forbidden:
                forbidden[outcome].append(f"case {number}, {source.name}, {what}\n{detail}")
        watched.close()
    print(f"{options.cases:,} mutations of {len(sources)} originals, seed {options.seed}")
    return print_table(counts, outcomes, forbidden, options.show)


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

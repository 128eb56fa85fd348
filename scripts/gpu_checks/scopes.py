"""Seconds of a step by module, from a profiler's trace."""

import collections
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from zoo.inspect.hlo import HloModule, parse_module
from zoo.inspect.scopes import find_scope

STEPS = 3


def time_scopes(run: Any) -> dict[str, Any]:
    """Trace three calls of an entrant; return the seconds of one by pass and module, the largest first, and in all.

    The profiler names an operation as the compiled program does, which has its scope.
    """
    module = parse_module(run.program().text)
    seconds: dict[tuple[str, str], float] = collections.Counter()
    for name, spent in trace_operations(run).items():
        seconds[_find_module(module, name)] += spent / STEPS
    rows = sorted(([*scope, spent] for scope, spent in seconds.items()), key=lambda row: -row[-1])
    return {"scopes": rows[:24], "traced": sum(seconds.values())}


def trace_operations(run: Callable[[], object]) -> dict[str, float]:
    """Return the seconds of each operation of the compiled program in the trace of `STEPS` calls."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(STEPS):
                run()
        path = next(Path(folder).glob("**/*.xplane.pb"))
        data = jax.profiler.ProfileData.from_file(str(path))
        seconds: dict[str, float] = collections.Counter()
        for plane in data.planes:
            for line in plane.lines:
                for event in line.events:
                    operation = dict(event.stats).get("hlo_op")
                    if operation is not None:
                        seconds[str(operation)] += event.duration_ns / 1e9
    return seconds


def _find_module(module: HloModule, name: str) -> tuple[str, str]:
    """Return the pass and the module of an instruction."""
    for computation in module.computations.values():
        if name in computation:
            scope = find_scope(module, computation[name], computation)
            return scope.phase, scope.modules
    return "", name

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
    seconds = collections.defaultdict[tuple[str, str], float](float)
    for name, spent in trace_operations(run).items():
        if (scope := _find_scope(module, name)) is not None:
            seconds[scope] += spent / STEPS
    largest = sorted(seconds, key=lambda scope: -seconds[scope])[:24]
    return {"scopes": [[*scope, seconds[scope]] for scope in largest], "traced": sum(seconds.values())}


def trace_operations(run: Callable[[], object]) -> dict[str, float]:
    """Return the seconds of each operation in the trace of `STEPS` calls: on a GPU of its streams, elsewhere of all
    threads."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(STEPS):
                run()
        path = next(Path(folder).glob("**/*.xplane.pb"))
        planes = list(jax.profiler.ProfileData.from_file(str(path)).planes)
        lines = [line for plane in planes if plane.name.startswith("/device:GPU") for line in plane.lines]
        streams = [line for line in lines if line.name.startswith("Stream")]
        seconds = collections.defaultdict[str, float](float)
        for line in streams or [line for plane in planes for line in plane.lines]:
            for event in line.events:
                name = dict(event.stats).get("hlo_op", event.name if streams else None)
                if name is not None:
                    seconds[str(name)] += event.duration_ns / 1e9
    return seconds


def _find_scope(module: HloModule, name: str) -> tuple[str, str] | None:
    """Return the pass and the module of an operation, or None for one whose time is that of others."""
    for computation in module.computations.values():
        if name in computation:
            if computation[name].opcode in ("while", "call", "conditional"):
                return None
            scope = find_scope(module, computation[name], computation)
            return scope.phase, scope.modules
    return "", name

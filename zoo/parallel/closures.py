"""Detect arrays that a function closes over instead of taking them as arguments.

A closed-over array has no sharding: it would be replicated, a batch would not be sharded over `data`, and a model would
be compiled in as a constant.
"""

import dis
import functools
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax


def refuse_closed_over_arrays(fn: Callable) -> None:
    """**Raises** `ValueError`, naming the variable, if `fn` captures an array: in its closure, in a global variable it
    reads, in a `functools.partial`, or in the object that it is bound to."""
    for name, value in _find_closed_over_arrays(fn, set()):
        kind = type(value).__name__ if isinstance(value, eqx.Module) else "array"
        fn_name = getattr(inspect.unwrap(fn), "__name__", type(fn).__name__)
        raise ValueError(
            f"{fn_name} closes over {name!r} ({kind}), which then has no sharding. Pass it as an argument: "
            f"zoo.value_and_grad({fn_name}, mesh)(model, batch, {name}) calls {fn_name}(model, batch, {name})."
        )


def _find_closed_over_arrays(fn: Any, seen: set[int]) -> Iterator[tuple[str, Any]]:
    if id(fn) in seen:
        return
    seen.add(id(fn))
    if isinstance(fn, functools.partial):
        yield from _yield_if_has_array("partial", (fn.args, fn.keywords))
        yield from _find_closed_over_arrays(fn.func, seen)
    elif hasattr(fn, "__self__") and hasattr(fn, "__func__"):  # a method, of Python or of an Equinox module
        yield from _yield_if_has_array("self", fn.__self__)
        yield from _find_closed_over_arrays(fn.__func__, seen)
    elif isinstance(fn, types.FunctionType):
        for name, value in _iterate_outer_variables(fn):
            yield from _yield_if_has_array(name, value)
            same_file = getattr(value, "__module__", None) == fn.__module__
            if same_file or isinstance(value, functools.partial):
                yield from _find_closed_over_arrays(value, seen)
    else:
        yield from _yield_if_has_array(type(fn).__name__, fn)


def _iterate_outer_variables(fn: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield name and value of each variable that `fn` reads from outside: its closure, and the globals read by it or by
    functions defined in it."""
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    codes = [fn.__code__]
    while codes:
        code = codes.pop()
        codes += [inner for inner in code.co_consts if isinstance(inner, types.CodeType)]
        # not code.co_names, which also holds the names of attributes
        global_names = {str(step.argval) for step in dis.get_instructions(code) if step.opname == "LOAD_GLOBAL"}
        yield from ((name, fn.__globals__[name]) for name in sorted(global_names) if name in fn.__globals__)


def _yield_if_has_array(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if any(isinstance(x, jax.Array) for x in jax.tree.leaves(value)):
        yield name, value

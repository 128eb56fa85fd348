"""Name scopes for profiler traces, after the fields of modules: `Decoder/stack/Block/mixer.Attention/query`.

A profiler shows each operation of a compiled program with the `jax.named_scope`s it was traced in. The scope of a
module is the field of the calling module that holds it, with its class if the field is `named_by_class()`. A module
without a calling module, or that is in no field of it (a block taken out of its stack), has its class as scope.
"""

import contextvars
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax

SCOPED_METHODS = ("__call__", "transposed", "hidden", "logits", "grouped", "per_head", "per_head_transposed")
"""Methods that run in a name scope, in every class that defines them."""

_calling_modules: contextvars.ContextVar[tuple[Any, ...]] = contextvars.ContextVar("calling_modules", default=())
"""The modules whose methods are running in this thread, outermost first."""


def calling_modules() -> tuple[Any, ...]:
    """Return the modules whose methods are running in this thread, outermost first."""
    return _calling_modules.get()


def scoped(method: Callable, named_by_class: str) -> Callable:
    """Wrap `method` to run in the scope of its module. `named_by_class` is the metadata key of fields whose scope
    includes the class. A module that calls itself adds no second scope."""

    @functools.wraps(method)
    def run_in_scope(self, *args, **kwargs):
        callers = _calling_modules.get()
        parent = callers[-1] if callers else None
        if parent is self:
            return method(self, *args, **kwargs)
        token = _calling_modules.set((*callers, self))
        try:
            with jax.named_scope(_scope_name(self, parent, named_by_class)):
                return method(self, *args, **kwargs)
        finally:
            _calling_modules.reset(token)

    return run_in_scope


def _scope_name(module: Any, parent: Any, named_by_class: str) -> str:
    """Return the field of `parent` that holds `module`, or the only field that holds its class: `gather` and JAX
    transformations make new objects."""
    cls = type(module)
    if parent is None:
        return cls.__name__
    names = [name for name, value in vars(parent).items() if value is module]
    names = names or [name for name, value in vars(parent).items() if type(value) is cls]
    if len(names) != 1:
        return cls.__name__
    field = next(field for field in dataclasses.fields(parent) if field.name == names[0])
    if field.metadata.get(named_by_class):
        return f"{field.name}.{cls.__name__}"
    return field.name

"""Names in a trace that read like the source: `Decoder/stack/Block/mixer.Attention/query`.

A profiler shows the operations of a compiled program, and each knows the scopes that it was traced in
(`jax.named_scope`). A module's scope is the field through which its parent called it; of a field that may hold one of
several classes (`either`) with the class. A module that no parent called, or not as it stands in a field (a block that
was taken out of its stack), goes by its class alone.
"""

import contextvars
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax

SCOPED_METHODS = ("__call__", "transposed", "hidden", "logits", "grouped", "per_head", "per_head_transposed")
"""The methods of modules that compute: those that are a scope, wherever a class defines them."""

_calling_module: contextvars.ContextVar[Any] = contextvars.ContextVar("within", default=None)
"""The module whose method is being run, in this thread."""


def scoped(method: Callable, named_by_class: str) -> Callable:
    """`method` of a module, in the module's scope; `either` marks the fields that go with their class. A module that
    calls itself is in its scope already."""

    @functools.wraps(method)
    def named(self, *args, **kwargs):
        parent = _calling_module.get()
        if parent is self:
            return method(self, *args, **kwargs)
        token = _calling_module.set(self)
        try:
            with jax.named_scope(_scope_name(self, parent, named_by_class)):
                return method(self, *args, **kwargs)
        finally:
            _calling_module.reset(token)

    return named


def _scope_name(module: Any, parent: Any, named_by_class: str) -> str:
    """What `parent` calls `module`: the field that holds it, or the only one that holds its class, since `gather` and
    transformations make a new object of it."""
    own = type(module)
    if parent is None:
        return own.__name__
    same = [name for name, value in vars(parent).items() if value is module]
    found = same or [name for name, value in vars(parent).items() if type(value) is own]
    if len(found) != 1:
        return own.__name__
    field = next(field for field in dataclasses.fields(parent) if field.name == found[0])
    return f"{field.name}.{own.__name__}" if field.metadata.get(named_by_class) else field.name

"""Name scopes for profiler traces, and taps of values, around the methods of modules.

Scopes are the fields of modules, `Decoder/stack/Block/mixer.Attention/query`. A profiler shows each operation of a
compiled program with the `jax.named_scope`s it was traced in. The scope of a module is the field of the calling module
that holds it, with its class if the field is `named_by_class()`. A module without a calling module, or that is in no
field of it (a block taken out of its stack), has its class as scope.

Taps (`zoo.parallel.taps`) name values by parameter paths, `layers.*.attention.query`.
"""

import contextvars
import dataclasses
import fnmatch
import functools
import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, get_args

import equinox as eqx
import jax
from jaxtyping import Array, Shaped

from .dims import name_value_dims
from .fields import NAMED_BY_CLASS, STACKED, WRAPPED, to_snake_case
from .taps import Taps, active_taps, current_taps

SCOPED_METHODS = ("__call__", "transposed", "hidden", "logits", "grouped", "per_head", "per_head_transposed")
"""Methods that run in a name scope, in every class that defines them."""

_calling_modules: contextvars.ContextVar[tuple[Any, ...]] = contextvars.ContextVar("calling_modules", default=())
"""The modules whose methods are running in this thread, outermost first."""


def calling_modules() -> tuple[Any, ...]:
    """Return the modules whose methods are running in this thread, outermost first."""
    return _calling_modules.get()


def scoped(method: Callable) -> Callable:
    """Wrap `method` to run in the scope of its module. A module that calls itself adds no second scope."""

    @functools.wraps(method)
    def run_in_scope(self, *args, **kwargs):
        callers = _calling_modules.get()
        parent = callers[-1] if callers else None
        if parent is self:
            return method(self, *args, **kwargs)
        token = _calling_modules.set((*callers, self))
        try:
            with jax.named_scope(_scope_name(self, parent)):
                return _run_tapped(method, (*callers, self), args, kwargs)
        finally:
            _calling_modules.reset(token)

    return run_in_scope


def _scope_name(module: Any, parent: Any) -> str:
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
    if field.metadata.get(NAMED_BY_CLASS):
        return f"{field.name}.{cls.__name__}"
    return field.name


def tap_value(name: str, x: Shaped[Array, "..."], dims: tuple[str, ...]) -> Shaped[Array, "..."]:
    """Pass a value that no module returns, such as the queries of attention, through the active taps: its name is
    `name` below the module that runs."""
    taps = current_taps()
    if taps is None or (path := _find_path(_calling_modules.get(), taps)) is None:
        return x
    return taps.tap((*path, name), x, dims)


def asks_for(name: str) -> bool:
    """Return True if the value `name` of the module that runs is read or edited, so that it has to be computed."""
    taps = current_taps()
    if taps is None or (path := _find_path(_calling_modules.get(), taps)) is None:
        return False
    return taps.asks((*path, name))


def _run_tapped(method: Callable, modules: tuple[Any, ...], args: tuple, kwargs: dict[str, Any]) -> Any:
    """Run a method of the last module, with its own edits, and its input and result passed through the active taps."""
    module = modules[-1]
    taps = current_taps()
    if edits := vars(module).get("edits"):
        depth = len(modules) - 1
        taps = (taps or Taps(())).with_edits(edits, depth)
        with active_taps(taps):
            result = method(module, *args, **kwargs)
        if method.__name__ in ("__call__", "hidden"):
            taps.check_edits(depth)
        return result
    hides_value = method.__name__ != "__call__" or module.hides_value
    if taps is None or hides_value or not (path := _find_path(modules, taps)):
        return method(module, *args, **kwargs)
    types = _find_types(method)
    if args and not hasattr(module, "input"):  # there the name is that field's
        args = (_tap((*path, "input"), module, types[0], args[0], taps), *args[1:])
    return _tap(path, module, types[1], method(module, *args, **kwargs), taps)


def _tap(path: tuple[str, ...], module: Any, annotation: Any, value: Any, taps: Taps) -> Any:
    """Pass an array through the taps, or the `x` of hidden states, or the first of several results."""
    if eqx.is_array(value):
        return taps.tap(path, value, name_value_dims(module, annotation, value.ndim))
    if isinstance(value, tuple) and value:
        first = get_args(annotation)[0] if get_args(annotation) else None
        return (_tap(path, module, first, value[0], taps), *value[1:])
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return value
    types = {field.name: field.type for field in dataclasses.fields(value)}
    if "x" not in types:
        return value
    return dataclasses.replace(value, x=_tap(path, value, types["x"], getattr(value, "x"), taps))  # noqa: B009


@functools.cache
def _find_types(method: Callable) -> tuple[Any, Any]:
    """Return the annotations of the first argument of a method, and of its result."""
    signature = inspect.signature(method)
    first = list(signature.parameters.values())[1:2]
    return first[0].annotation if first else None, signature.return_annotation


def _find_path(modules: Sequence[Any], taps: Taps) -> tuple[str, ...] | None:
    """Return the path of the last module from the first: the names of its parameters, without theirs. None for a module
    without values of its own: one that another wraps, experts, and a module in no field of its caller."""
    path: list[str] = []
    for parent, module in itertools.pairwise(modules):
        word = _find_word(parent, module, taps)
        if word is None or (not word and module is modules[-1]):
            return None
        path.append(word)
    return tuple(path)


def _find_word(parent: Any, module: Any, taps: Taps) -> str | None:
    """Return the name of a module below the module that calls it: "" if it is wrapped, None if it has none. A copy,
    with other arrays, has the name of the only field that holds its class."""
    if getattr(parent, "holds_layers", False):
        return "*"
    same = [module, *(original for made, original in taps.log.aliases if made is module)]
    below = list(_list_descendants(parent))
    if found := [path for path, child in below if any(child is x for x in same)]:
        return found[0]
    copies = [path for path, child in _list_children(parent) if type(child) is type(module)]
    return copies[0] if len(copies) == 1 else None


def _list_descendants(module: Any) -> Iterator[tuple[str | None, Any]]:
    """Yield the modules below a module, nearest first, each after its path: None for those in stacked modules."""
    level: list[tuple[str | None, Any]] = [("", module)]
    while level:
        children = [
            (None if word is None or path is None else ".".join(filter(None, (path, word))), child)
            for path, parent in level
            for word, child in _list_children(parent)
        ]
        yield from children
        level = children


def _list_children(module: Any) -> Iterator[tuple[str | None, Any]]:
    """Yield the modules in the fields of a module, each after its name in paths: "" for one that this module wraps,
    None for modules that are stacked."""
    is_wrapper = any(WRAPPED in field.metadata for field in dataclasses.fields(module))
    adapter = getattr(module, "adapter_name", "") if is_wrapper else ""
    for field in dataclasses.fields(module):
        name = f"{adapter}.{field.name}" if adapter else field.name
        value = vars(module).get(field.name)
        children = value if isinstance(value, tuple) else (value,)
        for number, child in enumerate(children):
            if not dataclasses.is_dataclass(child):
                continue
            if STACKED in field.metadata:
                yield None, child
            elif WRAPPED in field.metadata:
                yield "", child
            elif getattr(child, "holds_layers", False):
                yield "layers", child
            elif NAMED_BY_CLASS in field.metadata:
                yield to_snake_case(type(child).__name__), child
            else:
                yield f"{name}.{number}" if isinstance(value, tuple) else name, child


def has_value(module: Any, name: str) -> bool:
    """Return True if a module has a value of this name, below its own: "attention.query", "input", "" for its
    result."""
    words = name.split(".") if name else []
    if words in ([], ["input"]) or (len(words) == 1 and words[0] in getattr(module, "value_names", ())):
        return True
    for path, child in _list_children(module):
        parts = path.split(".") if path else []
        rest = words[len(parts) :]
        fits = len(parts) <= len(words) and all(map(fnmatch.fnmatchcase, parts, words))
        if path is not None and fits and (parts or words) and has_value(child, ".".join(rest)):
            return True
    return False

"""Check annotations in a fraction of jaxtyping's time, which was half of the time of tests that compile nothing.

jaxtyping binds the arguments of every call to the signature, and generates two functions that beartype decorates for
every function that is defined, inner ones at each call of the outer. Here a function without array annotations has
beartype alone, and generated functions are kept. A body that asks `isinstance(x, Float[...])` needs an array in its
signature; no function of the library does that.
"""

import functools
import inspect
import types
import typing
from collections.abc import Callable

import jaxtyping
from beartype import BeartypeConf
from jaxtyping import _decorator

CONF = BeartypeConf(violation_type=jaxtyping.TypeCheckError)


def mentions_jaxtyping(hint) -> bool:
    """Return True if a type is one of jaxtyping's, or made of one."""
    modules = (getattr(hint, "__module__", ""), type(hint).__module__)
    parts = hint if isinstance(hint, list) else typing.get_args(hint)
    return any(str(name).startswith("jaxtyping") for name in modules) or any(map(mentions_jaxtyping, parts))


def check_without_arrays(fn: Callable, hints: dict, typechecker: Callable) -> Callable:
    """Let beartype check a function whose annotations are resolved in `hints`."""
    written = fn.__annotations__
    fn.__annotations__ = hints
    try:
        checked = typechecker(fn, conf=CONF)
    finally:
        fn.__annotations__ = written

    @functools.wraps(fn)
    def call(*args, **kwargs):
        return (fn if jaxtyping.config.jaxtyping_disable else checked)(*args, **kwargs)

    return call


def quicken(jaxtyped: Callable) -> Callable:
    """Return a `jaxtyped` that does less for functions without array annotations."""

    def decorate(fn, *, typechecker):
        if not isinstance(fn, types.FunctionType) or inspect.isgeneratorfunction(fn):  # that beartype checks later
            return jaxtyped(fn, typechecker=typechecker)
        if not fn.__annotations__:
            return fn
        if "<locals>" in fn.__qualname__:  # defined often, and cheaply by what was kept
            return jaxtyped(fn, typechecker=typechecker)
        resolve = _decorator._destring_annotation
        hints = {name: resolve(hint, fn.__globals__) for name, hint in fn.__annotations__.items()}
        if any(map(mentions_jaxtyping, hints.values())):
            return jaxtyped(fn, typechecker=typechecker)
        return check_without_arrays(fn, hints, typechecker)

    def quick(*args, **options):
        is_import_hook = not args and options.get("typechecker") is not None
        return functools.partial(decorate, **options) if is_import_hook else jaxtyped(*args, **options)

    return quick


def keep(function: Callable) -> Callable:
    """Return the function with a memory of its results, where its arguments can be hashed."""
    kept = functools.cache(function)

    @functools.wraps(function)
    def call(*args, **kwargs):
        try:
            hash((args, tuple(kwargs.values())))
        except TypeError:
            return function(*args, **kwargs)
        return kept(*args, **kwargs)

    return call


def install() -> None:
    """Take effect for modules that are imported from now on; for none if jaxtyping has other internals."""
    if not all(hasattr(_decorator, name) for name in ("_destring_annotation", "_make_fn_with_signature")):
        return
    jaxtyping.jaxtyped = quicken(_decorator.jaxtyped)
    _decorator._make_fn_with_signature = keep(_decorator._make_fn_with_signature)
    _decorator._apply_typechecker = keep(_decorator._apply_typechecker)

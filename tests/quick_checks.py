"""Check annotations in a fraction of jaxtyping's time, which was half of the time of tests that compile nothing.

jaxtyping binds the arguments of every call to the signature, and generates two functions that beartype decorates for
every function that is defined, inner ones at each call of the outer. Here

- a function is decorated when it is first called, and many never are;
- one without array annotations has beartype alone;
- an inner function, or a generator, without array annotations has its arguments and its result passed to functions of
  the same signature, made once for its code: beartype would decorate the one at each call of the outer function, and
  check the other when it is iterated.

A body that asks `isinstance(x, Float[...])` needs an array in its signature; no function of the library does that.
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


def check_later(fn: Callable, make_checked: Callable[[], Callable]) -> Callable:
    """Return a function that is `fn`, checked as `make_checked` says, which it asks when it is first called."""
    checked = None

    @functools.wraps(fn)
    def call(*args, **kwargs):
        nonlocal checked
        if jaxtyping.config.jaxtyping_disable:
            return fn(*args, **kwargs)
        if checked is None:
            checked = make_checked()
        return checked(*args, **kwargs)

    return call


def check_without_arrays(fn: Callable, hints: dict, typechecker: Callable) -> Callable:
    """Let beartype check a function whose annotations are resolved in `hints`."""
    written = fn.__annotations__
    fn.__annotations__ = hints
    try:
        return typechecker(fn, conf=CONF)
    finally:
        fn.__annotations__ = written


def check_beside(fn: Callable, checks: tuple[Callable, Callable | None]) -> Callable:
    """Let functions of the same signature check the arguments and the result of `fn`."""
    check_arguments, check_result = checks

    def call(*args, **kwargs):
        check_arguments(*args, **kwargs)
        result = fn(*args, **kwargs)
        if check_result is not None:
            check_result(result)
        return result

    return call


def make_checks(fn: Callable, hints: dict, typechecker: Callable) -> tuple[Callable, Callable | None]:
    """Return what checks the arguments of a function with these annotations, and what checks its result, which that of
    a generator is not."""
    signature = inspect.signature(fn)
    parameters = [x.replace(annotation=hints.get(x.name, x.empty)) for x in signature.parameters.values()]
    make, where = _decorator._make_fn_with_signature, (fn.__name__, fn.__qualname__, fn.__module__)
    check_arguments = make(*where, inspect.Signature(parameters), output=False)
    check_result = None
    if "return" in hints and not inspect.isgeneratorfunction(fn):
        result = inspect.Parameter("result", inspect.Parameter.POSITIONAL_ONLY, annotation=hints["return"])
        check_result = typechecker(make(*where, inspect.Signature([result]), output=False), conf=CONF)
    return typechecker(check_arguments, conf=CONF), check_result


def quicken(jaxtyped: Callable) -> Callable:
    """Return a `jaxtyped` that does less for functions without array annotations."""
    made: dict[tuple, tuple[Callable, Callable | None] | None] = {}

    def find_checks(fn, typechecker):
        """Return the checks of an inner function or a generator; None if it has array annotations."""
        key = fn.__code__, tuple(fn.__annotations__.items())
        if key not in made:
            hints = resolve_hints(fn)
            made[key] = None if mention_arrays(hints) else make_checks(fn, hints, typechecker)
        return made[key]

    def check_inner(fn, typechecker):
        try:
            checks = find_checks(fn, typechecker)
        except TypeError:  # an annotation without a hash
            checks = None
        return jaxtyped(fn, typechecker=typechecker) if checks is None else check_beside(fn, checks)

    def check(fn, typechecker):
        hints = resolve_hints(fn)
        if mention_arrays(hints):
            return jaxtyped(fn, typechecker=typechecker)
        return check_without_arrays(fn, hints, typechecker)

    def decorate(fn, *, typechecker):
        if not isinstance(fn, types.FunctionType):
            return jaxtyped(fn, typechecker=typechecker)
        if not fn.__annotations__ or fn.__globals__ is globals():  # an `__init__` that a class inherits
            return fn
        is_inner = "<locals>" in fn.__qualname__ or inspect.isgeneratorfunction(fn)
        return check_later(fn, lambda: (check_inner if is_inner else check)(fn, typechecker))

    def quick(*args, **options):
        if options.get("typechecker") is None:
            return jaxtyped(*args, **options)
        return decorate(*args, **options) if args else functools.partial(decorate, **options)

    return quick


def resolve_hints(fn: Callable) -> dict:
    return {name: _decorator._destring_annotation(hint, fn.__globals__) for name, hint in fn.__annotations__.items()}


def mention_arrays(hints: dict) -> bool:
    return any(map(mentions_jaxtyping, hints.values()))


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
    jaxtyping.jaxtyped = _decorator.jaxtyped = quicken(_decorator.jaxtyped)  # the latter for methods of classes
    _decorator._make_fn_with_signature = keep(_decorator._make_fn_with_signature)
    _decorator._apply_typechecker = keep(_decorator._apply_typechecker)

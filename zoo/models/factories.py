"""Factories of a model's parts: bind the sizes that a preset knows, and refuse a factory that cannot be called."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import equinox as eqx


def bind_factory(role: str, factory: Callable[..., Any], *sizes: int, **options: Any) -> Callable[..., Any]:
    """Return `factory` with `sizes` and the `options` that it takes, to be called with `key=`.

    - `role`: what the factory makes, for errors: "mixer".
    - `options`: passed if the signature names them. A value that `functools.partial` has set stays.

    **Raises** as `check_factory` does.
    """
    _require_factory(role, factory)
    already_set = factory.keywords if isinstance(factory, functools.partial) else {}
    taken = _list_keywords(factory)
    passed = {
        name: value for name, value in options.items() if name not in already_set and (taken is None or name in taken)
    }
    bound = functools.partial(factory, *sizes, **passed)
    check_factory(role, bound)
    return bound


def check_factory(role: str, factory: Callable[..., Any]) -> None:
    """Check that `factory(key=key)` is a valid call, before it is made under `jax.vmap`.

    **Raises** `TypeError` for a layer where its class was expected, and if arguments are missing or unknown.
    """
    _require_factory(role, factory)
    sizes = ()
    options = {}
    inner = factory
    if isinstance(factory, functools.partial):
        inner = factory.func
        sizes = factory.args
        options = factory.keywords
    try:
        signature = inspect.signature(inner)
    except (TypeError, ValueError):  # some callables in C have none
        return
    try:
        signature.bind(*sizes, **options, key=None)
    except TypeError as error:
        name = getattr(inner, "__name__", type(inner).__name__)
        arguments = [*map(str, sizes), *(f"{option}=..." for option in options), "key=key"]
        raise TypeError(
            f"{role}: {name} is called as {name}({', '.join(arguments)}), but it takes "
            f"({', '.join(map(_format_parameter, signature.parameters.values()))}): {error}. Set options that it needs "
            f"with functools.partial({name}, ...)"
        ) from None


def _require_factory(role: str, factory: Any) -> None:
    inner = factory.func if isinstance(factory, functools.partial) else factory
    if isinstance(inner, eqx.Module) or not callable(inner):
        if isinstance(inner, eqx.Module):
            came = f"a layer, {type(inner).__name__}"
        else:
            came = repr(inner)
        raise TypeError(
            f"{role}: expected a class, a function or functools.partial of one, which is called with key= for each "
            f"layer, not {came}"
        )


def _list_keywords(factory: Callable[..., Any]) -> set[str] | None:
    """Return the names of arguments that can be passed by name; None if they may be any."""
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):  # of a partial also if the function does not take what it sets
        if isinstance(factory, functools.partial):
            return _list_keywords(factory.func)
        return None
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {parameter.name for parameter in parameters if parameter.kind in by_name}


def _format_parameter(parameter: inspect.Parameter) -> str:
    """Return a parameter without its annotation: `embed`, `epsilon=...`, `*sizes`."""
    stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
    default = "" if parameter.default is parameter.empty else "=..."
    return f"{stars}{parameter.name}{default}"

"""JSON schemas of Python functions that a model may call."""

import inspect
import re
import types
import typing
from collections.abc import Callable
from typing import Any, Literal, Union, get_args, get_origin

_SCALARS = {str: "string", int: "integer", float: "number", bool: "boolean"}
_SECTION = re.compile(r"^([A-Z]\w*):[ \t]*$", re.MULTILINE)
_ARGUMENT = re.compile(r"(\w+)(?:[ \t]*\([^()]*\))?:[ \t]*(.*)")


def tool_schema(function: Callable[..., Any]) -> dict[str, Any]:
    """Describe a Python function as a tool, in the JSON schema that chat templates take.

    Types come from the hints: str, int, float, bool, list, dict, Literal, and each of them or None; descriptions from a
    docstring in Google's style. An argument without a default is required. The schema is the one of transformers'
    `get_json_schema`.

    **Raises** `ValueError`, naming the argument, for one without a hint or a description, with a hint of another type,
    or that a call cannot name.

        def add(x: int, y: int = 1) -> int:
            '''Add two numbers.

            Args:
                x: The first.
                y: The second.
            '''
            return x + y

        template.render(messages, tools=[tool_schema(add)])
    """
    name = getattr(function, "__name__", type(function).__name__)
    docstring = inspect.getdoc(function) if inspect.isroutine(function) else None
    if not docstring:
        raise ValueError(f"{name} has no docstring: a tool is described by one, with `Args:` in Google's style")
    sections = _split_sections(docstring)
    descriptions = _read_descriptions(sections.get("Args", ""))
    try:
        hints = typing.get_type_hints(function)
    except NameError as error:
        raise ValueError(f"the type hints of {name} cannot be read: {error}") from None

    properties: dict[str, Any] = {}
    required: list[str] = []
    for argument, parameter in inspect.signature(function).parameters.items():
        where = f"argument {argument!r} of {name}"
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ValueError(f"{where} cannot be passed by its name, and a tool's arguments are named")
        if argument not in hints:
            raise ValueError(f"{where} has no type hint")
        if not descriptions.get(argument):
            raise ValueError(f"{where} has no description: write `{argument}: ...` below `Args:` in the docstring")
        properties[argument] = {**_describe_type(hints[argument], where), "description": descriptions[argument]}
        if parameter.default is parameter.empty:
            required.append(argument)

    parameters: dict[str, Any] = {"type": "object", "properties": properties}
    if required:
        parameters["required"] = required
    described = {"name": name, "description": sections[""], "parameters": parameters}
    if "return" in hints:
        described |= _describe_return(hints["return"], sections.get("Returns"))
    return {"type": "function", "function": described}


def _describe_return(hint: Any, description: str | None) -> dict[str, Any]:
    """Return the field `return`; none for a type without a schema, since no model writes it."""
    if hint is types.NoneType:
        schema: dict[str, Any] = {"type": "null"}
    else:
        try:
            schema = _describe_type(hint, "the return value")
        except ValueError:
            return {}
    if description is not None:
        schema["description"] = description
    return {"return": schema}


def _describe_type(hint: Any, where: str) -> dict[str, Any]:
    """Return the JSON schema of a type hint."""
    arguments = get_args(hint)
    match get_origin(hint) or hint:
        case scalar if scalar in _SCALARS:
            return {"type": _SCALARS[scalar]}
        case origin if origin in (Union, types.UnionType) and types.NoneType in arguments and len(arguments) == 2:
            (present,) = (argument for argument in arguments if argument is not types.NoneType)
            return {**_describe_type(present, where), "nullable": True}
        case origin if origin is Literal and {type(value) for value in arguments} <= _SCALARS.keys():
            names = list(dict.fromkeys(_SCALARS[type(value)] for value in arguments))
            return {"type": names[0] if len(names) == 1 else names, "enum": list(arguments)}
        case origin if origin is list:
            if not arguments:
                return {"type": "array"}
            return {"type": "array", "items": _describe_type(arguments[0], where)}
        case origin if origin is dict and (not arguments or arguments[0] is str):
            if not arguments:
                return {"type": "object"}
            return {"type": "object", "additionalProperties": _describe_type(arguments[1], where)}
    raise ValueError(
        f"{where} has the type hint {inspect.formatannotation(hint)}, and a tool takes str, int, float, bool, list, "
        "dict with texts as keys, Literal of texts and numbers, or one of these or None"
    )


def _split_sections(docstring: str) -> dict[str, str]:
    """Return the sections of a docstring by name; the text before the first one under an empty name."""
    first, *rest = _SECTION.split(docstring)
    sections = dict(zip(rest[::2], rest[1::2], strict=True))
    return {name: inspect.cleandoc("\n" + text).strip() for name, text in {"": first, **sections}.items()}


def _read_descriptions(section: str) -> dict[str, str]:
    """Return what `Args:` says of each argument. Indented lines go on with the argument before."""
    descriptions: dict[str, str] = {}
    name = ""
    for line in section.splitlines():
        if found := _ARGUMENT.fullmatch(line):
            name = found[1]
            descriptions[name] = found[2].strip()
        elif line.strip() and name:
            descriptions[name] = f"{descriptions[name]} {line.strip()}".strip()
    return descriptions

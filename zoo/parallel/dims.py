"""Dims of arrays: their names in the layout, read off the annotations of jaxtyping."""

import dataclasses
import typing
from collections.abc import Iterator
from typing import Any

from jaxtyping import AbstractArray


@dataclasses.dataclass(frozen=True)
class Dim:
    """Name of an array dim in the layout, and its `unit`: the number of consecutive elements that are never sharded.

    `Dim("heads", 64)` with 512 elements is 8 heads. The count is read off the array, so it is also correct for a
    device's shard.
    """

    name: str
    unit: int = 1


def find_array_types(annotation: Any) -> Iterator[Any]:
    """Yield the jaxtyping types in an annotation: `Float[Array, "out"] | None`, `tuple[Float[Array, "out"], ...]`."""
    if isinstance(annotation, type) and issubclass(annotation, AbstractArray):
        yield annotation
    for inner in typing.get_args(annotation):
        yield from find_array_types(inner)


def read_dim_names(annotation: Any) -> tuple[str, ...] | None:
    """Return the dim names of a jaxtyping annotation, sizes as strings; None if they are variadic."""
    if not isinstance(annotation.dims, tuple):
        return None  # only "..."
    names = [getattr(dim, "name", None) or getattr(dim, "size", None) for dim in annotation.dims]
    fixed = all(names) and "*" not in annotation.dim_str
    return tuple(map(str, names)) if fixed else None


def resolve_dim(module: Any, name: str) -> Dim:
    dim = getattr(module, name, None)
    dim = dim if isinstance(dim, Dim) else getattr(module, f"{name}_", None)  # `in` is a keyword: the field is `in_`
    return dim if isinstance(dim, Dim) else Dim(name)


def name_value_dims(module: Any, annotation: Any, ndim: int) -> tuple[str, ...]:
    """Name the dims of a value of `ndim` dims by its annotation in a method of `module`: variadic dims are rows, tokens
    and heads, and dims that it does not name are features."""
    for array_type in find_array_types(annotation):
        words = [word.lstrip("#?") for word in array_type.dim_str.split() if word != "..."]
        names = [_name_dim(module, word) for word in words if not word.startswith("*")]
        if len(names) == ndim:
            return tuple(names)
        if len(words) == len(names) + 1 and ndim > len(names):  # one of them is variadic, and leads
            tokens = "tokens" if names[-1:] == ["embed"] else "seq"
            leading = ["batch"] if {"seq", "tokens"} & set(names) else ["batch", tokens, "heads"]
            missing = ndim - len(names)
            return (*leading[:missing], *["features"] * (missing - len(leading)), *names)
    return ("batch", "seq", *["features"] * (ndim - 2))[:ndim]


def _name_dim(module: Any, word: str) -> str:
    if word == "_" or not word.isidentifier():
        return "features"
    return resolve_dim(module, word).name

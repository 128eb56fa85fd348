"""Parameters by name: read one, and replace some, whether or not the scan over layers stacks it.

    weight = zoo.models.get(model, "layers.0.attention.query.weight")
    model = zoo.models.replace(model, {"layers.0.attention.query.weight": weight * 2, "norm.weight": jnp.ones_like})

Names are those of `zoo.models.list_parameter_paths`, with the number of a layer in place of a star.
"""

import difflib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, PyTree, Shaped

from .parameter_paths import IndexRanges, ParameterPath, list_parameter_paths, list_parameters, map_parameters

_Model = TypeVar("_Model", bound=PyTree)
Edit = Array | np.ndarray | Callable[[Array], Array]
_Index = tuple[int | None, ...]
"""Index into the stacked dims of an array; None for all of a dim."""


def get(model: PyTree, name: str) -> Shaped[Array, "..."]:
    """Return a parameter of a model, or of a tree like it, such as gradients, by its name in `list_parameter_paths`.

    A number in place of a star is one layer or expert: `layers.3.attention.query.weight` is a slice of the array that
    holds several layers. A star is all that the array holds.

    **Raises** `ValueError` for a name that no array has, with the nearest, and for a star that several arrays share.
    """
    parameters = list_parameters(model)
    number, index = _find_array([path for path, _ in parameters], name)
    return _read(parameters[number][1], index)


def replace(model: _Model, parameters: Mapping[str, Edit]) -> _Model:
    """Return a model with parameters replaced, by their names as in `get`: by an array, or by a function of the
    parameter. Shapes, dtypes and shardings stay.

    **Raises** `ValueError` as `get`, and for an array of another shape.
    """
    paths = list_parameter_paths(model)
    edits: dict[tuple[str, IndexRanges], list[tuple[str, _Index, Edit]]] = {}
    for name, edit in parameters.items():
        number, index = _find_array(paths, name)
        edits.setdefault(paths[number][:2], []).append((name, index, edit))

    def replace_parts(path: ParameterPath, array: Array) -> Array:
        for name, index, edit in edits.get(path[:2], ()):
            old = _read(array, index)
            new = edit(old) if callable(edit) else jnp.asarray(edit)
            if new.shape != old.shape:
                raise ValueError(f"{name}: expected an array of shape {old.shape}, got {new.shape}")
            array = _write(array, index, new.astype(array.dtype))
        return array

    return map_parameters(replace_parts, model)


def _read(array: Array, index: _Index) -> Array:
    """Return part of an array, sharded as the dims that are left were."""
    if all(number is None for number in index):
        return array
    if isinstance(array, Tracer) or not isinstance(array.sharding, NamedSharding):
        return array[_to_slices(index)]
    index += (None,) * (array.ndim - len(index))
    spec = (*array.sharding.spec, *[None] * (array.ndim - len(array.sharding.spec)))
    kept = [axes for axes, number in zip(spec, index, strict=True) if number is None]
    return _read_shards(array, index, NamedSharding(array.sharding.mesh, PartitionSpec(*kept)))


@partial(jax.jit, static_argnums=(1, 2))  # by itself JAX may choose a sharding that does not divide the dims, and raise
def _read_shards(array: Array, index: _Index, sharding: NamedSharding) -> Array:
    return lax.with_sharding_constraint(array[_to_slices(index)], sharding)


def _write(array: Array, index: _Index, new: Array) -> Array:
    if isinstance(array, Tracer) or not isinstance(array.sharding, NamedSharding):
        return array.at[_to_slices(index)].set(new)
    return _write_shards(array, index, new, array.sharding)


@partial(jax.jit, static_argnums=(1, 3))
def _write_shards(array: Array, index: _Index, new: Array, sharding: NamedSharding) -> Array:
    return lax.with_sharding_constraint(array.at[_to_slices(index)].set(new), sharding)


def _to_slices(index: _Index) -> tuple[int | slice, ...]:
    return tuple(slice(None) if number is None else number for number in index)


def _find_array(paths: Sequence[ParameterPath], name: str) -> tuple[int, _Index]:
    """Return the number of the array that holds a parameter, and the index into its stacked dims."""
    indices = [_find_index(path.name, path.ranges, name.split(".")) for path in paths]
    found = [(number, index) for number, index in enumerate(indices) if index is not None]
    if len(found) == 1:
        return found[0]
    if found:
        raise ValueError(f"{name} is in {len(found)} arrays, which hold layers in turn: name one layer by its number")
    pattern = ".".join("*" if word.isdecimal() else word for word in name.split("."))
    known = sorted({path.name for path in paths})
    if below := [path for path in known if path.startswith(f"{pattern}.")]:
        raise ValueError(f"{name} is not an array but a module, which has {', '.join(below)}")
    numbers = sorted({number for path in paths if path.name == pattern for number in path.ranges[0]})
    if numbers:
        advice = f"{pattern} has {', '.join(map(str, numbers))}"
    elif nearest := difflib.get_close_matches(pattern, known, n=1, cutoff=0.7):
        advice = f"did you mean {nearest[0]}?"
    else:
        advice = "zoo.models.list_parameter_paths(model) has the names"
    raise ValueError(f"the model has no parameter {name}; {advice}")


def _find_index(pattern: str, ranges: IndexRanges, words: list[str]) -> _Index | None:
    """Return the index into the stacked dims of an array that a name means; None for a name of another array."""
    parts = pattern.split(".")
    if len(parts) != len(words):
        return None
    index: list[int | None] = []
    for part, word in zip(parts, words, strict=True):
        if part != "*":
            if part != word:
                return None
            continue
        numbers = ranges[len(index)]
        if word == "*":
            index.append(None)
        elif word.isdecimal() and int(word) in numbers:
            index.append(numbers.index(int(word)))
        else:
            return None
    return tuple(index)

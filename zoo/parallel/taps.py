"""Taps: values of a forward pass, read or edited where a module takes or returns them.

    taps = Taps(("layers.*.attention.out",))
    with active_taps(taps):
        model(tokens)
    values = taps.collect()

Every method that runs in a name scope (`zoo.parallel.scope`) passes its input and its result through `tap`. Without
active taps nothing is traced. A name is the path of a module from the first one that runs, `layers.*.attention.out`,
and names its result; `layers.*.attention.out.input` is its input. A star stands for all layers, a number for one.

A value leaves a transformation of JAX as one of its results: `rematerialize` returns what is read in its body
(`lifted`, `lift`). Layers whose values are read or edited run in a plain loop. A value inside any other transformation
cannot be read, which is an error.
"""

import contextlib
import dataclasses
import difflib
import fnmatch
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import get_opaque_trace_state
from jaxtyping import Array, Int

from zoo.ops.varying import vary, varying

active_taps = jax.make_user_context(None)
"""Context manager, `with active_taps(taps):`, that sets the taps of modules that run in it. It is part of JAX's trace
cache key, and taps are hashed by identity: no trace of other taps is reused."""

_Key = tuple[str, tuple[int, ...]]
"""Name of a value, and the layers that its rows belong to; () for a value by itself."""


@dataclasses.dataclass
class _Log:
    """What has been seen while tracing."""

    frames: list["_Frame"] = dataclasses.field(default_factory=lambda: [_Frame()])
    dims: dict[_Key, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    found: dict[str, set[int]] = dataclasses.field(default_factory=dict)
    """Names of all values, with the numbers of their layers."""
    kept: dict[str, set[_Key]] = dataclasses.field(default_factory=dict)
    """By a name that is read, the values that it means."""
    repeated: set[str] = dataclasses.field(default_factory=set)
    """Names of values whose module runs several times."""
    edited: set[str] = dataclasses.field(default_factory=set)
    """Names of edits that were made."""
    aliases: list[tuple[Any, Any]] = dataclasses.field(default_factory=list)
    """Modules that `gather` has made, with those they were made from."""

    def write(self, values: Mapping[_Key, Any]) -> None:
        """Keep values in the innermost frame, unless a transformation runs in it from which none can be returned."""
        frame = self.frames[-1]
        if not frame.is_running():
            return
        for key, value in values.items():
            before = frame.values.get(key)
            if before is not None and before is not value:
                self.repeated.add(key[0])
            frame.values[key] = value


class _Frame:
    """Values that are read in the body of one transformation."""

    def __init__(self):
        self._state = get_opaque_trace_state()
        self.values: dict[_Key, Any] = {}

    def is_running(self) -> bool:
        """Return True unless a transformation inside this one runs, from which no value can be returned to it."""
        return get_opaque_trace_state() == self._state


@dataclasses.dataclass(frozen=True)
class _Layer:
    """The layer that runs."""

    number: int
    find_layers: Callable[[str], Sequence[int]]
    """Returns the numbers of the layers that have a value of a name below the layer's."""

    def find_row(self, edit: Any) -> int:
        """Return this layer's row in the arrays of an edit. **Raises** `ValueError` for arrays of another length."""
        layers = list(self.find_layers(edit.name.partition("layers.*")[2].removeprefix(".")))
        for value in edit.arrays:
            if value.array.ndim == 0 or len(value.array) != len(layers):
                raise ValueError(
                    f"the arrays of the edit of {edit.name} have a row for each of the layers "
                    f"{_format_numbers(layers)}, which have this value, and one has the shape {list(value.array.shape)}"
                )
        return layers.index(self.number)


@dataclasses.dataclass(frozen=True, eq=False)
class Taps:
    """Names to read, and edits to make, while modules run.

    - `reads`: names, with patterns as `fnmatch` knows them in place of a field: `layers.*.*_norm`.
    - `edits`: `zoo.parallel.Edit`s, each with the number of modules that run around the names that it means.
    """

    reads: tuple[str, ...]
    edits: tuple[tuple[Any, int], ...] = ()
    depth: int = 0
    log: _Log = dataclasses.field(default_factory=_Log)
    layer: _Layer | None = None
    lists_all: bool = False
    """True to compute every value that can be asked for, to list their names."""

    def with_edits(self, edits: Sequence[Any], depth: int) -> "Taps":
        """Add the edits of a module that runs inside `depth` others, whose names begin below it."""
        return dataclasses.replace(self, edits=(*self.edits, *((edit, depth) for edit in edits)))

    def tap(self, words: tuple[str, ...], x: Array, dims: tuple[str, ...]) -> Array:
        """Return `x` with its edits made, and keep it if it is asked for. `words` is its path from the first module."""
        name = _join(words, self.depth)
        self.log.found.setdefault(name, set()).update(self._layers)
        for edit, depth in self.edits:
            if self._matches(edit.name, words, depth):
                self.log.edited.add(edit.name)
                x = self._edit(edit, x)
        for pattern in self.reads:
            if self._matches(pattern, words, self.depth):
                self._keep(pattern, name, x, dims)
        return x

    @property
    def _layers(self) -> tuple[int, ...]:
        return () if self.layer is None else (self.layer.number,)

    def asks(self, words: tuple[str, ...]) -> bool:
        """Return True if the value of this name is read or edited in the layer that runs."""
        return (
            self.lists_all
            or any(self._matches(pattern, words, self.depth) for pattern in self.reads)
            or any(self._matches(edit.name, words, depth) for edit, depth in self.edits)
        )

    def _matches(self, pattern: str, words: tuple[str, ...], depth: int) -> bool:
        parts = pattern.split(".")
        words = tuple(_join(words, depth).split("."))
        return len(parts) == len(words) and all(map(self._matches_word, parts, words))

    def _matches_word(self, part: str, word: str) -> bool:
        if word == "*":
            return part == "*" or (part.isdigit() and int(part) in self._layers)
        return fnmatch.fnmatchcase(word, part)

    def _edit(self, edit: Any, x: Array) -> Array:
        arrays = tuple(value.array for value in edit.arrays)
        if self.layer is not None and arrays and not is_numbered(edit.name):
            arrays = tuple(array[self.layer.find_row(edit)] for array in arrays)
        y = jnp.asarray(edit.function(x, *arrays))
        if y.shape != x.shape:
            raise ValueError(
                f"the edit of {edit.name} returns {list(y.shape)}, and the value is {list(x.shape)}: an edit keeps "
                "the shape"
            )
        return vary(y.astype(x.dtype), varying(x))

    def _keep(self, pattern: str, name: str, x: Array, dims: tuple[str, ...]) -> None:
        key: _Key = (name, self._layers)
        if self.layer is not None and is_numbered(pattern):
            key = (name.replace("*", str(self.layer.number), 1), ())
        self.log.kept.setdefault(pattern, set()).add(key)
        self.log.dims[key] = dims
        self.log.write({key: x})

    def collect(self) -> dict[str, tuple[Array, tuple[str, ...]]]:
        """Return array and dims of each value that was read: with a star for all layers that have it, in order. Values
        that differ in shape, and those of modules that run several times, are not among them."""
        parts: dict[str, list[tuple[tuple[int, ...], Array, tuple[str, ...]]]] = {}
        for (name, layers), value in self.log.frames[0].values.items():
            dims = self.log.dims[name, layers]
            parts.setdefault(name, []).append((layers, value, dims))
        return {
            name: _join_layers(rows)
            for name, rows in parts.items()
            if name not in self.log.repeated and len(_find_shapes(rows)) == 1
        }

    def check_reads(self) -> None:
        """**Raises** `ValueError` for a name that is read and has no value, or several that are not one array."""
        values = self.log.frames[0].values
        for pattern in self.reads:
            kept = self.log.kept.get(pattern, set()).intersection(values)
            if not kept:
                raise ValueError(self._explain_missing(pattern))
            for name in {name for name, _ in kept}:
                if name in self.log.repeated:
                    raise ValueError(
                        f"{name} has several values, since its module runs several times: capture a function that runs "
                        "it once"
                    )
                parts = [(key[1], values[key], self.log.dims[key]) for key in kept if key[0] == name]
                shapes = _find_shapes(parts)
                if len(shapes) > 1:
                    listed = "; ".join(f"{list(shape)} in {_format_numbers(own)}" for shape, own in shapes.items())
                    raise ValueError(f"{name} is {listed}, and no array stacks them: ask for layers by their numbers")

    def check_edits(self, depth: int) -> None:
        """**Raises** `ValueError` for an edit of a value that no module took or returned, of those that name modules
        below `depth` others."""
        for edit, own in self.edits:
            if own == depth and edit.name not in self.log.edited:
                raise ValueError(self._explain_missing(edit.name))

    def _explain_missing(self, pattern: str) -> str:
        if pattern in self.log.kept:
            return (
                f"{pattern} is computed inside a transformation of its own (a vmap, a jit, a loop, a custom gradient), "
                "from which it cannot be read: capture the function inside the transformation, or ask for a module "
                "around it"
            )
        starred = pattern.replace(f"layers.{find_layer_word(pattern)}", "layers.*", 1)
        if layers := self.log.found.get(starred):
            return f"no value is named {pattern}: of {starred} there are layers {_format_numbers(layers)}"
        near = difflib.get_close_matches(pattern, self.log.found, n=4, cutoff=0.5) or list(self.log.found)[:8]
        return (
            f"no value is named {pattern!r}: zoo.capture_names(model, tokens) lists all names, such as "
            f"{', '.join(near) or 'none'}"
        )


def current_taps() -> Taps | None:
    """Return the active taps, if there are any."""
    return active_taps.value


def find_layer_word(name: str) -> str | None:
    """Return the word of a name that says which layers: "*", or a number as in `layers.2.attention`; None for a name of
    no layer."""
    parts = name.split(".")
    places = [i + 1 for i, part in enumerate(parts[:-1]) if part == "layers"]
    return parts[places[0]] if places else None


def is_numbered(name: str) -> bool:
    """Return True for a name of one layer, `layers.2.attention`."""
    return (find_layer_word(name) or "").isdigit()


def number_layers(name: str, layers: set[int]) -> list[str]:
    """Return a name, followed by the names of the same value in each layer."""
    return [name, *(name.replace("*", str(layer), 1) for layer in sorted(layers))]


def lifted(function: Callable) -> Callable:
    """Return `function` with a second result, the values that are read in it, for `lift` to keep outside of a
    transformation: `result, values = transform(lifted(function))(*args)`."""
    taps = current_taps()
    if taps is None:
        return lambda *args: (function(*args), {})

    def run(*args: Any) -> tuple[Any, dict[_Key, Any]]:
        taps.log.frames.append(_Frame())
        try:
            result = function(*args)
            return result, taps.log.frames[-1].values
        finally:
            taps.log.frames.pop()

    return run


def lift(values: Mapping[_Key, Any]) -> None:
    """Keep values that were read inside a transformation."""
    taps = current_taps()
    if taps is not None:
        taps.log.write(values)


@contextlib.contextmanager
def in_layer(number: int | Int[Array, ""], find_layers: Callable[[str], Sequence[int]]) -> Iterator[None]:
    """Run layer `number`. `find_layers` returns the layers that have a value of a name, which begins below the
    layer."""
    taps = current_taps()
    if taps is None or not isinstance(number, int):  # inside a pipeline, from which no value of a layer is read
        yield
        return
    with active_taps(dataclasses.replace(taps, layer=_Layer(number, find_layers))):
        yield


def taps_layers() -> bool:
    """Return True if values of layers are read, edited or listed."""
    taps = current_taps()
    return taps is not None and (taps.lists_all or bool(_list_layer_names(taps)))


def refuse_layer_taps(reason: str) -> None:
    """**Raises** `NotImplementedError` if values of layers are read or edited."""
    taps = current_taps()
    if taps is not None and (layered := _list_layer_names(taps)):
        raise NotImplementedError(f"{layered[0]}: {reason}")


def _list_layer_names(taps: Taps) -> list[str]:
    names = [*taps.reads, *(edit.name for edit, _ in taps.edits)]
    return [name for name in names if find_layer_word(name)]


def _join(words: Sequence[str], depth: int) -> str:
    """Return the name of a path, from its module number `depth` on. Wrapped modules have no word."""
    return ".".join(filter(None, words[depth:]))


def _find_shapes(
    parts: Sequence[tuple[tuple[int, ...], Array, tuple[str, ...]]],
) -> dict[tuple[int, ...], list[int]]:
    """Return the layers by the shape of their values."""
    shapes: dict[tuple[int, ...], list[int]] = {}
    for layers, x, dims in parts:
        shapes.setdefault(x.shape[x.ndim - len(dims) :], []).extend(layers)
    return shapes


def _join_layers(
    parts: Sequence[tuple[tuple[int, ...], Array, tuple[str, ...]]],
) -> tuple[Array, tuple[str, ...]]:
    """Return one array of the values of all layers, in order, and its dims."""
    layers, x, dims = parts[0]
    rest = x.ndim - len(dims)
    if not layers and x.shape[:rest] == (1,) * rest:  # by itself, or one layer in a scan of one step
        return x.reshape(x.shape[rest:]), dims
    if not layers:
        return x, (*["features"] * rest, *dims)
    rows = [x.reshape(-1, *x.shape[x.ndim - len(dims) :]) for _, x, _ in parts]
    numbers = np.array([number for layers, _, _ in parts for number in layers])
    stack = rows[0] if len(rows) == 1 else jnp.concatenate(rows)
    order = np.argsort(numbers)
    if (order != np.arange(len(order))).any():
        stack = stack[order]
    return stack, ("layers", *dims)


def _format_numbers(numbers: Sequence[int] | set[int]) -> str:
    return ", ".join(map(str, sorted(numbers)))

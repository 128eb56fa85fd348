"""Print a module as a person reads it: public names, dims and sizes of arrays, and repeated layers once.

`equinox.tree_pformat(module)` prints every field instead.
"""

import dataclasses
import functools
import html
import inspect
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeGuard

import jax

from .dims import Dim
from .fields import IMPLEMENTATION_OPTION, NAMED_BY_CLASS, STACKED, WRAPPED, to_snake_case
from .module import Module, array_fields, resolve_dims, resolve_stacked_dims
from .remat import SaveNames
from .rounds import AbstractLayers
from .trainable_copy import TrainableCopy

_WIDTH = 100
"""Columns up to which a module without inner modules stands in one line."""
_AS_ABOVE = "as above: "
"""Beginning of the line that names what a kind of layer shares with the kind before it."""
_SHORT = {"bfloat": "bf", "float": "f", "uint": "u", "int": "i", "complex": "c"}


@dataclasses.dataclass(frozen=True)
class _Part:
    """A module in its printed form: `name: title(settings, parts)`. Equal parts of repeated layers are printed once."""

    name: str
    title: str
    settings: tuple[str, ...] = ()
    parts: "tuple[_Part | str, ...]" = ()
    """Inner modules, and arrays as text."""

    @property
    def head(self) -> str:
        return f"{self.name}: {self.title}" if self.name else self.title


def format_module(module: Module) -> str:
    """Return a module as indented text."""
    return "\n".join(_format_lines(_describe_module(module, "", 0), ""))


def format_module_as_html(module: Module) -> str:
    """Return a module as HTML: inner modules fold away."""
    return f'<div style="font-family: monospace">{_format_html(_describe_module(module, "", 0))}</div>'


def _format_lines(part: _Part, indent: str) -> Iterator[str]:
    if all(isinstance(item, str) for item in part.parts):
        inside = ", ".join([*map(str, part.parts), *part.settings])
        line = f"{indent}{part.head}({inside})"
        if len(line) <= _WIDTH or not part.parts:
            yield line
            return
    yield f"{indent}{part.head}("
    inner = f"{indent}  "
    yield from (inner + line for line in _fill_lines(part.settings, _WIDTH - len(inner)))
    for is_text, items in itertools.groupby(part.parts, lambda item: isinstance(item, str)):
        if is_text:
            yield from (inner + line for line in _fill_lines(map(str, items), _WIDTH - len(inner)))
        else:
            for item in items:
                assert isinstance(item, _Part)
                yield from _format_lines(item, inner)
    yield f"{indent})"


def _fill_lines(cells: Iterable[str], width: int) -> list[str]:
    """Join cells by commas, as many as fit into a line."""
    lines: list[str] = []
    for cell in cells:
        joined = f"{lines[-1]}, {cell}" if lines else cell
        if lines and not lines[-1].startswith(_AS_ABOVE) and len(joined) <= width:
            lines[-1] = joined
        else:
            lines.append(cell)
    return lines


def _format_html(part: _Part) -> str:
    settings = f"({', '.join(part.settings)})" if part.settings else ""
    summary = html.escape(f"{part.head}{settings}")
    items = [f"<div>{html.escape(item)}</div>" if isinstance(item, str) else _format_html(item) for item in part.parts]
    if not items:
        return f"<div>{summary}</div>"
    inside = f'<div style="margin-left: 1.5em">{"".join(items)}</div>'
    return f"<details open><summary>{summary}</summary>{inside}</details>"


def _describe_module(module: Module, name: str, num_stacked: int) -> _Part:
    """Describe a module whose arrays have `num_stacked` leading dims that are not part of it."""
    settings = _list_settings(module)
    parts: list[_Part | str] = []
    title = type(module).__name__
    for field in array_fields(module):
        child = getattr(module, field.name, None)
        if WRAPPED in field.metadata and isinstance(child, Module):
            base = _describe_module(child, name, num_stacked)
            title = f"{title} of {base.title}"
            settings = [*settings, *base.settings]
            parts = [*base.parts, *parts]
        elif _is_stack(child):
            settings = [*settings, *_list_settings(child)]
            layers, *others = array_fields(child)
            parts += _describe_layers(getattr(child, layers.name), num_stacked)
            for other in others:
                parts += _describe_field(child, other, getattr(child, other.name), num_stacked)
        elif _are_layers(child):
            parts += _describe_layers(child, num_stacked)
        else:
            parts += _describe_field(module, field, child, num_stacked)
    return _Part(name, title, tuple(settings), tuple(parts))


def _describe_field(module: Module, field: dataclasses.Field, child: Any, num_stacked: int) -> list[_Part | str]:
    has_wrapped = any(WRAPPED in other.metadata for other in dataclasses.fields(module))
    adapter = getattr(module, "adapter_name", "") if has_wrapped else ""
    if NAMED_BY_CLASS in field.metadata:
        word = to_snake_case(type(child).__name__)
    else:
        word = field.name
    name = f"{adapter}.{word}" if adapter else word
    if STACKED in field.metadata:
        num_dims = len(resolve_stacked_dims(module, field.metadata[STACKED]))
        sizes = [x.shape[num_stacked] for x in jax.tree.leaves(child) if len(getattr(x, "shape", ())) > num_stacked]
        if sizes:
            name = f"{name} x {sizes[0]}"
        num_stacked += num_dims
    return _describe_value(module, field, child, name, num_stacked)


def _describe_value(
    module: Module, field: dataclasses.Field, value: Any, name: str, num_stacked: int
) -> list[_Part | str]:
    if value is None or _is_off(value):
        return []
    if isinstance(value, Module):
        return [_describe_module(value, name, num_stacked)]
    if isinstance(value, TrainableCopy):
        return [f"{name}: {_format_array(module, field, value.base, num_stacked)} + {value.adapter_name}"]
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return [f"{name}: {_format_array(module, field, value, num_stacked)}"]
    if isinstance(value, tuple | list) and not hasattr(value, "_fields"):
        return _describe_items(module, field, value, name, num_stacked)
    return [f"{name}: {_format_option(value)}"]


def _describe_items(
    module: Module, field: dataclasses.Field, items: Sequence[Any], name: str, num_stacked: int
) -> list[_Part | str]:
    """Describe the items of a tuple by number, equal neighbors once."""
    described = [_describe_value(module, field, item, "", num_stacked) for item in items]
    found: list[_Part | str] = []
    start = 0
    for _, group in itertools.groupby(described):
        count = len(list(group))
        item_name = f"{name}.{start}" if count == 1 else f"{name} x {count}"
        found += _describe_value(module, field, items[start], item_name, num_stacked)
        start += count
    return found


def _describe_layers(segments: Iterable[Any], num_stacked: int) -> list[_Part | str]:
    """Describe layers, equal ones once, with their numbers where there are several kinds."""
    kinds: dict[_Part, list[int]] = {}
    start = 0
    for segment in segments:
        period = len(segment.blocks)
        for i, block in enumerate(segment.blocks):
            numbers = range(start + i, start + period * segment.num_repeats, period)
            kinds.setdefault(_describe_module(block, "", num_stacked + len(segment.layers)), []).extend(numbers)
        start += period * segment.num_repeats
    found: list[_Part | str] = []
    before: _Part | None = None
    for kind, numbers in kinds.items():
        if len(kinds) == 1:
            name = "layers"
        else:
            name = f"layers {_format_numbers(sorted(numbers))}"
        part = kind if before is None else _shorten(kind, before)
        found.append(dataclasses.replace(part, name=f"{name} x {len(numbers)}"))
        before = kind
    return found


def _shorten(part: _Part, before: _Part) -> _Part:
    """Replace what a kind of layer has in common with the kind before it by the names."""
    if part.title != before.title:
        return part
    earlier = {_get_name(item): item for item in before.parts}
    equal = [_get_name(item) for item in part.parts if earlier.get(_get_name(item)) == item]
    shown: list[_Part | str] = [_AS_ABOVE + ", ".join(equal)] if equal else []
    for item in part.parts:
        name = _get_name(item)
        if name in equal:
            continue
        other = earlier.get(name)
        if isinstance(item, _Part) and isinstance(other, _Part):
            item = _shorten(item, other)
        shown.append(item)
    return dataclasses.replace(part, parts=tuple(shown))


def _get_name(item: _Part | str) -> str:
    return item.name if isinstance(item, _Part) else item.partition(":")[0]


def _format_numbers(numbers: Sequence[int]) -> str:
    """Abbreviate numbers in ascending order: `0-4, 6-10`, and `0-4, 6-10, ..., 54-58`."""
    starts = [x for before, x in itertools.pairwise([-2, *numbers]) if x != before + 1]
    ends = [x for x, after in itertools.pairwise([*numbers, numbers[-1] + 2]) if after != x + 1]
    ranges = [f"{start}" if start == end else f"{start}-{end}" for start, end in zip(starts, ends, strict=True)]
    if len(ranges) > 4:
        ranges = [*ranges[:2], "...", ranges[-1]]
    return ", ".join(ranges)


def _are_layers(value: Any) -> TypeGuard[tuple[AbstractLayers, ...]]:
    return isinstance(value, tuple) and bool(value) and all(isinstance(x, AbstractLayers) for x in value)


def _is_stack(value: Any) -> TypeGuard[Module]:
    """Return True for a module that begins with layers, whose parameters are named `layers.*`."""
    if not isinstance(value, Module):
        return False
    fields = array_fields(value)
    return bool(fields) and _are_layers(getattr(value, fields[0].name, None))


def _format_array(module: Module, field: dataclasses.Field, array: Any, num_stacked: int) -> str:
    """Format the array of one layer: `f32[heads=16x64, embed=1024]`."""
    sizes = array.shape[num_stacked:]
    try:
        dims = resolve_dims(module, field, len(sizes))
    except TypeError:  # a tree of another kind in the place of the parameters
        cells = map(str, sizes)
    else:
        cells = itertools.starmap(_format_dim, zip(dims, sizes, strict=True))
    return f"{_shorten_dtype(str(array.dtype))}[{', '.join(cells)}]"


def _format_dim(dim: Dim, size: int) -> str:
    if dim.name.isdigit():
        return str(size)
    if dim.unit == 1 or size % dim.unit:
        return f"{dim.name}={size}"
    return f"{dim.name}={size // dim.unit}x{dim.unit}"


def _shorten_dtype(name: str) -> str:
    found = re.fullmatch(r"([a-z]+)(\d+)", name)
    return _SHORT.get(found[1], found[1]) + found[2] if found else name


def _list_settings(module: Module) -> list[str]:
    """Return the static fields that differ from the class's defaults, without dims of arrays and what is off."""
    found = []
    for field in dataclasses.fields(module):
        value = getattr(module, field.name, None)
        if not field.metadata.get("static", False) or field.name == "adapter_name" or not value:
            continue
        is_internal = IMPLEMENTATION_OPTION in field.metadata and not _is_choice(value)
        if not _is_dim(value) and not is_internal and not _is_default(module, field.name, value):
            found.append(f"{field.name}={_format_option(value)}")
    return found


def _is_off(value: Any) -> bool:
    """Return True for a module of settings that are all zero, such as dropout of rate 0."""
    if not isinstance(value, Module) or jax.tree.leaves(value):
        return False
    return not any(getattr(value, field.name, None) for field in dataclasses.fields(value))


def _is_dim(value: Any) -> bool:
    return isinstance(value, Dim) or (isinstance(value, tuple) and all(map(_is_dim, value)))


def _is_choice(value: Any) -> bool:
    """Return True for what selects an implementation, unlike a record of where a model came from."""
    return isinstance(value, bool | int | float | str | SaveNames) or callable(value)


def _is_default(value: Any, name: str, setting: Any) -> bool:
    default = _find_defaults(type(value)).get(name, dataclasses.MISSING)
    return default is setting or (type(default) is type(setting) and bool(default == setting))


@functools.cache
def _find_defaults(cls: type) -> dict[str, Any]:
    """Return the defaults of a class's fields, or of the arguments of its `__init__` with the same names."""
    arguments = inspect.signature(cls.__init__).parameters.values()
    defaults = {x.name: x.default for x in arguments if x.default is not x.empty}
    fields = {x.name: x.default for x in dataclasses.fields(cls) if x.default is not dataclasses.MISSING}
    return {**defaults, **fields}


def _format_option(value: Any) -> str:
    """Format a setting: records with the fields that are not defaults, and the records in them by class."""
    if callable(value) and hasattr(value, "__name__"):
        return value.__name__
    if not dataclasses.is_dataclass(value):
        return repr(value)
    cells = []
    for field in dataclasses.fields(value):
        inner = getattr(value, field.name)
        if not _is_default(value, field.name, inner):
            is_record = dataclasses.is_dataclass(inner) and not isinstance(inner, type)
            cells.append(f"{field.name}={type(inner).__name__ if is_record else _format_option(inner)}")
    return f"{type(value).__name__}({', '.join(cells)})"


def install_printing(cls: type[Module]) -> None:
    """Let modules print themselves: as text, and in notebooks as HTML."""
    setattr(cls, "__repr__", format_module)  # noqa: B010
    setattr(cls, "_repr_html_", format_module_as_html)  # noqa: B010

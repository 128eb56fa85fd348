"""A family's table of names, applied to one model: which tensor of a checkpoint holds which part of which array."""

import dataclasses
from collections.abc import Mapping

import jax
from jaxtyping import PyTree

from zoo.models.hf.spec import NameMap, Shape, TensorMapping, prefixed
from zoo.models.parameter_paths import ParameterPath, format_path, iterate_indices, list_parameter_paths


@dataclasses.dataclass(frozen=True)
class _ArraySlice:
    """`leaf[index]` of our tree: one part of one of their tensors."""

    leaf: int
    """The number of the array, in JAX's order."""
    index: tuple[int, ...]
    """Into its stacked dims."""
    shape: Shape


@dataclasses.dataclass(frozen=True)
class TensorPlan:
    """One of their tensors."""

    mapping: TensorMapping
    slices: tuple[_ArraySlice, ...]
    """One a part of the row."""
    num_stacked_dims: int
    """How many stacked dims the tensor keeps: 1 for all experts in one."""

    @property
    def shape(self) -> Shape:
        return self.mapping.shape(self.part_shapes, self.num_stacked_dims)

    @property
    def part_shapes(self) -> list[Shape]:
        return [piece.shape for piece in self.slices]


def plan(tree: PyTree, name_map: NameMap) -> dict[str, TensorPlan]:
    """Their names -> what is in each. `tree` may hold arrays or shapes.

    **Raises** `KeyError` where the table has no row for one of our arrays, and where only some parts of a fused tensor
    are in the tree; `ValueError` for two rows with one part: mistakes in a family's table.
    """
    ours = invert_name_map(name_map)
    found: dict[str, tuple[TensorMapping, dict[int, _ArraySlice], int]] = {}
    for leaf, (place, x) in enumerate(zip(list_parameter_paths(tree), jax.tree.leaves(tree), strict=True)):
        theirs, row, part = find_mapping(place, ours)
        stars = theirs.count("*")
        for index, numbers in iterate_indices(place.ranges[:stars]):
            piece = _ArraySlice(leaf, index, tuple(x.shape[stars:]))
            name = format_path(theirs, numbers)
            found.setdefault(name, (row, {}, len(place.ranges) - stars))[1][part] = piece
    for name, (row, pieces, _) in found.items():
        if len(pieces) < len(row.parts):
            raise KeyError(f"{name} is made of {', '.join(row.parts)}, and the model has only some of them")
    return {
        name: TensorPlan(row, tuple(p for _, p in sorted(pieces.items())), lead)
        for name, (row, pieces, lead) in found.items()
    }


def invert_name_map(name_map: NameMap) -> Mapping[str, tuple[str, TensorMapping, int]]:
    """Our name -> their name, the row, and which of its parts."""
    found: dict[str, tuple[str, TensorMapping, int]] = {}
    for theirs, row in prefixed("", "", name_map).items():
        for number, part in enumerate(row.parts):
            if part in found:
                raise ValueError(f"the table has two rows for {part}: {found[part][0]} and {theirs}")
            found[part] = theirs, row, number
    return found


def find_mapping(
    path: ParameterPath, ours: Mapping[str, tuple[str, TensorMapping, int]]
) -> tuple[str, TensorMapping, int]:
    """The row for one of our arrays: of its own name, of its module's, or of its module's without the last star, where
    their tensor keeps the stacked dim."""
    module, _, field = path.name.rpartition(".")
    for name, suffix in ((path.name, ""), (module, f".{field}"), (".".join(module.rsplit(".*.", 1)), f".{field}")):
        if name in ours:
            theirs, row, part = ours[name]
            return theirs + suffix, row, part
    raise KeyError(f"the table has no row for {path.name}")


def strip_base_prefix_if_absent(name_map: NameMap, names: set[str]) -> NameMap | None:
    """The table without the first word of their names, where the files of a model without its head lack it; None where
    they do not."""
    prefix = next(iter(name_map)).partition(".")[0] + "."
    if not names or any(name.startswith(prefix) for name in names):
        return None
    return strip_base_prefix(name_map)


def strip_base_prefix(name_map: NameMap) -> NameMap:
    prefix = next(iter(name_map)).partition(".")[0] + "."
    return {name.removeprefix(prefix): row for name, row in name_map.items()}

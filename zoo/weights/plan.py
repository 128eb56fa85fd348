"""Plan a load or a save: apply a family's name map to one model, tensor by tensor."""

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from typing import TypeVar

import jax
from jaxtyping import PyTree

from zoo.models.hf.spec import Config, Family, NameMap, Origin, Shape, TensorMapping, prefixed
from zoo.models.parameter_paths import ParameterPath, format_path, iterate_indices, list_parameter_paths

from .safetensors import CheckpointError

_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True)
class _ArraySlice:
    """`leaf[index]` of the model: one part of a checkpoint's tensor."""

    leaf: int
    """The array's number, in JAX's leaf order."""
    index: tuple[int, ...]
    """Index into the array's stacked dims."""
    shape: Shape


@dataclasses.dataclass(frozen=True)
class TensorPlan:
    """The parts of one checkpoint tensor, each a slice of one of the model's arrays."""

    mapping: TensorMapping
    slices: tuple[_ArraySlice, ...]
    """One per part of `mapping`."""
    num_stacked_dims: int
    """Stacked dims that the tensor itself has: 1 if it holds all experts."""

    @property
    def shape(self) -> Shape:
        return self.mapping.shape(self.part_shapes, self.num_stacked_dims)

    @property
    def part_shapes(self) -> list[Shape]:
        return [piece.shape for piece in self.slices]


def plan_tensors(tree: PyTree, name_map: NameMap) -> dict[str, TensorPlan]:
    """Return the plan of each checkpoint tensor, by its name. `tree` may hold arrays or shapes.

    **Raises** `CheckpointError` if the name map lacks one of the model's arrays, or the model some parts of a fused
    tensor; `ValueError` if two rows name one part. Each is a mistake in the family's name map.
    """
    mappings = invert_name_map(name_map)
    found: dict[str, tuple[TensorMapping, dict[int, _ArraySlice], int]] = {}
    for leaf, (path, x) in enumerate(zip(list_parameter_paths(tree), jax.tree.leaves(tree), strict=True)):
        pattern, mapping, part = find_mapping(path, mappings)
        stars = pattern.count("*")
        for index, numbers in iterate_indices(path.ranges[:stars]):
            index = path.locate(index, x.shape)
            piece = _ArraySlice(leaf, index, tuple(x.shape[len(index) :]))
            name = format_path(pattern, numbers)
            chosen, slices, _ = found.setdefault(name, (mapping, {}, len(path.ranges) - stars))
            if chosen is not mapping:
                raise CheckpointError(f"{name} would be {chosen.parts[0]} and {mapping.parts[0]} of one layer")
            slices[part] = piece
    for name, (mapping, slices, _) in found.items():
        if len(slices) < len(mapping.parts):
            raise CheckpointError(f"{name} is made of {', '.join(mapping.parts)}, and the model has only some of them")
    return {
        name: TensorPlan(mapping, tuple(piece for _, piece in sorted(slices.items())), num_stacked_dims)
        for name, (mapping, slices, num_stacked_dims) in found.items()
    }


def drop_tensors(tensors: Mapping[str, _T], names: Collection[str]) -> dict[str, _T]:
    """Return all but some tensors, or the plans of them, by their names."""
    return {name: x for name, x in tensors.items() if name not in names}


def invert_name_map(name_map: NameMap) -> Mapping[str, tuple[str, TensorMapping, int]]:
    """Return our parameter name -> (the checkpoint's name, its mapping, number of the part)."""
    inverse: dict[str, tuple[str, TensorMapping, int]] = {}
    for name, mapping in prefixed("", "", name_map).items():
        while mapping is not None:
            for number, part in enumerate(mapping.parts):
                if part in inverse:
                    raise ValueError(f"the table has two rows for {part}: {inverse[part][0]} and {name}")
                inverse[part] = name, mapping, number
            mapping = mapping.otherwise
    return inverse


def find_mapping(
    path: ParameterPath, mappings: Mapping[str, tuple[str, TensorMapping, int]]
) -> tuple[str, TensorMapping, int]:
    """Return the mapping of one of our arrays: by its own name, by its module's name, or by its module's name without
    the last star if the checkpoint's tensor keeps the stacked dim."""
    module, _, field = path.name.rpartition(".")
    for name, suffix in ((path.name, ""), (module, f".{field}"), (".".join(module.rsplit(".*.", 1)), f".{field}")):
        if name in mappings:
            pattern, mapping, part = mappings[name]
            return pattern + suffix, mapping, part
    raise CheckpointError(f"the table of names has no row for {path.name}")


def list_callers(config: Config, notes: Origin) -> Mapping[str, str]:
    """Return the names of modules that layers of a checkpoint share, in each later layer that calls one -> in the
    first: see `Family`."""
    if notes.family.callers is None:
        return {}
    callers = notes.family.callers(config)
    if not notes.lacks_base_prefix:
        return callers
    return {other.partition(".")[2]: first.partition(".")[2] for other, first in callers.items()}


def list_copies(names: Iterable[str], callers: Mapping[str, str]) -> dict[str, str]:
    """Return the names under which later callers of shared modules repeat these tensors -> their names."""
    return {
        other + name.removeprefix(first): name
        for other, first in callers.items()
        for name in names
        if name.startswith(f"{first}.")
    }


def name_in_memory(family: Family) -> Family:
    """Return the family with the names of modules in memory, where these differ from the names in files."""
    if family.memory_names is None:
        return family
    return dataclasses.replace(family, names=family.memory_names, older_endings={})  # those are of files


def rename_module(name: str, modules: Mapping[str, str]) -> str:
    """Return a tensor's name with the name of its module replaced, by `modules`: old name -> new name."""
    for old, new in modules.items():
        if name.startswith(f"{old}."):
            return new + name.removeprefix(old)
    return name

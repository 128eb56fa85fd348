"""A family's table of names, applied to one model: which tensor of a checkpoint holds which part of which array."""

import dataclasses
from collections.abc import Mapping

import jax
from jaxtyping import PyTree

from zoo.models.facts import Row, Shape, Table, under
from zoo.models.names import Place, each, fill, places


@dataclasses.dataclass(frozen=True)
class Piece:
    """`leaf[index]` of our tree: one part of one of their tensors."""

    leaf: int
    """The number of the array, in JAX's order."""
    index: tuple[int, ...]
    """Into its stacked dims."""
    shape: Shape


@dataclasses.dataclass(frozen=True)
class Planned:
    """One of their tensors."""

    row: Row
    pieces: tuple[Piece, ...]
    """One a part of the row."""
    lead: int
    """How many stacked dims the tensor keeps: 1 for all experts in one."""

    @property
    def shape(self) -> Shape:
        return self.row.shape(self.parts, self.lead)

    @property
    def parts(self) -> list[Shape]:
        return [piece.shape for piece in self.pieces]


def plan(tree: PyTree, table: Table) -> dict[str, Planned]:
    """Their names -> what is in each. `tree` may hold arrays or shapes.

    **Raises** `KeyError` where the table has no row for one of our arrays, and where only some parts of a fused tensor
    are in the tree; `ValueError` for two rows with one part: mistakes in a family's table.
    """
    ours = parts_of(table)
    found: dict[str, tuple[Row, dict[int, Piece], int]] = {}
    for leaf, (place, x) in enumerate(zip(places(tree), jax.tree.leaves(tree), strict=True)):
        theirs, row, part = row_of(place, ours)
        stars = theirs.count("*")
        for index, numbers in each(place.numbers[:stars]):
            piece = Piece(leaf, index, tuple(x.shape[stars:]))
            name = fill(theirs, numbers)
            found.setdefault(name, (row, {}, len(place.numbers) - stars))[1][part] = piece
    for name, (row, pieces, _) in found.items():
        if len(pieces) < len(row.parts):
            raise KeyError(f"{name} is made of {', '.join(row.parts)}, and the model has only some of them")
    return {
        name: Planned(row, tuple(p for _, p in sorted(pieces.items())), lead)
        for name, (row, pieces, lead) in found.items()
    }


def parts_of(table: Table) -> Mapping[str, tuple[str, Row, int]]:
    """Our name -> their name, the row, and which of its parts."""
    found: dict[str, tuple[str, Row, int]] = {}
    for theirs, row in under("", "", table).items():
        for number, part in enumerate(row.parts):
            if part in found:
                raise ValueError(f"the table has two rows for {part}: {found[part][0]} and {theirs}")
            found[part] = theirs, row, number
    return found


def row_of(place: Place, ours: Mapping[str, tuple[str, Row, int]]) -> tuple[str, Row, int]:
    """The row for one of our arrays: of its own name, of its module's, or of its module's without the last star, where
    their tensor keeps the stacked dim."""
    module, _, field = place.name.rpartition(".")
    for name, suffix in ((place.name, ""), (module, f".{field}"), (".".join(module.rsplit(".*.", 1)), f".{field}")):
        if name in ours:
            theirs, row, part = ours[name]
            return theirs + suffix, row, part
    raise KeyError(f"the table has no row for {place.name}")


def bare(table: Table, names: set[str]) -> Table | None:
    """The table without the first word of their names, where the files of a model without its head lack it; None where
    they do not."""
    prefix = next(iter(table)).partition(".")[0] + "."
    if not names or any(name.startswith(prefix) for name in names):
        return None
    return without_prefix(table)


def without_prefix(table: Table) -> Table:
    prefix = next(iter(table)).partition(".")[0] + "."
    return {name.removeprefix(prefix): row for name, row in table.items()}

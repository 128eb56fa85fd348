"""Repeating patterns of layers, and their blocks stacked over the repeats: on one device, or dealt out to stages."""

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int

from zoo.parallel import Dim, stacked, vary
from zoo.parallel.collectives import current_mesh, is_pipelined, shard_offset
from zoo.parallel.rounds import AbstractLayers, reshape_layers
from zoo.parallel.tokens import find_token_axes

from .decoder import AbstractBlock

_Modules = TypeVar("_Modules")


def find_patterns(items: Sequence[Any]) -> list[tuple[int, int]]:
    """Split a sequence into repeating patterns `(period, repeats)`, of few items and few patterns: each item of a
    pattern is compiled, and each pattern is a loop, which counts as half an item.

    `find_patterns("aaaa") == [(1, 4)]`; `find_patterns("lllllg" * 10 + "ll") == [(6, 10), (1, 2)]`, five local layers
    per global one.

    Dynamic programming: the best split of the first n items is the best split of fewer, and one pattern more.
    """
    items = tuple(items)
    best = [_Split(0, 0, [])]
    for end in range(1, len(items) + 1):
        options = []
        for period in range(1, end + 1):
            start = end - period
            while start >= 0 and items[start : start + period] == items[end - period : end]:
                before = best[start]
                patterns = [*before.patterns, (period, (end - start) // period)]
                options.append(_Split(before.cost + period + 0.5, before.compiled + period, patterns))
                start -= period
        best.append(min(options, key=lambda split: (split.cost, split.compiled)))
    return best[-1].patterns


class _Split(NamedTuple):
    """A split of a sequence."""

    cost: float
    compiled: int
    patterns: list[tuple[int, int]]


def number_structures(blocks: Sequence[AbstractBlock]) -> list[int]:
    """Return a number for each block, equal for blocks that differ only in the values of their arrays."""
    kinds: list[AbstractBlock] = []
    numbers = []
    for block in blocks:
        number = next((i for i, kind in enumerate(kinds) if _have_equal_structure(kind, block)), len(kinds))
        if number == len(kinds):
            kinds.append(block)
        numbers.append(number)
    return numbers


def _have_equal_structure(first: AbstractBlock, second: AbstractBlock) -> bool:
    """Return True for blocks that one program can run."""
    arrays, static = zip(*(eqx.partition(block, eqx.is_array) for block in (first, second)), strict=True)
    shapes = [[(x.shape, x.dtype) for x in jax.tree.leaves(tree)] for tree in arrays]
    return shapes[0] == shapes[1] and bool(eqx.tree_equal(*static))


class Segment(AbstractLayers):
    """A pattern of blocks, stacked over its repeats: every array has a leading dim `layers`, or `ends`.

    For a pipeline in several rounds it has two, `rounds layers`: round 0 of the first stage has the first repeats, and
    so on around the stages, so that the numbers of the repeats go on from row to row.
    """

    blocks: tuple[AbstractBlock, ...] = stacked("layers")
    num_repeats: int = eqx.field(static=True)
    """Repeats of the pattern over all devices. Static, so that a tree without arrays has it too."""
    layers: tuple[Dim, ...] = eqx.field(static=True, default=(Dim("layers"),))
    """Dims of the repeats. `layers` is sharded over `pipe`, `ends` is replicated: segments that are not stages."""

    @property
    def is_pipelined(self) -> bool:
        """True on a mesh that deals these layers out to the stages of a pipeline."""
        return is_pipelined(self.layers[-1].name)

    @property
    def rounds(self) -> int:
        arrays = [x for x in jax.tree.leaves(self.blocks) if hasattr(x, "shape")]
        return arrays[0].shape[0] if arrays and len(self.layers) > 1 else 1

    @property
    def num_local_layers(self) -> int:
        """Layers on this device, in all rounds."""
        return self.rounds * self.local_repeats * len(self.blocks)

    @property
    def local_repeats(self) -> int:
        """Repeats of the pattern on this device, in one round."""
        arrays = jax.tree.leaves(self.blocks)
        if not arrays:  # every block is shared, and no pipeline deals these out
            return self.num_repeats
        return arrays[0].shape[len(self.layers) - 1]

    @property
    def first_repeat(self) -> int | Int[Array, ""]:
        """Number of the first repeat on this device, in the first round."""
        return shard_offset(jax.tree.leaves(self.blocks)[0], self.layers[-1].name, self.local_repeats)

    def split_rounds(self, rounds: int) -> "Segment":
        if self.layers[-1].name != "layers":
            return self
        if rounds == self.rounds and (rounds > 1) == (len(self.layers) > 1):
            return self
        merged = self.merge_rounds()
        if rounds == 1:
            return merged
        if self.num_repeats % rounds:
            raise ValueError(
                f"{self.num_repeats} repeats of {len(self.blocks)} layers do not divide evenly over rounds={rounds}: "
                f"let the rounds divide {self.num_repeats}, or move layers out of the stages with zoo.models.split_ends"
            )
        dims = (Dim("rounds"), *merged.layers)
        return merged._reshape(lambda shape: (rounds, shape[0] // rounds, *shape[1:]), dims)

    def merge_rounds(self) -> "Segment":
        if len(self.layers) == 1:
            return self
        mesh = current_mesh()
        is_empty = not jax.tree.leaves(self.blocks)
        if mesh is not None and mesh.layout.rounds > self.rounds and not is_empty:
            raise NotImplementedError(
                f"the layers of all {mesh.layout.rounds} rounds at once, for a penalty on parameters or a plain call, "
                "are not there while a pipeline runs one round: ask for them after the model has been called, or take "
                'rounds=1, or Schedule("gpipe")'
            )
        return self._reshape(lambda shape: (shape[0] * shape[1], *shape[2:]), self.layers[1:])

    def merge_unless_pipelined(self) -> "Segment":
        """Return the layers with one leading dim, as loops of one device run them; stages run round by round."""
        if self.is_pipelined:
            return self
        return self.merge_rounds()

    def split_ends(self, stages: int) -> tuple["Segment", ...]:
        """Return only this segment if `stages` divide its repeats; else a shorter one, and the rest as ends, which are
        on no stage. **Raises** `ValueError` for fewer repeats than stages."""
        kept = self.num_repeats // stages * stages
        if kept == self.num_repeats:
            return (self,)
        if not kept:
            raise ValueError(
                f"{self.num_repeats} repeats of {len(self.blocks)} layers are too few for {stages} stages: let pipe "
                f"times the rounds be at most {self.num_repeats}"
            )
        merged = self.merge_rounds()
        stages_part, end = (merged._take_repeats(*bounds) for bounds in ((0, kept), (kept, self.num_repeats)))
        return stages_part.split_rounds(self.rounds), type(self)(end.blocks, end.num_repeats, (Dim("ends"),))

    def _take_repeats(self, begin: int, end: int) -> "Segment":
        def take(x):
            if isinstance(x, jax.ShapeDtypeStruct):
                return jax.ShapeDtypeStruct((end - begin, *x.shape[1:]), x.dtype)
            return x[begin:end] if hasattr(x, "shape") else x

        return type(self)(jax.tree.map(take, self.blocks), end - begin, self.layers)

    def take_round(self, number: Int[Array, ""]) -> "Segment":
        """Return the layers of this device in one round, without the dim `rounds`."""
        if len(self.layers) == 1:
            return self
        arrays, static = eqx.partition(self.blocks, eqx.is_array)
        # A cut of the loss has taken the round already: its gradient is then as small as the round.
        take = lambda x: x[0] if len(x) == 1 else lax.dynamic_index_in_dim(x, number, keepdims=False)
        return type(self)(eqx.combine(jax.tree.map(take, arrays), static), self.num_repeats, self.layers[1:])

    def _reshape(self, new_shape: Callable[[tuple[int, ...]], tuple[int, ...]], layers: tuple[Dim, ...]) -> "Segment":
        reshape = lambda x: reshape_layers(x, new_shape(x.shape)) if hasattr(x, "shape") else x
        return type(self)(jax.tree.map(reshape, self.blocks), self.num_repeats, layers)


def check_order(order: Sequence[int] | None, layers: int) -> list[int]:
    """Return the numbers of layers in the order in which they run: each once by default. **Raises** `ValueError` for an
    unknown layer, and for one that does not run."""
    if order is None:
        return list(range(layers))
    if unknown := [number for number in order if not 0 <= number < layers]:
        raise ValueError(f"order names layer {unknown[0]}, and there are layers 0 to {layers - 1}")
    if missing := sorted(set(range(layers)) - set(order)):
        raise ValueError(f"order leaves out layer {missing[0]}: run it, or drop its factory")
    return list(order)


def make_segments(items: Sequence[Hashable], stack: Callable[[range], AbstractBlock]) -> tuple[Segment, ...]:
    """Split layers into segments by their items, equal for equal layers. `stack` returns the stacked block of layers
    with these numbers. The longest pattern is dealt out to the stages of a pipeline, others are ends."""
    patterns = find_patterns(items)
    longest = max(range(len(patterns)), key=lambda i: math.prod(patterns[i]), default=0)
    segments = []
    start = 0
    for number, (period, repeats) in enumerate(patterns):
        end = start + period * repeats
        blocks = tuple(stack(range(start + i, end, period)) for i in range(period))
        segments.append(Segment(blocks, repeats, (Dim("layers" if number == longest else "ends"),)))
        start = end
    return tuple(segments)


def vary_arrays(modules: _Modules) -> _Modules:
    """Return the arrays of modules that a loop over layers runs. With sequence parallelism the gradients of arrays that
    `tensor` replicates, such as norms, are parts of a sum: cast here, they are all-reduced once, after the loop."""
    return vary(eqx.filter(modules, eqx.is_array), find_token_axes())


def index_tree(tree: Any, i: int | tuple[slice | int, ...]) -> Any:
    """Return element `i` along the leading dim of every array, or index all of its leading dims. Of an array of NumPy
    it is a view."""
    return jax.tree.map(lambda x: x[i] if eqx.is_array(x) or isinstance(x, np.ndarray) else x, tree)


def stack_trees(trees: Sequence[Any], axis: int = 0) -> Any:
    """Stack the arrays of equal trees along a new dim."""
    return jax.tree.map(lambda *x: jnp.stack(x, axis), *trees)


def unstack_tree(tree: Any, size: int) -> list[Any]:
    """Unstack every array along its leading dim, of this size. The gradient stacks once, where the gradient of indexing
    would pad and add once per element."""
    arrays, treedef = jax.tree.flatten(tree)
    unstacked = [jax.lax.unstack(x) for x in arrays]
    return [jax.tree.unflatten(treedef, [elements[i] for elements in unstacked]) for i in range(size)]

"""Which modules of a model an adapter goes to: by name, by pattern, by predicate."""

import difflib
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import numpy as np

from zoo.layers import AbstractEmbedding, AbstractLinear
from zoo.models.parameter_paths import IndexRanges, format_path, iterate_indices, walk_parameters

from .base import get_linear_shape

Targets = str | Sequence[str] | Callable[[str], bool]
ALL_LINEAR = "all-linear"


class LinearSite(NamedTuple):
    """A module that multiplies, as it stands in a model: stacked over layers, over experts too."""

    name: str
    """With a star for each number."""
    numbers: IndexRanges
    module: AbstractLinear | AbstractEmbedding

    @property
    def identity(self) -> tuple[str, IndexRanges]:
        """What no other matrix of a model has: kinds of layers that take turns share their names."""
        return self.name, self.numbers

    def names(self) -> dict[tuple[int, ...], str]:
        """Index into the stacked dims -> the name of what lies there."""
        return {index: format_path(self.name, numbers) for index, numbers in iterate_indices(self.numbers)}

    def sizes(self) -> tuple[int, int]:
        """Outputs and inputs of one of them; rows and their length of a table."""
        shapes = eqx.filter_eval_shape(lambda base: base, self.module)
        for _ in self.numbers:
            shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), shapes)
        return get_linear_shape(shapes)

    @property
    def supports_dropout(self) -> bool:
        """Whether it reads rows of tokens, within a layer: heads, embeddings and experts do not."""
        return self.name not in ("head", "embedding") and len(self.numbers) <= 1

    def tabulate(self, value: Callable[[str], Any], dtype: Any) -> np.ndarray:
        """`value` of each name, at its index."""
        table = np.zeros([len(run) for run in self.numbers], dtype)
        for index, name in self.names().items():
            table[index] = value(name)
        return table


def vmap_stacked(function: Callable, numbers: IndexRanges) -> Callable:
    """A function of one layer's matrix, or one expert's, as one of all that are stacked together."""
    for _ in numbers:
        function = eqx.filter_vmap(function)
    return function


def is_linear_site(node: Any) -> bool:
    """Whether it is one matrix, or a table, or one that adapters were put around."""
    return isinstance(node, AbstractEmbedding) or (isinstance(node, AbstractLinear) and hasattr(node, "in_"))


def find_linears(model: Any, *, include_embeddings: bool = False) -> list[LinearSite]:
    """Every module of a model that multiplies one matrix; with `tables` the embedding too."""
    nodes = jax.tree.leaves(model, is_leaf=is_linear_site)
    named = walk_parameters(model, "", (), is_linear_site)
    found = [LinearSite(*at, node) for at, node in zip(named, nodes, strict=True) if is_linear_site(node)]
    return [one for one in found if include_embeddings or not isinstance(one.module, AbstractEmbedding)]


def match_targets(targets: Targets, sites: Sequence[LinearSite]) -> Callable[[str], bool]:
    """Whether a module of this name, a layer's number in it, is meant.

    - `"all-linear"`: every matrix but the head's and the embedding.
    - a name: `"query"`, `"attention.query"`, `"layers.3.attention.query"` is meant by what ends with it. A pattern is
      one of Python's regular expressions and has to fit the whole name: `r"layers\\.[01]\\..*"`.
    - a function of the name.

    **Raises** `ValueError` where one of them means nothing, with names that are near.
    """
    names = [name for one in sites for name in one.names().values()]
    if callable(targets):
        if not any(map(targets, names)):
            raise ValueError(f"the function given for targets takes none of the model's {len(names)} matrices")
        return targets
    wanted = [targets] if isinstance(targets, str) else list(targets)
    if not wanted:
        raise ValueError("targets names no module")
    for one in wanted:
        if not any(matches(one, name) for name in names):
            raise ValueError(f"no matrix of the model is meant by the target {one!r}. {_suggest(one, sites)}")
    return lambda name: any(matches(one, name) for one in wanted)


def matches(target: str, name: str) -> bool:
    """Whether one target means a module."""
    if target == ALL_LINEAR:
        return name not in ("head", "embedding")
    if name == target or name.endswith("." + target):
        return True
    try:
        return re.fullmatch(target, name) is not None
    except re.error as error:
        raise ValueError(f"the target {target!r} is no name, and no pattern either: {error}") from None


def _suggest(target: str, sites: Sequence[LinearSite]) -> str:
    """What may have been meant, or what there is."""
    words = sorted({name.rpartition(".")[2] for name, *_ in sites})
    return f"{suggest_words(target, words)[:-1]}, or {ALL_LINEAR!r}."


def suggest_words(target: str, words: Sequence[str]) -> str:
    """Which of these words may have been meant, and all there are."""
    last = target.rpartition(".")[2]
    close = difflib.get_close_matches(last, words, cutoff=0.5) + [word for word in words if last and last in word]
    told = f"Is it {' or '.join(dict.fromkeys(close))}? " if close else ""
    return f"{told}There are {', '.join(words)}."


def lookup_by_pattern(patterns: dict[str, Any], default: Any) -> Callable[[str], Any]:
    """The value of the first pattern that means a name, or the default."""
    return lambda name: next((value for pattern, value in patterns.items() if matches(pattern, name)), default)

"""Target modules: select the linear layers and embeddings that surgery replaces or wraps, by name, pattern or
predicate."""

import difflib
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import numpy as np

from zoo.layers import AbstractLinear
from zoo.layers.embedding import AbstractEmbedding
from zoo.parallel.trainable_copy import materialize

from .parameter_paths import IndexRanges, format_path, iterate_indices, list_modules

Targets = str | Sequence[str] | Callable[[str], bool]
ALL_LINEAR = "all-linear"
_HEADS = ("head", "score", "embedding")
"""Modules outside of the layers, which read or write tokens or classes."""


class LinearSite(NamedTuple):
    """A linear layer or embedding of a model, with its path; stacked over layers, and over experts if it has any."""

    name: str
    """The path, with a star for each stacked index: `layers.*.attention.query`."""
    ranges: IndexRanges
    """The indices that each star stands for."""
    module: AbstractLinear | AbstractEmbedding

    @property
    def identity(self) -> tuple[str, IndexRanges]:
        """Key that is unique within the model, unlike the name: alternating kinds of layers share names."""
        return self.name, self.ranges

    def list_names(self) -> dict[tuple[int, ...], str]:
        """Map each index into the stacked dims to the full path of the module at that index."""
        return {index: format_path(self.name, indices) for index, indices in iterate_indices(self.ranges)}

    def get_shape(self) -> tuple[int, int]:
        """Return the shape (out, in) of one layer's weight, or (vocab, embed) of an embedding table."""
        shapes = eqx.filter_eval_shape(lambda base: base, self.module)
        for _ in self.ranges:
            shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), shapes)
        return get_linear_shape(shapes)

    @property
    def supports_dropout(self) -> bool:
        """True if the module reads rows of tokens inside a layer. Heads, embeddings and experts do not."""
        return not _is_head(self.name) and len(self.ranges) <= 1

    def tabulate(self, value: Callable[[str], Any], dtype: Any) -> np.ndarray:
        """Return an array of `value(name)` over the stacked dims."""
        table = np.zeros([len(run) for run in self.ranges], dtype)
        for index, name in self.list_names().items():
            table[index] = value(name)
        return table


def get_linear_shape(base: AbstractLinear | AbstractEmbedding) -> tuple[int, int]:
    """Return the shape (out, in) of a weight, or (vocab, embed) of an embedding table, without computing it."""
    return eqx.filter_eval_shape(lambda base: materialize(base).dense_weight, base).shape


def vmap_stacked(function: Callable, ranges: IndexRanges) -> Callable:
    """Map a function of one layer's module over all stacked dims."""
    for _ in ranges:
        function = eqx.filter_vmap(function)
    return function


def is_linear_site(node: Any) -> bool:
    """Return True for an embedding, or a linear layer with one weight matrix, wrapped by adapters or not."""
    return isinstance(node, AbstractEmbedding) or (isinstance(node, AbstractLinear) and hasattr(node, "in_"))


def find_linears(model: Any, *, include_embeddings: bool = False) -> list[LinearSite]:
    """List every linear layer of a model that has one weight matrix, and the embedding if asked for."""
    sites = [LinearSite(*found) for found in list_modules(model, is_linear_site)]
    return [site for site in sites if include_embeddings or not isinstance(site.module, AbstractEmbedding)]


def match_targets(targets: Targets, sites: Sequence[LinearSite]) -> Callable[[str], bool]:
    """Return a predicate of full module paths (with layer indices) that is True for target modules.

    - `"all-linear"`: every linear layer except the head and layers of `model.predictors`, which other targets name:
      `r"predictors\\..*"`.
    - a name: `"query"`, `"attention.query"` and `"layers.3.attention.query"` match every path that ends with them. A
      pattern is a regular expression that matches the full path: `r"layers\\.[01]\\..*"`.
    - a predicate of the path.

    **Raises** `ValueError` for a target that matches nothing, with suggestions of similar names.
    """
    names = [name for site in sites for name in site.list_names().values()]
    if callable(targets):
        if not any(map(targets, names)):
            raise ValueError(f"the function given for targets takes none of the model's {len(names)} matrices")
        return targets
    patterns = [targets] if isinstance(targets, str) else list(targets)
    if not patterns:
        raise ValueError("targets names no module")
    for pattern in patterns:
        if not any(matches(pattern, name) for name in names):
            raise ValueError(f"no matrix of the model is meant by the target {pattern!r}. {_suggest(pattern, sites)}")
    return lambda name: any(matches(pattern, name) for pattern in patterns)


def matches(target: str, name: str) -> bool:
    """Return True if one target, a name or a pattern, matches the path of a module: of a module in a predictor only if
    the target names `predictors`."""
    if name.startswith("predictors.") and "predictors" not in target:
        return False
    if target == ALL_LINEAR:
        return not _is_head(name)
    if name == target or name.endswith("." + target):
        return True
    if target.replace(".", "").replace("_", "").isalnum():  # no pattern but for its dots: not worth compiling
        return len(target) == len(name) and all(a in (b, ".") for a, b in zip(target, name, strict=True))
    try:
        return re.fullmatch(target, name) is not None
    except re.error as error:
        raise ValueError(f"the target {target!r} is neither a name nor a valid pattern: {error}") from None


def _is_head(name: str) -> bool:
    """Return True for the path of a head or an embedding, also of the decoder in a model that reads images."""
    return name.removeprefix("decoder.") in _HEADS


def _suggest(target: str, sites: Sequence[LinearSite]) -> str:
    """Suggest similar module names, and list all."""
    words = sorted({name.rpartition(".")[2] for name, *_ in sites})
    return f"{suggest_words(target, words)[:-1]}, or {ALL_LINEAR!r}."


def suggest_words(target: str, words: Sequence[str]) -> str:
    """Suggest the words that are similar to `target`, and list all."""
    last = target.rpartition(".")[2]
    close = difflib.get_close_matches(last, words, cutoff=0.5) + [word for word in words if last and last in word]
    question = f"Is it {' or '.join(dict.fromkeys(close))}? " if close else ""
    return f"{question}There are {', '.join(words)}."


def lookup_by_pattern(patterns: dict[str, Any], default: Any) -> Callable[[str], Any]:
    """Return a function from a module path to the value of the first pattern that matches it, or to the default."""
    return lambda name: next((value for pattern, value in patterns.items() if matches(pattern, name)), default)

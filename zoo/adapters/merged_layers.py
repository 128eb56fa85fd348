"""Layers that hold merged weights, and the adapters merged into them.

The adapters are stored and not used. A function that looks for adapters in a model would find and change them without
any effect, so it either restores them first (`restore_adapters`) or refuses the model (`require_unmerged`).
"""

from typing import Any, TypeVar

import equinox as eqx
import jax
from jaxtyping import Array, Float, Int

from zoo.layers import AbstractLinear
from zoo.layers.embedding import AbstractEmbedding
from zoo.parallel import Dim, buffer
from zoo.parallel.fields import wrapped
from zoo.shapes import ResidualStream, Tokens

from .base import AbstractAdapter, AbstractLinearAdapter, BiasVector, Matrix

_Model = TypeVar("Model")


class MergedEmbedding(AbstractEmbedding):
    """An embedding with a merged adapter, and the original adapter, which `adapters.unmerge` restores."""

    base: AbstractEmbedding = wrapped()
    made_of: AbstractAdapter = buffer()

    adapter_name: str = eqx.field(static=True)
    multiplier: float = eqx.field(static=True)

    def __call__(self, tokens: Tokens) -> ResidualStream:
        return self.base(tokens)

    def transposed(self, x: Float[Array, "*rows embed"]) -> Float[Array, "*rows vocab"]:
        return self.base.transposed(x)

    @property
    def dense_weight(self) -> Float[Array, "vocab embed"]:
        return self.base.dense_weight

    def with_weight(self, weight: Float[Array, "vocab embed"], bias: None = None) -> AbstractEmbedding:
        return self.base.with_weight(weight)

    @property
    def table_shape(self) -> tuple[int, int]:
        return self.base.table_shape


class MergedLinear(AbstractLinear):
    """A linear layer with a merged adapter, and the original adapter, which `adapters.unmerge` restores."""

    base: AbstractLinear = wrapped()
    made_of: AbstractLinearAdapter = buffer()

    in_: Dim = eqx.field(static=True)
    out: Dim = eqx.field(static=True)
    adapter_name: str = eqx.field(static=True)

    @property
    def out_size(self) -> int:
        return self.base.out_size

    @property
    def dense_weight(self) -> Matrix:
        return self.base.dense_weight

    @property
    def dense_bias(self) -> BiasVector | None:
        return self.base.dense_bias

    def __call__(self, x: Float[Array, "*rows in"]) -> Float[Array, "*tokens out"]:
        return self.base(x)

    def transposed(self, x: Float[Array, "*rows out"]) -> Float[Array, "*rows in"]:
        return self.base.transposed(x)

    def grouped(self, x: Float[Array, "rows in"], sizes: Int[Array, "experts"]) -> Float[Array, "rows out"]:
        return self.base.grouped(x, sizes)

    def per_head(self, x: Float[Array, "*rows units in"]) -> Float[Array, "*rows units unit"]:
        return self.base.per_head(x)

    def per_head_transposed(self, x: Float[Array, "*rows units unit"]) -> Float[Array, "*rows units in"]:
        return self.base.per_head_transposed(x)


def has_merged(model: Any) -> bool:
    """Return True for a model that was merged with `keep=True`."""
    return any(map(_is_merged, jax.tree.leaves(model, is_leaf=_is_merged)))


def restore_adapters(model: _Model) -> _Model:
    """Return the model as it was before `merge(keep=True)`, or the model itself if it was not merged."""
    return jax.tree.map(lambda node: node.made_of if _is_merged(node) else node, model, is_leaf=_is_merged)


def require_unmerged(model: Any) -> None:
    """**Raises** `ValueError` for a model that was merged with `keep=True`."""
    if has_merged(model):
        raise ValueError(
            "the adapters of this model are merged into its weights and kept beside them (merge with keep=True): call "
            "zoo.adapters.unmerge(model) first"
        )


def _is_merged(node: Any) -> bool:
    return isinstance(node, MergedLinear | MergedEmbedding)

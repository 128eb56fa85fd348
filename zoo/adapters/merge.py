"""Adapters into the matrices they stand around, and out again."""

from typing import Any, Literal, TypeVar, get_args

import equinox as eqx
import jax
from jaxtyping import Array, Float, Int

from zoo.layers import AbstractEmbedding, AbstractLinear, AbstractPackedLinear
from zoo.models.names import Numbers, map_modules
from zoo.parallel import Dim, buffer, settled, transparent

from .abstract import AbstractAdapter, Matrix, Shift, dims_of
from .embedding import EmbeddingLoRA
from .several import Adapter, chosen, innermost, is_adapter, like
from .targets import matrices, over_stacked

Model = TypeVar("Model")
Quantised = Literal["refuse", "decode", "round"]


class MergedEmbedding(AbstractEmbedding):
    """A table with an adapter merged into it, and beside it what it was made of, so that it can be taken out again."""

    base: AbstractEmbedding = transparent()
    made_of: EmbeddingLoRA = buffer()

    label: str = eqx.field(static=True)
    multiplier: float = eqx.field(static=True)

    def __call__(self, tokens: Int[Array, "batch seq"]) -> Float[Array, "batch seq embed"]:
        return self.base(tokens)

    def transposed(self, x: Float[Array, "*rows embed"]) -> Float[Array, "*rows vocab"]:
        return self.base.transposed(x)

    @property
    def matrix(self) -> Float[Array, "vocab embed"]:
        return self.base.matrix

    def exchanged(self, matrix: Float[Array, "vocab embed"], shift: None = None) -> AbstractEmbedding:
        return self.base.exchanged(matrix)

    @property
    def sizes(self) -> tuple[int, int]:
        return self.base.sizes


class Merged(AbstractLinear):
    """A matrix with an adapter merged into it, and beside it what it was made of, so that it can be taken out again."""

    base: AbstractLinear = transparent()
    made_of: AbstractAdapter = buffer()

    in_: Dim = eqx.field(static=True)
    out: Dim = eqx.field(static=True)
    label: str = eqx.field(static=True)

    @property
    def out_size(self) -> int:
        return self.base.out_size

    @property
    def matrix(self) -> Matrix:
        return self.base.matrix

    @property
    def shift(self) -> Shift | None:
        return self.base.shift

    def __call__(self, x: Float[Array, "*rows in"]) -> Float[Array, "*rows out"]:
        return self.base(x)

    def transposed(self, x: Float[Array, "*rows out"]) -> Float[Array, "*rows in"]:
        return self.base.transposed(x)

    def grouped(self, x: Float[Array, "rows in"], sizes: Int[Array, "experts"]) -> Float[Array, "rows out"]:
        return self.base.grouped(x, sizes)

    def per_unit(self, x: Float[Array, "*rows units in"]) -> Float[Array, "*rows units unit"]:
        return self.base.per_unit(x)

    def per_unit_transposed(self, x: Float[Array, "*rows units unit"]) -> Float[Array, "*rows units in"]:
        return self.base.per_unit_transposed(x)


def merge(model: Model, *, keep: bool = False, quantised: Quantised = "refuse") -> Model:
    """The model with the adapters' changes in its matrices: as fast as it was without them.

    Matrices are changed in float32, whatever they are stored in, and rounded once. With `keep` the originals stay
    beside them for `unmerge`, which brings these back, however often: nothing is subtracted, and nothing drifts.
    Without it the model is like any other, and `zoo.save` writes it.

    - `quantised`: what becomes of a matrix in NF4, int8 or MXFP4. `"decode"`: a float32 `Linear` of the sum as it is,
      in 4 to 8 times the memory. `"round"`: the sum in the same form, each number off by at most, in int8, 1 / 254 of
      its row's largest magnitude, in NF4 0.152 of its block's and 1 / 510 of its row's, in MXFP4 a quarter of its
      block's. A change that is smaller than that may be lost.

    **Raises** `ValueError` for a model without adapters, and, unless `quantised` is given, for adapters around matrices
    that are quantised.
    """
    chosen(model, None)
    if quantised not in get_args(Quantised):
        raise ValueError(f"quantised is one of {', '.join(get_args(Quantised))}, not {quantised!r}")
    is_packed = lambda adapter: isinstance(innermost(adapter), AbstractPackedLinear)
    packed = [one.name or "the matrix" for one in matrices(model) if is_adapter(one.module) and is_packed(one.module)]
    if packed and quantised == "refuse":
        raise ValueError(
            f"to merge into {', '.join(packed)}, which are quantised, say how: quantised='decode' makes float32 "
            "matrices of them, quantised='round' rounds the sums again"
        )

    def fold(adapter: Any) -> Any:
        adapter = settled(adapter)
        base = innermost(adapter)
        if not isinstance(base, AbstractPackedLinear):
            return like(base.exchanged(adapter.matrix, adapter.shift), base)
        return (base.unpacked if quantised == "decode" else base.packed_again)(adapter.matrix, adapter.shift)

    def one(name: str, numbers: Numbers, adapter: Adapter) -> AbstractLinear | AbstractEmbedding:
        plain = over_stacked(fold, numbers)(adapter)
        if not keep:
            return plain
        if isinstance(adapter, EmbeddingLoRA):
            return MergedEmbedding(base=plain, made_of=adapter, label=adapter.label, multiplier=adapter.multiplier)
        return Merged(plain, adapter, *dims_of(adapter), adapter.label)

    merged = map_modules(one, model, is_adapter)
    return merged if keep else settled(merged)


def unmerge(model: Model) -> Model:
    """What `merge(model, keep=True)` was given. **Raises** `ValueError` where nothing was kept."""
    is_merged = lambda node: isinstance(node, Merged | MergedEmbedding)
    if not any(map(is_merged, jax.tree.leaves(model, is_leaf=is_merged))):
        raise ValueError("no merged adapter was kept in this model: merge with keep=True")
    return jax.tree.map(lambda node: node.made_of if is_merged(node) else node, model, is_leaf=is_merged)

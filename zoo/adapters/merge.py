"""Adapters into the matrices they stand around, and out again."""

from typing import Any, Literal, TypeVar, get_args

import equinox as eqx
import jax
from jaxtyping import Array, Float, Int

from zoo.layers import AbstractEmbedding, AbstractLinear, AbstractPackedLinear
from zoo.models.parameter_paths import IndexRanges, map_modules
from zoo.parallel import Dim, buffer, materialize, wrapped

from .base import AbstractAdapter, BiasVector, Matrix, get_dims
from .compose import Adapter, cast_like, check_adapter_name, get_base_layer, is_adapter
from .methods.embedding import EmbeddingLoRA
from .targets import find_linears, vmap_stacked

_Model = TypeVar("Model")
_QuantizedMerge = Literal["refuse", "decode", "round"]


class _MergedEmbedding(AbstractEmbedding):
    """A table with an adapter merged into it, and beside it what it was made of, so that it can be taken out again."""

    base: AbstractEmbedding = wrapped()
    made_of: EmbeddingLoRA = buffer()

    adapter_name: str = eqx.field(static=True)
    multiplier: float = eqx.field(static=True)

    def __call__(self, tokens: Int[Array, "batch seq"]) -> Float[Array, "batch seq embed"]:
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


class _MergedLinear(AbstractLinear):
    """A matrix with an adapter merged into it, and beside it what it was made of, so that it can be taken out again."""

    base: AbstractLinear = wrapped()
    made_of: AbstractAdapter = buffer()

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

    def __call__(self, x: Float[Array, "*rows in"]) -> Float[Array, "*rows out"]:
        return self.base(x)

    def transposed(self, x: Float[Array, "*rows out"]) -> Float[Array, "*rows in"]:
        return self.base.transposed(x)

    def grouped(self, x: Float[Array, "rows in"], sizes: Int[Array, "experts"]) -> Float[Array, "rows out"]:
        return self.base.grouped(x, sizes)

    def per_head(self, x: Float[Array, "*rows units in"]) -> Float[Array, "*rows units unit"]:
        return self.base.per_head(x)

    def per_head_transposed(self, x: Float[Array, "*rows units unit"]) -> Float[Array, "*rows units in"]:
        return self.base.per_head_transposed(x)


def merge(model: _Model, *, keep: bool = False, quantized: _QuantizedMerge = "refuse") -> _Model:
    """The model with the adapters' changes in its matrices: as fast as it was without them.

    Matrices are changed in float32, whatever they are stored in, and rounded once. With `keep` the originals stay
    beside them for `unmerge`, which brings these back, however often: nothing is subtracted, and nothing drifts.
    Without it the model is like any other, and `zoo.save` writes it.

    - `quantized`: what becomes of a matrix in NF4, int8 or MXFP4. `"decode"`: a float32 `Linear` of the sum as it is,
      in 4 to 8 times the memory. `"round"`: the sum in the same form, each number off by at most, in int8, 1 / 254 of
      its row's largest magnitude, in NF4 0.152 of its block's and 1 / 510 of its row's, in MXFP4 a quarter of its
      block's. A change that is smaller than that may be lost.

    **Raises** `ValueError` for a model without adapters, and, unless `quantized` is given, for adapters around matrices
    that are quantized.
    """
    check_adapter_name(model, None)
    if quantized not in get_args(_QuantizedMerge):
        raise ValueError(f"quantized is one of {', '.join(get_args(_QuantizedMerge))}, not {quantized!r}")
    is_packed = lambda adapter: isinstance(get_base_layer(adapter), AbstractPackedLinear)
    packed = [
        one.name or "the matrix" for one in find_linears(model) if is_adapter(one.module) and is_packed(one.module)
    ]
    if packed and quantized == "refuse":
        raise ValueError(
            f"to merge into {', '.join(packed)}, which are quantized, say how: quantized='decode' makes float32 "
            "matrices of them, quantized='round' rounds the sums again"
        )

    def fold(adapter: Any) -> Any:
        adapter = materialize(adapter)
        base = get_base_layer(adapter)
        if not isinstance(base, AbstractPackedLinear):
            return cast_like(base.with_weight(adapter.dense_weight, adapter.dense_bias), base)
        return (base.to_linear if quantized == "decode" else base.repack)(adapter.dense_weight, adapter.dense_bias)

    def one(name: str, numbers: IndexRanges, adapter: Adapter) -> AbstractLinear | AbstractEmbedding:
        plain = vmap_stacked(fold, numbers)(adapter)
        if not keep:
            return plain
        if isinstance(adapter, EmbeddingLoRA):
            return _MergedEmbedding(
                base=plain, made_of=adapter, adapter_name=adapter.adapter_name, multiplier=adapter.multiplier
            )
        return _MergedLinear(plain, adapter, *get_dims(adapter), adapter.adapter_name)

    merged = map_modules(one, model, is_adapter)
    return merged if keep else materialize(merged)


def unmerge(model: _Model) -> _Model:
    """What `merge(model, keep=True)` was given. **Raises** `ValueError` where nothing was kept."""
    is_merged = lambda node: isinstance(node, _MergedLinear | _MergedEmbedding)
    if not any(map(is_merged, jax.tree.leaves(model, is_leaf=is_merged))):
        raise ValueError("no merged adapter was kept in this model: merge with keep=True")
    return jax.tree.map(lambda node: node.made_of if is_merged(node) else node, model, is_leaf=is_merged)

"""Merge adapters into the weights of their base layers, and unmerge them."""

from typing import Any, Literal, TypeVar, get_args

import equinox as eqx
import jax
from jaxtyping import Array, Float, Int

from zoo.layers import AbstractEmbedding, AbstractLinear, AbstractPackedLinear
from zoo.models.parameter_paths import IndexRanges, map_modules
from zoo.models.targets import find_linears, vmap_stacked
from zoo.parallel import Dim, buffer, materialize, wrapped
from zoo.parallel.rounds import in_one_round
from zoo.shapes import ResidualStream, Tokens

from .base import AbstractAdapter, AbstractLinearAdapter, BiasVector, Matrix, get_base_layer, get_dims, is_adapter
from .compose import cast_like, check_adapter_name
from .methods.embedding import EmbeddingLoRA

_Model = TypeVar("Model")
_QuantizedMerge = Literal["refuse", "decode", "round"]


class _MergedEmbedding(AbstractEmbedding):
    """An embedding with a merged adapter, and the original adapter, which `unmerge` restores."""

    base: AbstractEmbedding = wrapped()
    made_of: EmbeddingLoRA = buffer()

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


class _MergedLinear(AbstractLinear):
    """A linear layer with a merged adapter, and the original adapter, which `unmerge` restores."""

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


@in_one_round
def merge(model: _Model, *, keep: bool = False, quantized: _QuantizedMerge = "refuse") -> _Model:
    """Merge all adapters into the weights of their bases, so that inference costs no more than without them.

    Weights are updated in float32, in any storage dtype, and rounded once. With `keep`, the adapters and original
    weights are stored too, and `unmerge` restores them exactly, any number of times. Without it, the result has the
    structure of the base model, and `zoo.save` writes it.

    - `quantized`: how to merge into a base in NF4, int8 or MXFP4. `"decode"`: a float32 `Linear` of the exact sum, in 4
      to 8 times the memory. `"round"`: the sum, quantized again in the same format, with a rounding error of at most,
      in int8, 1 / 254 of its row's largest magnitude, in NF4 0.152 of its block's and 1 / 510 of its row's, in MXFP4 a
      quarter of its block's. A smaller update may be lost.

    **Raises** `ValueError` for a model without adapters, and, unless `quantized` is given, for adapters of quantized
    layers.
    """
    check_adapter_name(model, None)
    if quantized not in get_args(_QuantizedMerge):
        raise ValueError(f"quantized is one of {', '.join(get_args(_QuantizedMerge))}, not {quantized!r}")
    is_packed = lambda adapter: isinstance(get_base_layer(adapter), AbstractPackedLinear)
    packed = [
        site.name or "the matrix" for site in find_linears(model) if is_adapter(site.module) and is_packed(site.module)
    ]
    if packed and quantized == "refuse":
        raise ValueError(
            f"to merge into {', '.join(packed)}, which are quantized, say how: quantized='decode' makes float32 "
            "matrices of them, quantized='round' rounds the sums again"
        )

    def merge_layer(adapter: Any) -> Any:
        adapter = materialize(adapter)
        base = get_base_layer(adapter)
        if not isinstance(base, AbstractPackedLinear):
            return cast_like(base.with_weight(adapter.dense_weight, adapter.dense_bias), base)
        return (base.to_linear if quantized == "decode" else base.repack)(adapter.dense_weight, adapter.dense_bias)

    def merge_stacked(name: str, ranges: IndexRanges, adapter: AbstractAdapter) -> AbstractLinear | AbstractEmbedding:
        merged = vmap_stacked(merge_layer, ranges)(adapter)
        if not keep:
            return merged
        if isinstance(adapter, EmbeddingLoRA):
            return _MergedEmbedding(
                base=merged, made_of=adapter, adapter_name=adapter.adapter_name, multiplier=adapter.multiplier
            )
        assert isinstance(adapter, AbstractLinearAdapter)
        return _MergedLinear(merged, adapter, *get_dims(adapter), adapter.adapter_name)

    merged = map_modules(merge_stacked, model, is_adapter)
    return merged if keep else materialize(merged)


def unmerge(model: _Model) -> _Model:
    """Restore the adapters and original weights after `merge(model, keep=True)`. **Raises** `ValueError` for a model
    that was not merged with `keep=True`."""
    is_merged = lambda node: isinstance(node, _MergedLinear | _MergedEmbedding)
    if not any(map(is_merged, jax.tree.leaves(model, is_leaf=is_merged))):
        raise ValueError("no merged adapter was kept in this model: merge with keep=True")
    return jax.tree.map(lambda node: node.made_of if is_merged(node) else node, model, is_leaf=is_merged)

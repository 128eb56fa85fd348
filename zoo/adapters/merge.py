"""Merge adapters into the weights of their base layers, and unmerge them."""

from typing import Any, Literal, TypeVar, get_args

from zoo.layers import AbstractLinear
from zoo.layers.embedding import AbstractEmbedding
from zoo.layers.quantized.packed import AbstractPackedLinear
from zoo.models.parameter_paths import IndexRanges, map_modules
from zoo.models.targets import find_linears, vmap_stacked
from zoo.parallel.trainable_copy import materialize

from .base import AbstractAdapter, AbstractLinearAdapter, get_base_layer, get_dims, is_adapter
from .compose import cast_like, check_adapter_name
from .merged_layers import MergedEmbedding, MergedLinear, has_merged, restore_adapters
from .methods.embedding import EmbeddingLoRA
from .methods.state import list_state_names
from .methods.token_rows import TokenRows, has_virtual_tokens

_Model = TypeVar("Model")
_QuantizedMerge = Literal["refuse", "decode", "round"]


def merge(model: _Model, *, keep: bool = False, quantized: _QuantizedMerge = "refuse") -> _Model:
    """Merge all adapters into the weights of their bases, so that inference costs no more than without them.

    Weights are updated in float32, in any storage dtype, and rounded once. With `keep`, the adapters and original
    weights are stored too, and `unmerge` restores them exactly, any number of times. Without it, the result has the
    structure of the base model, and `zoo.save` writes it. A model that was merged with `keep` is merged anew.

    - `quantized`: how to merge into a base in NF4, int8 or MXFP4. `"decode"`: a float32 `Linear` of the exact sum, in 4
      to 8 times the memory. `"round"`: the sum, quantized again in the same format, with a rounding error of at most,
      in int8, 1 / 254 of its row's largest magnitude, in NF4 0.152 of its block's and 1 / 510 of its row's, in MXFP4 a
      quarter of its block's. A smaller update may be lost.

    **Raises** `ValueError` for a model without adapters, with a trained state or virtual tokens, and, unless
    `quantized` is given, for adapters of quantized layers.
    """
    check_adapter_name(model, None)
    if list_state_names(model) or has_virtual_tokens(model):
        raise ValueError("no weight holds a trained state or virtual tokens: decode with them, or adapters.remove them")
    model = restore_adapters(model)
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
        if isinstance(adapter, EmbeddingLoRA | TokenRows):
            return MergedEmbedding(
                base=merged, made_of=adapter, adapter_name=adapter.adapter_name, multiplier=adapter.multiplier
            )
        assert isinstance(adapter, AbstractLinearAdapter)
        return MergedLinear(merged, adapter, *get_dims(adapter), adapter.adapter_name)

    merged = map_modules(merge_stacked, model, is_adapter)
    return merged if keep else materialize(merged)


def unmerge(model: _Model) -> _Model:
    """Restore the adapters and original weights after `merge(model, keep=True)`. **Raises** `ValueError` for a model
    that was not merged with `keep=True`."""
    if not has_merged(model):
        raise ValueError("no merged adapter was kept in this model: merge with keep=True")
    return restore_adapters(model)

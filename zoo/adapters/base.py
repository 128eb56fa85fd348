"""Base classes of adapters: modules that wrap a frozen linear layer or embedding and change its output."""

import abc
from collections.abc import Callable
from typing import Any, TypeVar

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from zoo.layers import AbstractLinear, TokenInfo
from zoo.parallel import Dim, Module, buffer
from zoo.parallel.fields import wrapped

Matrix = Float[Array, "out in"]
BiasVector = Float[Array, "out"]
Strength = Float[Array, ""] | Float[Array, "batch"]
_Adapter = TypeVar("_Adapter", bound="AbstractAdapter")
"""Not `typing.Self`, which beartype knows in decorated classes only: jaxtyping's import hook decorates functions."""


class AbstractAdapter(Module):
    """A module that wraps a frozen layer, its `base`, which may be another adapter, and adds trainable parameters.

    Fields of trainable parameters are declared with `adapter_parameter()`. The base keeps its parameter paths; the
    adapter's parameters are below its `adapter_name`.
    """

    base: eqx.AbstractVar[Any]
    strength: eqx.AbstractVar[Strength]
    """Multiplier of the update: 1 is on, 0 is off, other values interpolate or extrapolate. One scalar, or one per row
    of the batch (`select_per_row`)."""

    adapter_name: eqx.AbstractVar[str]

    @property
    @abc.abstractmethod
    def has_adapter(self) -> Bool[Array, "*stacked"]:
        """True in the layers that have the adapter, where they are stacked with others that have none."""

    def with_base(self: _Adapter, base: Any) -> _Adapter:
        """Return the adapter around another base with the same shapes."""
        return eqx.tree_at(lambda adapter: adapter.base, self, base)

    def strength_per_row(self, x: Float[Array, "*rows _"]) -> Float[Array, "..."]:
        """Return the strength, broadcastable to the rows of `x`. **Raises** `ValueError` if the strength was selected
        for other rows."""
        if self.strength.ndim == 0:
            return self.strength
        if x.ndim < 3 or len(x) != len(self.strength):
            raise ValueError(
                f"select_per_row chose the adapter {self.adapter_name!r} for {len(self.strength)} rows of a batch, and "
                f"it reads {list(x.shape)}: choose inside the loss, for the rows that it is given, and not for what "
                "the head or another adapter reads"
            )
        return self.strength.reshape(-1, *[1] * (x.ndim - 1))

    def strength_per_expert(self, like: Float[Array, "*experts"] | Bool[Array, "*experts"]) -> Float[Array, "*experts"]:
        """Return the strength of each expert, with the shape of `like`. **Raises** `NotImplementedError` if rows of the
        batch differ."""
        if self.strength.ndim != like.ndim:
            raise NotImplementedError(
                f"the adapter {self.adapter_name!r} counts for some rows of a batch only (select_per_row): it is not "
                "merged, nor put around experts, who see rows in another order"
            )
        return self.strength


class AbstractLinearAdapter(AbstractAdapter, AbstractLinear):
    """y = W x + b with a trainable update, where W and b belong to the frozen `base`.

    The adapter's arrays use the dims `in_` and `out` of the base, so that they are sharded as its weight is.
    """

    base: AbstractLinear = wrapped()
    strength: Strength = buffer()

    in_: Dim = eqx.field(static=True)
    out: Dim = eqx.field(static=True)
    adapter_name: str = eqx.field(static=True)

    def __init__(self, base: AbstractLinear, *, adapter_name: str):
        self.base = base
        self.in_, self.out = get_dims(base)
        self.strength = jnp.ones((), jnp.float32)
        self.adapter_name = adapter_name

    def merge_weight(self, weight: Matrix) -> Matrix:
        """Return the base's weight with the update merged, in float32."""
        raise NotImplementedError(f"{type(self).__name__} has no matrix to merge")

    def merge_bias(self, bias: BiasVector | None) -> BiasVector | None:
        """Return the base's bias with the update merged: unchanged for most methods."""
        return bias

    def with_dropout_keys(self, info: TokenInfo, site: int) -> "AbstractLinearAdapter":
        return eqx.tree_at(lambda adapter: adapter.base, self, self.base.with_dropout_keys(info, site))

    @property
    def out_size(self) -> int:
        return self.base.out_size

    @property
    def dense_weight(self) -> Matrix:
        return self.merge_weight(self.base.dense_weight)

    @property
    def dense_bias(self) -> BiasVector | None:
        return self.merge_bias(self.base.dense_bias)

    def per_head(self, x: Float[Array, "*rows units in"]) -> Float[Array, "*rows units unit"]:
        raise NotImplementedError(self._per_head_error)

    def per_head_transposed(self, x: Float[Array, "*rows units unit"]) -> Float[Array, "*rows units in"]:
        raise NotImplementedError(self._per_head_error)

    @property
    def _per_head_error(self) -> str:
        return (
            f"{type(self).__name__} changes a matrix as a whole, and this one is multiplied head by head, in latent "
            "attention while it decodes: merge the adapter, or target other modules"
        )


class AbstractUniformAdapter(AbstractLinearAdapter):
    """An adapter of a linear layer with arrays of one size in all layers: a layer has it, or does not."""

    applies: Bool[Array, ""]
    """False in a layer without the adapter that is stacked with others that have it."""

    def __init__(self, base: AbstractLinear, *, applies: bool | Array, adapter_name: str):
        super().__init__(base, adapter_name=adapter_name)
        self.applies = jnp.asarray(applies)

    @property
    def has_adapter(self) -> Bool[Array, "*stacked"]:
        return self.applies


def is_adapter(node: Any) -> bool:
    """Return True for an adapter of a linear layer or of an embedding."""
    return isinstance(node, AbstractAdapter)


def get_base_layer(module: Any) -> Any:
    """Return the layer beneath all adapters that wrap it."""
    while is_adapter(module):
        module = module.base
    return module


def map_base_layer(function: Callable[[Any], AbstractLinear]) -> Callable[[AbstractLinear], AbstractLinear]:
    """Apply `function` to the layer beneath all adapters."""

    def map_base(module: AbstractLinear) -> AbstractLinear:
        if not isinstance(module, AbstractLinearAdapter):
            return function(module)
        return module.with_base(map_base(module.base))

    return map_base


def get_dims(base: AbstractLinear) -> tuple[Dim, Dim]:
    """Return the dims `in_` and `out` of a linear layer. **Raises** `TypeError` for a layer that declares none."""
    in_ = getattr(base, "in_", None)
    out = getattr(base, "out", None)
    if not isinstance(in_, Dim) or not isinstance(out, Dim):
        raise TypeError(f"{type(base).__name__} does not say what it multiplies (`in_`, `out`): no adapter fits it")
    return in_, out

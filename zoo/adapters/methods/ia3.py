"""IA3: each output of a matrix, or each input of it, multiplied with a number that is learnt."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from zoo.layers import AbstractLinear
from zoo.layers.linear import expand_group_values
from zoo.parallel import Dim, adapter_parameter, buffer, wrapped

from ..base import AbstractAdapter, BiasVector, Matrix, Strength, full_strength, get_dims, get_linear_shape


class IA3(AbstractAdapter):
    """y = l ∘ (W x + b), or W (l ∘ x) + b for what leads out of a feed-forward layer; l starts as ones (Liu et al.,
    arXiv:2205.05638, section 3.3, where it stands on keys, values and the inner activations)."""

    base: AbstractLinear = wrapped()
    of_out: Float[Array, "out"] | None = adapter_parameter(full_precision=True)
    of_in: Float[Array, "in"] | None = adapter_parameter(full_precision=True)
    applies: Bool[Array, ""]
    """False in a layer that has no adapter, where it is stacked with others that have."""
    strength: Strength = buffer()

    in_: Dim = eqx.field(static=True)
    out: Dim = eqx.field(static=True)
    adapter_name: str = eqx.field(static=True)

    def __init__(self, base: AbstractLinear, *, inputs: bool, applies: bool | Array = True, adapter_name: str = "ia3"):
        """`inputs`: whether these are multiplied, and not the outputs."""
        (self.in_, self.out), (out_size, in_size) = get_dims(base), get_linear_shape(base)
        self.base, self.applies, self.strength, self.adapter_name = (
            base,
            jnp.asarray(applies),
            full_strength(),
            adapter_name,
        )
        self.of_in = jnp.ones(in_size) if inputs else None
        self.of_out = None if inputs else jnp.ones(out_size)

    def __call__(self, x: Float[Array, "*rows in"]) -> Float[Array, "*rows out"]:
        return self.scale_outputs(self.base(self.scale_inputs(x)))

    def transposed(self, x: Float[Array, "*rows out"]) -> Float[Array, "*rows in"]:
        return self.scale_inputs(self.base.transposed(self.scale_outputs(x)))

    def grouped(self, x: Float[Array, "rows in"], sizes: Int[Array, "experts"]) -> Float[Array, "rows out"]:
        counts = self.strength_per_expert(self.applies)
        gates = lambda gate: expand_group_values(jax.vmap(IA3.apply_strength)(self, gate, counts), sizes, len(x))
        x = x if self.of_in is None else (x * gates(self.of_in)).astype(x.dtype)
        y = self.base.grouped(x, sizes)
        return y if self.of_out is None else (y * gates(self.of_out)).astype(y.dtype)

    def scale_inputs(self, x: Float[Array, "*rows in"]) -> Float[Array, "*rows in"]:
        return (
            x if self.of_in is None else (x * self.apply_strength(self.of_in, self.strength_per_row(x))).astype(x.dtype)
        )

    def scale_outputs(self, y: Float[Array, "*rows out"]) -> Float[Array, "*rows out"]:
        return (
            y
            if self.of_out is None
            else (y * self.apply_strength(self.of_out, self.strength_per_row(y))).astype(y.dtype)
        )

    def apply_strength(self, gate: Float[Array, "size"], strength: Float[Array, "..."]) -> Float[Array, "*rows size"]:
        """l, as much as it counts."""
        return 1 + jnp.where(self.applies, strength, 0) * (gate - 1)

    def merge_weight(self, weight: Matrix) -> Matrix:
        if self.of_in is not None:
            return weight * self.apply_strength(self.of_in, self.strength_per_expert(self.applies))
        return (
            weight
            if self.of_out is None
            else weight * self.apply_strength(self.of_out, self.strength_per_expert(self.applies))[:, None]
        )

    def merge_bias(self, bias: BiasVector | None) -> BiasVector | None:
        return (
            bias
            if bias is None or self.of_out is None
            else bias * self.apply_strength(self.of_out, self.strength_per_expert(self.applies))
        )

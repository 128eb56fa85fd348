"""IA3: a trainable factor per output, or per input, of a frozen linear layer."""

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from zoo.layers import AbstractLinear
from zoo.models.targets import LinearSite, Targets, find_linears, get_linear_shape, match_targets
from zoo.ops.moe.grouped_matmul import expand_group_values
from zoo.parallel.fields import adapter_parameter

from ..apply import apply_adapters, refuse_embedding
from ..base import AbstractUniformAdapter, BiasVector, Matrix
from ..names import translate_targets
from ..peft_limits import resolve_targets

_Model = TypeVar("Model")


class IA3(AbstractUniformAdapter):
    """y = l ∘ (W x + b), or W (l ∘ x) + b for the down projection of a feed-forward layer; l is initialized with ones
    (Liu et al., arXiv:2205.05638, section 3.3, for keys, values and the inner activations)."""

    of_out: Float[Array, "out"] | None = adapter_parameter(full_precision=True)
    """l of the outputs."""
    of_in: Float[Array, "in"] | None = adapter_parameter(full_precision=True)
    """l of the inputs."""

    def __init__(self, base: AbstractLinear, *, inputs: bool, applies: bool | Array = True, adapter_name: str = "ia3"):
        """`inputs`: multiply the inputs instead of the outputs."""
        super().__init__(base, applies=applies, adapter_name=adapter_name)
        out_size, in_size = get_linear_shape(base)
        self.of_in = jnp.ones(in_size, jnp.float32) if inputs else None
        self.of_out = None if inputs else jnp.ones(out_size, jnp.float32)

    def __call__(self, x: Float[Array, "*rows in"]) -> Float[Array, "*tokens out"]:
        """Return l ∘ (W x + b), or W (l ∘ x) + b."""
        return self._scale_outputs(self.base(self._scale_inputs(x)))

    def transposed(self, x: Float[Array, "*rows out"]) -> Float[Array, "*rows in"]:
        return self._scale_inputs(self.base.transposed(self._scale_outputs(x)))

    def grouped(self, x: Float[Array, "rows in"], sizes: Int[Array, "experts"]) -> Float[Array, "rows out"]:
        strength = self.strength_per_expert(self.applies)
        factors = jax.vmap(IA3._apply_strength)
        expand = lambda values: expand_group_values(factors(self, values, strength), sizes, len(x))
        if self.of_in is not None:
            x = (x * expand(self.of_in)).astype(x.dtype)
        y = self.base.grouped(x, sizes)
        return y if self.of_out is None else (y * expand(self.of_out)).astype(y.dtype)

    def _scale_inputs(self, x: Float[Array, "*rows in"]) -> Float[Array, "*rows in"]:
        if self.of_in is None:
            return x
        return (x * self._apply_strength(self.of_in, self.strength_per_row(x))).astype(x.dtype)

    def _scale_outputs(self, y: Float[Array, "*rows out"]) -> Float[Array, "*rows out"]:
        if self.of_out is None:
            return y
        return (y * self._apply_strength(self.of_out, self.strength_per_row(y))).astype(y.dtype)

    def _apply_strength(
        self, factors: Float[Array, "size"], strength: Float[Array, "..."]
    ) -> Float[Array, "*rows size"]:
        """Interpolate between ones and l by the strength."""
        return 1 + jnp.where(self.applies, strength, 0) * (factors - 1)

    def merge_weight(self, weight: Matrix) -> Matrix:
        if self.of_in is not None:
            return weight * self._apply_strength(self.of_in, self.strength_per_expert(self.applies))
        if self.of_out is None:
            return weight
        return weight * self._apply_strength(self.of_out, self.strength_per_expert(self.applies))[:, None]

    def merge_bias(self, bias: BiasVector | None) -> BiasVector | None:
        if bias is None or self.of_out is None:
            return bias
        return bias * self._apply_strength(self.of_out, self.strength_per_expert(self.applies))


def ia3(
    model: _Model,
    *,
    targets: Targets = ("key", "value", "down"),
    inputs: Targets | None = ("down",),
    adapter_name: str = "ia3",
    key: Key[Array, ""] | None = None,
) -> _Model:
    """Wrap each target module with an `IA3` and freeze the rest of the model. Targets that `inputs` matches too have
    their inputs multiplied, like PEFT's feedforward modules. **Raises** `ValueError` for a target that matches
    nothing."""
    sites = find_linears(model, include_embeddings=True)
    is_target = match_targets(resolve_targets(model, targets, sites, "IA3"), sites)
    if inputs is None:
        multiplies_inputs = lambda _: False
    else:
        multiplies_inputs = match_targets(translate_targets(model, inputs, sites), sites)

    def plan(site: LinearSite) -> Any:
        applies = site.tabulate(is_target, bool)
        if not applies.any():
            return None
        refuse_embedding(site, "ia3")
        sides = {multiplies_inputs(name) for name in site.list_names().values() if is_target(name)}
        if len(sides) > 1:
            raise ValueError(f"ia3: {site.name} is one array over its layers: multiply the inputs of all, or of none")
        of_inputs = sides.pop()
        factory = lambda base, *, key, applies: IA3(base, inputs=of_inputs, applies=applies, adapter_name=adapter_name)
        return factory, {"applies": applies}

    return apply_adapters(model, plan, jax.random.key(0) if key is None else key)

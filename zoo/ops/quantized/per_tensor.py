"""FP8 recipes with one scale per tensor, from its maximum now or from those of the steps before."""

import dataclasses
from typing import Any, ClassVar

from jaxtyping import Array, Float, UInt32

from .fp8 import E4M3, E5M2, ScaledTensor, quantize_per_tensor
from .recipe import AbstractRecipe


@dataclasses.dataclass(frozen=True)
class CurrentScaling(AbstractRecipe):
    """FP8 with one scale per tensor, from its own maximum: Transformer Engine's `Float8CurrentScaling`.

        q = cast(x * fp8_max / max |x|)

    Weights and inputs in E4M3, gradients in E5M2 (Micikevicius et al., arXiv:2209.05433, section 3). The maximum is
    that of the global tensor: an all-reduce of one number per operand, where a mesh shards it.

    This is the default recipe. It has no state, so the step and its checkpoints are those of a model in higher
    precision; no value saturates, whatever came before; experts and pipelines have it; and all three products run as
    FP8 on Hopper. The price is a pass over each tensor before it is cast.
    """

    gradient_dtype: Any = E5M2
    """Format of gradients: E5M2, or E4M3 for one more significant bit in a smaller range."""

    supports_experts: ClassVar[bool] = True

    def quantize_input(self, x: Float[Array, "*rows in"], amax: Float[Array, "..."] | None, axis: int) -> ScaledTensor:
        return quantize_per_tensor(x, _given(amax), E4M3)

    def quantize_weight(
        self, weight: Float[Array, "*experts rows columns"], amax: Float[Array, "..."] | None, axis: int
    ) -> ScaledTensor:
        return quantize_per_tensor(weight, _given(amax), E4M3)

    def quantize_gradient(
        self,
        gradient: Float[Array, "*rows out"],
        amax: Float[Array, "..."] | None,
        axis: int,
        bits: UInt32[Array, "*padded out"] | None,
    ) -> ScaledTensor:
        return quantize_per_tensor(gradient, _given(amax), self.gradient_dtype)


def _given(amax: Float[Array, "..."] | None) -> Float[Array, "..."]:
    assert amax is not None  # scales of whole tensors follow from it
    return amax

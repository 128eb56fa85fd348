"""FP8 recipes with one scale per tensor, from its current maximum or the maxima of earlier steps."""

import dataclasses
from typing import Any, ClassVar

from jaxtyping import Array, Float, UInt32

from .fp8 import E4M3, E5M2, ScaledTensor, quantize_per_tensor
from .recipe import AbstractRecipe


@dataclasses.dataclass(frozen=True)
class AbstractPerTensorScaling(AbstractRecipe):
    """FP8 with one scale per tensor: q = cast(x * fp8_max / amax).

    Weights and inputs are in E4M3, gradients in E5M2 (Micikevicius et al., arXiv:2209.05433, section 3).
    """

    gradient_dtype: Any = E5M2
    """Format of gradients: E5M2, or E4M3 for one more significant bit in a smaller range."""

    def quantize_input(self, x: Float[Array, "*rows in"], amax: Float[Array, "..."] | None, axis: int) -> ScaledTensor:
        return _quantize(x, amax, E4M3)

    def quantize_weight(
        self, weight: Float[Array, "*experts rows columns"], amax: Float[Array, "..."] | None, axis: int
    ) -> ScaledTensor:
        return _quantize(weight, amax, E4M3)

    def quantize_gradient(
        self,
        gradient: Float[Array, "*rows out"],
        amax: Float[Array, "..."] | None,
        axis: int,
        bits: UInt32[Array, "*padded out"] | None,
    ) -> ScaledTensor:
        return _quantize(gradient, amax, self.gradient_dtype)


@dataclasses.dataclass(frozen=True)
class CurrentScaling(AbstractPerTensorScaling):
    """FP8 with one scale per tensor, from its own maximum: Transformer Engine's `Float8CurrentScaling`.

    The maximum is over the global tensor: an all-reduce of one number per operand, where a mesh shards it.

    This is the default recipe. It has no state, so the step and its checkpoints are the same as for a model in higher
    precision. No value saturates, whatever came before. Experts and pipelines support it, and all three products run as
    FP8 on Hopper. The price is a pass over each tensor before it is cast.
    """

    supports_experts: ClassVar[bool] = True


@dataclasses.dataclass(frozen=True)
class DelayedScaling(AbstractPerTensorScaling):
    """FP8 with one scale per tensor, from the largest maximum of earlier steps: Transformer Engine's `DelayedScaling`
    (arXiv:2209.05433, section 4).

    No maximum is computed before a tensor is cast. `zoo.value_and_grad(..., observe=True)` returns the maxima that a
    step observes, and `zoo.precision.update_amax` adds them to the histories of the model:

        loss, gradients, seen = zoo.value_and_grad(loss_fn, mesh, observe=True)(model, batch)
        model = zoo.precision.update_amax(model, seen)

    Histories begin with zeros, which scale by 1. Values above the maxima of the history saturate.
    """

    history: int = 1024
    """Number of steps whose largest maximum sets the scale. With 1, the scale depends only on the most recent step,
    Transformer Engine's `amax_compute_algo="most_recent"`."""
    margin: int = 0
    """Powers of two to leave above the maximum."""

    def __post_init__(self):
        if self.history < 1:
            raise ValueError(f"a history has 1 step or more, not {self.history}")

    @property
    def history_length(self) -> int:
        return self.history

    def read_history(self, history: Float[Array, "history"]) -> Float[Array, ""]:
        return history.max() * 2.0**self.margin


def _quantize(x: Float[Array, "*dims"], amax: Float[Array, "..."] | None, dtype: Any) -> ScaledTensor:
    assert amax is not None  # scales of whole tensors follow from it
    return quantize_per_tensor(x, amax, dtype)

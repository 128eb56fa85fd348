"""Base class of low-precision recipes: how the operands of a linear layer's three products are quantized."""

import abc
import dataclasses
from collections.abc import Sequence
from typing import ClassVar

from jaxtyping import Array, Float, UInt32

from .fp8 import ScaledTensor, find_amax


@dataclasses.dataclass(frozen=True)
class AbstractRecipe(abc.ABC):
    """Quantization of inputs x, weights W and gradients g in y = W x, dx = Wᵀ g and dW = g xᵀ.

    `axis` is the contracted axis of an operand: -1 for features, -2 for the tokens that dW sums over, in rows "batch
    tokens features".
    """

    supports_experts: ClassVar[bool] = False
    """True if each expert of a mixture can have scales of its own."""

    @property
    def block_size(self) -> int:
        """Values per block along a contracted dim; 1 for scales of whole tensors."""
        return 1

    @property
    def history_length(self) -> int:
        """Number of steps whose maxima are kept; 0 without delayed scaling."""
        return 0

    @property
    def rounds_stochastically(self) -> bool:
        """True if gradients are rounded with random bits."""
        return False

    def measure(self, x: Float[Array, "*dims"], axes: Sequence[str]) -> Float[Array, ""] | None:
        """Return the maximum that sets the scale of the whole tensor, over devices along mesh `axes`; None if there is
        no such scale."""
        return find_amax(x, axes)

    def read_history(self, history: Float[Array, "history"]) -> Float[Array, ""]:
        """Return the maximum that sets the scale, with delayed scaling."""
        raise NotImplementedError(f"{type(self).__name__} has no history")

    @abc.abstractmethod
    def quantize_input(self, x: Float[Array, "*rows in"], amax: Float[Array, ""] | None, axis: int) -> ScaledTensor: ...

    @abc.abstractmethod
    def quantize_weight(
        self, weight: Float[Array, "*experts rows columns"], amax: Float[Array, ""] | None, axis: int
    ) -> ScaledTensor: ...

    @abc.abstractmethod
    def quantize_gradient(
        self,
        gradient: Float[Array, "*rows out"],
        amax: Float[Array, ""] | None,
        axis: int,
        bits: UInt32[Array, "*padded out"] | None,
    ) -> ScaledTensor: ...

"""RoPE in time, row and column, for texts with images (M-RoPE; Qwen2-VL, Wang et al., arXiv:2409.12191, section 2.1).

Each pair of features turns by the position on one of the axes, with the frequency that it has in plain RoPE:

    angle_i = position[axis_i] * frequency_i

A token of text has one position on all axes, and turns as in plain RoPE.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from .rotary import Rotary


@dataclasses.dataclass(frozen=True)
class SectionedRotary(Rotary):
    """RoPE whose pairs are shared out among axes: `sections` has the number of pairs of each. Called with positions, as
    of texts, it is plain RoPE.

    Sections are runs of pairs, or with `alternating` the axes take turns, and the pairs after the last turn of an axis
    go to the first axis (Qwen3-VL, arXiv:2511.21631, section 2).

    **Raises** `ValueError` for sections that do not share out the pairs.
    """

    sections: tuple[int, ...] = ()
    alternating: bool = False

    def __post_init__(self):
        super().__post_init__()
        if sum(self.sections) != self.dim // 2:
            raise ValueError(
                f"SectionedRotary: sections {list(self.sections)} have {sum(self.sections)} pairs, and {self.dim // 2} "
                "are rotated."
            )

    @property
    def axes(self) -> Int[np.ndarray, "pairs"]:
        """The axis of each pair."""
        if not self.alternating:
            return np.repeat(np.arange(len(self.sections)), self.sections)
        axes = np.zeros(self.dim // 2, int)
        for axis, size in enumerate(self.sections[1:], 1):
            axes[axis : size * len(self.sections) : len(self.sections)] = axis
        return axes

    def turn_on_axes(
        self, coordinates: Float[Array, "*batch seq axes"]
    ) -> tuple[Float[Array, "*batch seq pairs"], Float[Array, "*batch seq pairs"]]:
        """Compute cos and sin of the angles of each token at its positions on all axes, whole numbers, in float32."""
        positions = coordinates.astype(jnp.int32)
        cos, sin = self(positions[..., 0])
        for axis in range(1, len(self.sections)):
            other_cos, other_sin = self(positions[..., axis])
            cos = jnp.where(self.axes == axis, other_cos, cos)
            sin = jnp.where(self.axes == axis, other_sin, sin)
        return cos, sin

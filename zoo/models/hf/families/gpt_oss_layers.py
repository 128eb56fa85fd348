"""Layers of GPT-OSS: an MLP with a clamped SwiGLU."""

import math
from collections.abc import Callable

import equinox as eqx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int, Key

from zoo.layers import AbstractFeedForward, AbstractLinear, Linear
from zoo.layers.mlp import make_gated_projections
from zoo.ops.activations import clamped_swiglu
from zoo.shapes import HiddenStates, ResidualStream


class ClampedGatedMLP(AbstractFeedForward):
    """y = W_down ((clip(W_up x, -limit, limit) + offset) * g sigmoid(alpha g)) with g = min(W_gate x, limit): the
    clamped SwiGLU of GPT-OSS (arXiv:2508.10925, section 2.2), see `zoo.ops.activations.clamped_swiglu`."""

    gate: AbstractLinear
    up: AbstractLinear
    down: AbstractLinear

    alpha: float = eqx.field(static=True)
    limit: float = eqx.field(static=True)
    offset: float = eqx.field(static=True)

    def __init__(
        self,
        embed: int,
        mlp: int,
        *,
        alpha: float | int = 1.702,
        limit: float | int = 7.0,
        offset: float | int = 1.0,
        linear: Callable[..., AbstractLinear] = Linear,
        bias: bool = True,
        out_scale: float = 1.0,
        key: Key[Array, ""],
    ):
        """- `linear`: class of the three projections, `Linear` or `MXFP4Linear`.

        **Raises** `ValueError` for a limit that is not above 0.
        """
        if not 0 < limit < math.inf:
            raise ValueError(f"values are clipped to a limit above 0, not to {limit}")
        self.gate, self.up, self.down = make_gated_projections(embed, mlp, linear, bias, out_scale, key)
        self.alpha = float(alpha)
        self.limit = float(limit)
        self.offset = float(offset)

    def __call__(self, x: HiddenStates) -> tuple[ResidualStream, tuple[()]]:
        hidden = self._activate(self.gate(x), self.up(x))
        return self.down(checkpoint_name(hidden, "mlp_hidden")), ()

    def grouped(self, x: Float[Array, "rows embed"], sizes: Int[Array, "experts"]) -> Float[Array, "rows embed"]:
        gate = self.gate.grouped(x, sizes)
        up = self.up.grouped(x, sizes)
        return self.down.grouped(self._activate(gate, up), sizes)

    def _activate(self, gate: Float[Array, "..."], up: Float[Array, "..."]) -> Float[Array, "..."]:
        return clamped_swiglu(gate, up, alpha=self.alpha, limit=self.limit, offset=self.offset)

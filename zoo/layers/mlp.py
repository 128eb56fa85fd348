"""Position-wise feed-forward layers."""

from collections.abc import Callable

import equinox as eqx
import jax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int, Key

from zoo.parallel import Dim
from zoo.shapes import HiddenStates, ResidualStream

from .abstract import AbstractFeedForward, AbstractLinear
from .linear import Linear

_EMBED = Dim("embed")
_MLP_DIM = Dim("mlp")


class MLP(AbstractFeedForward):
    """y = W_down activation(W_up x) (Vaswani et al., arXiv:1706.03762, section 3.3)."""

    up: AbstractLinear
    down: AbstractLinear

    activation: Callable = eqx.field(static=True)

    def __init__(
        self,
        embed: int,
        mlp: int,
        *,
        activation: Callable = jax.nn.gelu,
        bias: bool = True,
        out_scale: float = 1.0,
        key: Key[Array, ""],
    ):
        up_key, down_key = jax.random.split(key)
        self.up = Linear(embed, mlp, in_=_EMBED, out=_MLP_DIM, bias=bias, key=up_key)
        self.down = Linear(mlp, embed, in_=_MLP_DIM, out=_EMBED, bias=bias, scale=out_scale, key=down_key)
        self.activation = activation

    def __call__(self, x: HiddenStates) -> tuple[ResidualStream, tuple[()]]:
        return self.down(checkpoint_name(self.activation(self.up(x)), "mlp_hidden")), ()

    def grouped(self, x: Float[Array, "rows embed"], sizes: Int[Array, "experts"]) -> Float[Array, "rows embed"]:
        return self.down.grouped(self.activation(self.up.grouped(x, sizes)), sizes)


class GatedMLP(AbstractFeedForward):
    """y = W_down (activation(W_gate x) * W_up x) (Shazeer, arXiv:2002.05202, section 2; SwiGLU with silu)."""

    gate: AbstractLinear
    up: AbstractLinear
    down: AbstractLinear

    activation: Callable = eqx.field(static=True)

    def __init__(
        self,
        embed: int,
        mlp: int,
        *,
        activation: Callable = jax.nn.silu,
        bias: bool = False,
        out_scale: float = 1.0,
        key: Key[Array, ""],
    ):
        self.gate, self.up, self.down = make_gated_projections(embed, mlp, Linear, bias, out_scale, key)
        self.activation = activation

    def __call__(self, x: HiddenStates) -> tuple[ResidualStream, tuple[()]]:
        return self.down(checkpoint_name(self.activation(self.gate(x)) * self.up(x), "mlp_hidden")), ()

    def grouped(self, x: Float[Array, "rows embed"], sizes: Int[Array, "experts"]) -> Float[Array, "rows embed"]:
        return self.down.grouped(self.activation(self.gate.grouped(x, sizes)) * self.up.grouped(x, sizes), sizes)


def make_gated_projections(
    embed: int, mlp: int, linear: Callable[..., AbstractLinear], bias: bool, out_scale: float, key: Key[Array, ""]
) -> tuple[AbstractLinear, AbstractLinear, AbstractLinear]:
    """Initialize the gate, up and down projections of a gated MLP."""
    gate_key, up_key, down_key = jax.random.split(key, 3)
    return (
        linear(embed, mlp, in_=_EMBED, out=_MLP_DIM, bias=bias, key=gate_key),
        linear(embed, mlp, in_=_EMBED, out=_MLP_DIM, bias=bias, key=up_key),
        linear(mlp, embed, in_=_MLP_DIM, out=_EMBED, bias=bias, scale=out_scale, key=down_key),
    )

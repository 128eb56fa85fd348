"""Position-wise feed-forward layers."""

from collections.abc import Callable

import equinox as eqx
import jax
from jaxtyping import Array, Float, Key

from zoo.parallel import Dim

from .abstract import AbstractFeedForward, AbstractLinear
from .linear import Linear

EMBED, MLP_DIM = Dim("embed"), Dim("mlp")


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
        self.up = Linear(embed, mlp, in_=EMBED, out=MLP_DIM, bias=bias, key=up_key)
        self.down = Linear(mlp, embed, in_=MLP_DIM, out=EMBED, bias=bias, scale=out_scale, key=down_key)
        self.activation = activation

    def __call__(self, x: Float[Array, "batch seq embed"]) -> Float[Array, "batch seq embed"]:
        return self.down(self.activation(self.up(x)))


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
        gate_key, up_key, down_key = jax.random.split(key, 3)
        self.gate = Linear(embed, mlp, in_=EMBED, out=MLP_DIM, bias=bias, key=gate_key)
        self.up = Linear(embed, mlp, in_=EMBED, out=MLP_DIM, bias=bias, key=up_key)
        self.down = Linear(mlp, embed, in_=MLP_DIM, out=EMBED, bias=bias, scale=out_scale, key=down_key)
        self.activation = activation

    def __call__(self, x: Float[Array, "batch seq embed"]) -> Float[Array, "batch seq embed"]:
        return self.down(self.activation(self.gate(x)) * self.up(x))

"""An MLP with the trainable activation xIELU."""

import math

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Key

from zoo.layers import AbstractFeedForward, AbstractLinear, Linear
from zoo.parallel import Dim, Module, buffer, full_precision
from zoo.shapes import HiddenStates, ResidualStream


class Xielu(Module):
    """xIELU, the trainable integral of ELU (Huang & Schlag, arXiv:2411.13010, section 3):

        y = a x² + beta x                                  where x > 0, a = softplus(alpha_p)
        y = b (exp(min(x, eps)) - 1 - x) + beta x          elsewhere, b = beta + softplus(alpha_n)

    Its slope goes through `beta` at 0 and grows with x above, so that y is not bounded below. `beta` and `eps`, a small
    negative number, are not trained. It computes in float32.
    """

    alpha_p: Float[Array, "1"] = full_precision()
    alpha_n: Float[Array, "1"] = full_precision()
    beta: Float[Array, ""] = buffer()
    eps: Float[Array, ""] = buffer()

    def __init__(self, *, positive: float = 0.8, negative: float = 0.8, beta: float = 0.5, eps: float = -1e-6):
        """Initialize a to `positive` and b to `negative`. **Raises** `ValueError` unless a > 0, b > beta, eps < 0."""
        if positive <= 0 or negative <= beta or eps >= 0:
            raise ValueError(
                f"xIELU has positive > 0, negative > beta and eps < 0, not {positive}, {negative}, {beta} and {eps}"
            )
        inverse_softplus = lambda x: jnp.array([math.log(math.expm1(x))], jnp.float32)
        self.alpha_p = inverse_softplus(positive)
        self.alpha_n = inverse_softplus(negative - beta)
        self.beta = jnp.float32(beta)
        self.eps = jnp.float32(eps)

    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        x_fp32 = x.astype(jnp.float32)
        alpha_p, alpha_n, beta, eps = (p.astype(jnp.float32) for p in (self.alpha_p, self.alpha_n, self.beta, self.eps))
        above = jax.nn.softplus(alpha_p) * x_fp32 * x_fp32
        below = (beta + jax.nn.softplus(alpha_n)) * (jnp.expm1(jnp.minimum(x_fp32, eps)) - x_fp32)
        return (jnp.where(x_fp32 > 0, above, below) + beta * x_fp32).astype(x.dtype)


class XieluMLP(AbstractFeedForward):
    """y = W_down xIELU(W_up x) (Apertus, arXiv:2509.14233, section 2.1). See `Xielu`."""

    up: AbstractLinear
    xielu: Xielu
    down: AbstractLinear

    def __init__(self, embed: int, mlp: int, *, bias: bool = False, out_scale: float = 1.0, key: Key[Array, ""]):
        up_key, down_key = jax.random.split(key)
        embed_dim = Dim("embed")
        mlp_dim = Dim("mlp")
        self.up = Linear(embed, mlp, in_=embed_dim, out=mlp_dim, bias=bias, key=up_key)
        self.down = Linear(mlp, embed, in_=mlp_dim, out=embed_dim, bias=bias, scale=out_scale, key=down_key)
        self.xielu = Xielu()

    def __call__(self, x: HiddenStates) -> tuple[ResidualStream, tuple[()]]:
        return self.down(checkpoint_name(self.xielu(self.up(x)), "mlp_hidden")), ()

"""Norms with a gate, over groups of channels."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from zoo.ops.normalisation import last_mean, rms_norm
from zoo.parallel import Dim, Module, full_precision, offset, reduce, shares


class GatedGroupNorm(Module):
    """weight * rms(y * silu(gate)), or weight * rms(y) * silu(gate) where the norm comes before the gate: Mamba-2's
    (Dao & Gu, arXiv:2405.21060, section 7.1). rms divides each of a few groups of channels by its own root mean square;
    all of it is float32.

    The channels are split with the heads. Where a group's lie on several devices, its mean is that of all of them.
    """

    weight: Float[Array, "features"] = full_precision()

    features: Dim = eqx.field(static=True)
    width: int = eqx.field(static=True)
    """Channels of a group."""
    before_gate: bool = eqx.field(static=True)
    epsilon: float = eqx.field(static=True)

    def __init__(
        self, heads: int, head_dim: int, groups: int = 1, *, before_gate: bool = False, epsilon: float | int = 1e-5
    ):
        """**Raises** `ValueError` where heads do not share out over groups."""
        if groups < 1 or heads % groups:
            raise ValueError(f"{heads} heads do not share out over {groups} groups")
        self.weight = jnp.ones(heads * head_dim)
        self.features, self.width = Dim("heads", head_dim), heads // groups * head_dim
        self.before_gate, self.epsilon = before_gate, float(epsilon)

    def __call__(
        self, y: Float[Array, "batch seq features"], gate: Float[Array, "batch seq features"]
    ) -> Float[Array, "batch seq features"]:
        wide, opened = y.astype(jnp.float32), jax.nn.silu(gate.astype(jnp.float32))
        if not self.before_gate:
            wide = wide * opened
        groups = wide.reshape(*wide.shape[:-1], -1, min(self.width, wide.shape[-1]))
        normed = rms_norm(groups, epsilon=self.epsilon, mean=self.mean).reshape(wide.shape) * self.weight
        return (normed * opened if self.before_gate else normed).astype(y.dtype)

    def mean(self, x: Float[Array, "batch seq groups channels"]) -> Float[Array, "batch seq groups 1"]:
        """Of each group, all of whose channels, or a share of them, are here."""
        here = x.shape[-1]
        if here == self.width:
            return last_mean(x)
        # Devices that share a group are some of an axis and a sum is over all of it, so each group has its own place.
        dim = self.features.name
        groups, group = here * shares(x, dim) // self.width, offset(x, dim, here) // self.width
        sums = reduce(jnp.where(jnp.arange(groups) == group, x.sum(-1), 0), over=dim)
        return lax.dynamic_slice_in_dim(sums, group, 1, axis=-1)[..., None] / self.width

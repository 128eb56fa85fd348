"""Norms with a gate, over groups of channels."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from zoo.ops.normalization import mean_last_dim, rms_norm
from zoo.parallel import Dim, Module, full_precision, num_shards, reduce, shard_offset


class GatedGroupNorm(Module):
    """weight * rms(y * silu(gate)), or weight * rms(y) * silu(gate) where the norm comes before the gate: Mamba-2's
    (Dao & Gu, arXiv:2405.21060, section 7.1). rms divides each of a few groups of channels by its own root mean square;
    all of it is float32.

    The channels are split with the heads. Where a group's lie on several devices, its mean is that of all of them.
    """

    weight: Float[Array, "features"] = full_precision()

    features: Dim = eqx.field(static=True)
    group_size: int = eqx.field(static=True)
    """Channels of a group."""
    norm_before_gate: bool = eqx.field(static=True)
    epsilon: float = eqx.field(static=True)

    def __init__(
        self, heads: int, head_dim: int, groups: int = 1, *, norm_before_gate: bool = False, epsilon: float | int = 1e-5
    ):
        """**Raises** `ValueError` where heads do not share out over groups."""
        if groups < 1 or heads % groups:
            raise ValueError(f"{heads} heads do not share out over {groups} groups")
        self.weight = jnp.ones(heads * head_dim)
        self.features, self.group_size = Dim("heads", head_dim), heads // groups * head_dim
        self.norm_before_gate, self.epsilon = norm_before_gate, float(epsilon)

    def __call__(
        self, y: Float[Array, "batch seq features"], gate: Float[Array, "batch seq features"]
    ) -> Float[Array, "batch seq features"]:
        wide, opened = y.astype(jnp.float32), jax.nn.silu(gate.astype(jnp.float32))
        if not self.norm_before_gate:
            wide = wide * opened
        groups = wide.reshape(*wide.shape[:-1], -1, min(self.group_size, wide.shape[-1]))
        normed = rms_norm(groups, epsilon=self.epsilon, mean=self.group_mean).reshape(wide.shape) * self.weight
        return (normed * opened if self.norm_before_gate else normed).astype(y.dtype)

    def group_mean(self, x: Float[Array, "batch seq groups channels"]) -> Float[Array, "batch seq groups 1"]:
        """Of each group, all of whose channels, or a share of them, are here."""
        here = x.shape[-1]
        if here == self.group_size:
            return mean_last_dim(x)
        # Devices that share a group are some of an axis and a sum is over all of it, so each group has its own place.
        dim = self.features.name
        groups, group = here * num_shards(x, dim) // self.group_size, shard_offset(x, dim, here) // self.group_size
        sums = reduce(jnp.where(jnp.arange(groups) == group, x.sum(-1), 0), over=dim)
        return lax.dynamic_slice_in_dim(sums, group, 1, axis=-1)[..., None] / self.group_size

"""Gated group norm of Mamba-2."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from zoo.ops.normalization import mean_last_dim, rms_norm
from zoo.parallel import Dim, Module, full_precision, num_shards, reduce
from zoo.parallel.collectives import shard_offset


class GatedGroupNorm(Module):
    """weight * rms(y * silu(gate)), or weight * rms(y) * silu(gate) with `norm_before_gate` (Mamba-2: Dao & Gu,
    arXiv:2405.21060, section 7.1). rms is an RMSNorm over each group of channels, in float32.

    Channels are sharded with the heads. The mean of a group that spans several devices is all-reduced.
    """

    weight: Float[Array, "features"] = full_precision()

    features: Dim = eqx.field(static=True)
    group_size: int = eqx.field(static=True)
    """Channels per group."""
    norm_before_gate: bool = eqx.field(static=True)
    epsilon: float = eqx.field(static=True)

    def __init__(
        self, heads: int, head_dim: int, groups: int = 1, *, norm_before_gate: bool = False, epsilon: float | int = 1e-5
    ):
        """**Raises** `ValueError` if groups does not divide heads."""
        if groups < 1 or heads % groups:
            raise ValueError(f"{heads} heads do not divide evenly over {groups} groups")
        self.weight = jnp.ones(heads * head_dim, jnp.float32)
        self.features = Dim("heads", head_dim)
        self.group_size = heads // groups * head_dim
        self.norm_before_gate = norm_before_gate
        self.epsilon = float(epsilon)

    def __call__(
        self, y: Float[Array, "batch seq features"], gate: Float[Array, "batch seq features"]
    ) -> Float[Array, "batch seq features"]:
        y32 = y.astype(jnp.float32)
        gate32 = jax.nn.silu(gate.astype(jnp.float32))
        if not self.norm_before_gate:
            y32 = y32 * gate32
        groups = y32.reshape(*y32.shape[:-1], -1, min(self.group_size, y32.shape[-1]))
        normed = rms_norm(groups, epsilon=self.epsilon, mean=self._group_mean).reshape(y32.shape) * self.weight
        if self.norm_before_gate:
            normed = normed * gate32
        return normed.astype(y.dtype)

    def _group_mean(self, x: Float[Array, "batch seq groups channels"]) -> Float[Array, "batch seq groups 1"]:
        """Mean over each group, all-reduced if its channels span several devices."""
        channels = x.shape[-1]
        if channels == self.group_size:
            return mean_last_dim(x)
        # A group spans some devices of the axis and the all-reduce all of them, so that each group has its own entry.
        dim = self.features.name
        groups = channels * num_shards(x, dim) // self.group_size
        group = shard_offset(x, dim, channels) // self.group_size
        sums = reduce(jnp.where(jnp.arange(groups) == group, x.sum(-1), 0), over=dim)
        return lax.dynamic_slice_in_dim(sums, group, 1, axis=-1)[..., None] / self.group_size

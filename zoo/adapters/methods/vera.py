"""VeRA: random narrow matrices that stay as they are, and beside them vectors that are learnt."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from zoo.layers import AbstractLinear, Linear
from zoo.layers.linear import expand_group_values
from zoo.parallel import Dim, adapter_parameter, buffer, wrapped

from ..base import AbstractAdapter, Matrix, Strength, full_strength, get_dims, get_linear_shape
from .low_rank import linear_from_weight


class VeRA(AbstractAdapter):
    """y = W x + b + up_scale ∘ (B (down_scale ∘ (A x))): A and B are random and never learnt, the same numbers in every
    layer, and what is learnt are the two vectors (Kopiczko et al., arXiv:2310.11454, section 3.1).

    Every layer has its copy of A and B here, so that it scans and lies on a mesh like any other; files hold them once.
    A matrix takes the first `out` rows and `in` columns of the largest.
    """

    base: AbstractLinear = wrapped()
    down: Linear = buffer()
    up: Linear = buffer()
    down_scale: Float[Array, "rank"] = adapter_parameter(full_precision=True)
    up_scale: Float[Array, "out"] = adapter_parameter(full_precision=True)
    applies: Bool[Array, ""]
    """False in a layer that has no adapter, where it is stacked with others that have."""
    strength: Strength = buffer()

    in_: Dim = eqx.field(static=True)
    out: Dim = eqx.field(static=True)
    adapter_name: str = eqx.field(static=True)

    def __init__(
        self,
        base: AbstractLinear,
        *,
        shared: tuple[Float[Array, "rank _"], Float[Array, "_ rank"]],
        applies: bool | Array = True,
        d_initial: float | int = 0.1,
        adapter_name: str = "vera",
    ):
        """`shared` are A and B of the largest matrix. `down_scale` starts as `first`, `up_scale` as zeros; where the
        adapter does not apply it changes nothing."""
        (self.in_, self.out), (out_size, in_size) = get_dims(base), get_linear_shape(base)
        down, up = shared
        self.base = base
        self.down = linear_from_weight(down[:, :in_size], in_=self.in_, out=Dim("rank"))
        self.up = linear_from_weight(up[:out_size], in_=Dim("rank"), out=self.out)
        self.down_scale, self.up_scale = d_initial * jnp.ones(len(down)), jnp.zeros(out_size)
        self.applies, self.strength, self.adapter_name = jnp.asarray(applies), full_strength(), adapter_name

    def get_output_scale(self, strength: Float[Array, "..."]) -> Float[Array, "*rows out"]:
        """`up_scale`, as much as it counts."""
        return jnp.where(self.applies, strength, 0) * self.up_scale

    def __call__(self, x: Float[Array, "*rows in"]) -> Float[Array, "*rows out"]:
        inner = self.down(x.astype(self.down.weight.dtype)) * self.down_scale
        change = self.up(inner.astype(self.up.weight.dtype)) * self.get_output_scale(self.strength_per_row(x))
        return self.base(x) + change.astype(x.dtype)

    def transposed(self, x: Float[Array, "*rows out"]) -> Float[Array, "*rows in"]:
        inner = (
            self.up.transposed((x * self.get_output_scale(self.strength_per_row(x))).astype(self.up.weight.dtype))
            * self.down_scale
        )
        return self.base.transposed(x) + self.down.transposed(inner.astype(self.down.weight.dtype)).astype(x.dtype)

    def grouped(self, x: Float[Array, "rows in"], sizes: Int[Array, "experts"]) -> Float[Array, "rows out"]:
        per_row = lambda numbers: expand_group_values(numbers, sizes, len(x))
        inner = self.down.grouped(x.astype(self.down.weight.dtype), sizes) * per_row(self.down_scale)
        change = self.up.grouped(inner.astype(self.up.weight.dtype), sizes)
        change = change * per_row(jax.vmap(VeRA.get_output_scale)(self, self.strength_per_expert(self.applies)))
        return self.base.grouped(x, sizes) + change.astype(x.dtype)

    def merge_weight(self, weight: Matrix) -> Matrix:
        up = (
            self.get_output_scale(self.strength_per_expert(self.applies))[:, None]
            * self.up.dense_weight
            * self.down_scale
        )
        return weight + jnp.matmul(up, self.down.dense_weight, precision="highest")


def init_shared_projections(
    rank: int, out_size: int, in_size: int, key: Key[Array, ""]
) -> tuple[Float[Array, "rank _"], Float[Array, "_ rank"]]:
    """A and B, uniform within sqrt(6 / inputs): He et al., arXiv:1502.01852, as PEFT draws them."""
    down_key, up_key = jax.random.split(key)
    uniform = lambda key, shape: jax.random.uniform(key, shape, minval=-1.0, maxval=1.0) * (6 / shape[1]) ** 0.5
    return uniform(down_key, (rank, in_size)), uniform(up_key, (out_size, rank))

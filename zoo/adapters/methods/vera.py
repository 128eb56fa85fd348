"""VeRA: frozen random low-rank factors, the same in all layers, and trainable scaling vectors."""

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from zoo._checks import wrap_key
from zoo.layers import AbstractLinear, Linear
from zoo.models.targets import Targets, find_linears, get_linear_shape, match_targets
from zoo.ops.moe.grouped_matmul import expand_group_values
from zoo.parallel import Dim, buffer
from zoo.parallel.fields import adapter_parameter
from zoo.parallel.tokens import match_tokens

from ..apply import apply_uniform, check_rank
from ..base import AbstractUniformAdapter, Matrix
from ..peft_limits import resolve_targets
from .low_rank import linear_from_weight

_Model = TypeVar("Model")


class VeRA(AbstractUniformAdapter):
    """y = W x + b + up_scale ∘ (B (down_scale ∘ (A x))), where A and B are random, frozen and the same in every layer,
    and the two vectors are trainable (Kopiczko et al., arXiv:2310.11454, section 3.1).

    Every layer has a copy of A and B, so that it scans and is sharded like any other; files store them once. A linear
    layer uses the first `out` rows and `in` columns of the largest.
    """

    down: Linear = buffer()
    """A."""
    up: Linear = buffer()
    """B."""
    down_scale: Float[Array, "rank"] = adapter_parameter(full_precision=True)
    up_scale: Float[Array, "out"] = adapter_parameter(full_precision=True)

    def __init__(
        self,
        base: AbstractLinear,
        *,
        shared: tuple[Float[Array, "rank _"], Float[Array, "_ rank"]],
        applies: bool | Array = True,
        d_initial: float | int = 0.1,
        adapter_name: str = "vera",
    ):
        """`shared` are A and B of the largest linear layer. `down_scale` is initialized with `d_initial`, `up_scale`
        with zeros. If `applies` is False the adapter has no effect."""
        super().__init__(base, applies=applies, adapter_name=adapter_name)
        out_size, in_size = get_linear_shape(base)
        down, up = shared
        self.down = linear_from_weight(down[:, :in_size], in_=self.in_, out=Dim("rank"))
        self.up = linear_from_weight(up[:out_size], in_=Dim("rank"), out=self.out)
        self.down_scale = d_initial * jnp.ones(len(down), jnp.float32)
        self.up_scale = jnp.zeros(out_size, jnp.float32)

    def _get_output_scale(self, strength: Float[Array, "..."]) -> Float[Array, "*rows out"]:
        """Return strength `up_scale`, or zeros if the adapter does not apply."""
        return jnp.where(self.applies, strength, 0) * self.up_scale

    def __call__(self, x: Float[Array, "*rows in"]) -> Float[Array, "*tokens out"]:
        """Return W x + b + up_scale ∘ (B (down_scale ∘ (A x)))."""
        y = self.base(x)
        inner = match_tokens(self.down(x.astype(self.down.weight.dtype)) * self.down_scale, y)
        update = self.up(inner.astype(self.up.weight.dtype)) * self._get_output_scale(self.strength_per_row(x))
        return y + update.astype(x.dtype)

    def transposed(self, x: Float[Array, "*rows out"]) -> Float[Array, "*rows in"]:
        scaled = (x * self._get_output_scale(self.strength_per_row(x))).astype(self.up.weight.dtype)
        inner = self.up.transposed(scaled) * self.down_scale
        return self.base.transposed(x) + self.down.transposed(inner.astype(self.down.weight.dtype)).astype(x.dtype)

    def grouped(self, x: Float[Array, "rows in"], sizes: Int[Array, "experts"]) -> Float[Array, "rows out"]:
        expand = lambda values: expand_group_values(values, sizes, len(x))
        inner = self.down.grouped(x.astype(self.down.weight.dtype), sizes) * expand(self.down_scale)
        update = self.up.grouped(inner.astype(self.up.weight.dtype), sizes)
        update = update * expand(jax.vmap(VeRA._get_output_scale)(self, self.strength_per_expert(self.applies)))
        return self.base.grouped(x, sizes) + update.astype(x.dtype)

    def merge_weight(self, weight: Matrix) -> Matrix:
        output_scale = self._get_output_scale(self.strength_per_expert(self.applies))
        up = output_scale[:, None] * self.up.dense_weight * self.down_scale
        return weight + jnp.matmul(up, self.down.dense_weight, precision="highest")


def vera(
    model: _Model,
    *,
    targets: Targets = ("query", "value"),
    rank: int = 256,
    d_initial: float = 0.1,
    adapter_name: str = "vera",
    key: Key[Array, ""],
) -> _Model:
    """Wrap each target module with a `VeRA` and freeze the rest of the model. All use slices of one random A and B;
    `down_scale` is initialized with `d_initial`. **Raises** `ValueError` for a target that matches nothing, and for a
    rank below 1."""
    check_rank(rank)
    sites = find_linears(model, include_embeddings=True)
    targets = resolve_targets(model, targets, sites, "VeRA")
    is_target = match_targets(targets, sites)
    shapes = [site.get_shape() for site in sites if site.tabulate(is_target, bool).any()]
    out_size, in_size = (max(sizes) for sizes in zip(*shapes, strict=True))
    shared = _init_shared_projections(rank, out_size, in_size, wrap_key(key))

    def factory(base: Any, *, key: Key[Array, ""], applies: Array) -> VeRA:
        return VeRA(base, shared=shared, applies=applies, d_initial=d_initial, adapter_name=adapter_name)

    return apply_uniform(model, factory, targets, key, adapter_name)


def _init_shared_projections(
    rank: int, out_size: int, in_size: int, key: Key[Array, ""]
) -> tuple[Float[Array, "rank _"], Float[Array, "_ rank"]]:
    """Sample A and B uniformly within sqrt(6 / inputs): He et al., arXiv:1502.01852, as in PEFT."""
    down_key, up_key = jax.random.split(key)
    uniform = lambda key, shape: jax.random.uniform(key, shape, jnp.float32, -1.0, 1.0) * (6 / shape[1]) ** 0.5
    return uniform(down_key, (rank, in_size)), uniform(up_key, (out_size, rank))

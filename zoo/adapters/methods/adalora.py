"""AdaLoRA: a change of a matrix in the form of its singular value decomposition, whose ranks can be weighed."""

from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from zoo.layers import AbstractLinear, Linear
from zoo.layers.linear import expand_group_values
from zoo.models.parameter_paths import IndexRanges
from zoo.parallel import Dim, adapter_parameter, buffer, gather, reduce, wrapped

from ..apply import apply_uniform
from ..apply import compute_scale as checked
from ..base import AbstractAdapter, Matrix, Strength, full_strength, get_dims, get_linear_shape
from ..targets import Targets, find_linears, vmap_stacked
from .low_rank import linear_from_weight

_Model = TypeVar("Model")
RANK_EPSILON = 1e-5
"""What PEFT adds to the rank that it divides by."""


class AdaLoRA(AbstractAdapter):
    """y = W x + b + scale B (e ∘ (A x)), A and B being kept near to orthogonal rows and columns by a term of the loss
    (`orthogonality`), and e what a singular value is (Zhang et al., arXiv:2303.10512, section 3.1). A and B start
    normal with a deviation of 0.02, e as zeros.

    This is the form that is learnt. Which ranks are left as learning goes on (section 3.2) is decided between steps, by
    `allocated`: a rank whose e is zero counts for nothing. Where layers that are stacked have unlike ranks, all have
    the largest, and what is beyond a layer's own is zero, which no gradient moves.

    FLOPs: 2 rank (in + out) a token beside the base's 2 in out.
    """

    base: AbstractLinear = wrapped()
    down: Linear = adapter_parameter()
    """A."""
    up: Linear = adapter_parameter()
    """B."""
    values: Float[Array, "rank"] = adapter_parameter(full_precision=True)
    """e."""
    rank: Int[Array, ""]
    applies: Bool[Array, ""]
    """False in a layer that has no adapter, where it is stacked with others that have."""
    scale: Float[Array, ""] = buffer()
    strength: Strength = buffer()

    in_: Dim = eqx.field(static=True)
    out: Dim = eqx.field(static=True)
    adapter_name: str = eqx.field(static=True)

    def __init__(
        self,
        base: AbstractLinear,
        *,
        rank: int,
        scale: float | Float[Array, ""],
        applies: bool | Array = True,
        adapter_name: str = "adalora",
        key: Key[Array, ""],
    ):
        (self.in_, self.out), (out_size, in_size), keys = get_dims(base), get_linear_shape(base), jax.random.split(key)
        down = 0.02 * jax.random.normal(keys[0], (rank, in_size))
        up = 0.02 * jax.random.normal(keys[1], (out_size, rank))
        self.base, self.values = base, jnp.zeros(rank)
        self.down = linear_from_weight(down, in_=self.in_, out=Dim("rank"))
        self.up = linear_from_weight(up, in_=Dim("rank"), out=self.out)
        self.rank, self.applies = jnp.asarray(rank, jnp.int32), jnp.asarray(applies)
        self.scale, self.strength, self.adapter_name = jnp.asarray(scale, jnp.float32), full_strength(), adapter_name

    def scale_singular_values(self, strength: Float[Array, "..."]) -> Float[Array, "*rows rank"]:
        """scale e, as much as it counts."""
        return jnp.where(self.applies, strength, 0) * self.scale * self.values

    def __call__(self, x: Float[Array, "*rows in"]) -> Float[Array, "*rows out"]:
        inner = self.down(x.astype(self.down.weight.dtype)) * self.scale_singular_values(self.strength_per_row(x))
        return self.up.add_matmul(self.base(x), inner.astype(self.up.weight.dtype))

    def transposed(self, x: Float[Array, "*rows out"]) -> Float[Array, "*rows in"]:
        inner = self.up.transposed(x.astype(self.up.weight.dtype)) * self.scale_singular_values(
            self.strength_per_row(x)
        )
        return self.base.transposed(x) + self.down.transposed(inner.astype(self.down.weight.dtype)).astype(x.dtype)

    def grouped(self, x: Float[Array, "rows in"], sizes: Int[Array, "experts"]) -> Float[Array, "rows out"]:
        inner = self.down.grouped(x.astype(self.down.weight.dtype), sizes)
        inner = inner * expand_group_values(
            jax.vmap(AdaLoRA.scale_singular_values)(self, self.strength_per_expert(self.applies)), sizes, len(x)
        )
        return self.base.grouped(x, sizes) + self.up.grouped(inner.astype(self.up.weight.dtype), sizes).astype(x.dtype)

    def merge_weight(self, weight: Matrix) -> Matrix:
        return weight + jnp.matmul(
            self.up.dense_weight * self.scale_singular_values(self.strength_per_expert(self.applies)),
            self.down.dense_weight,
            precision="highest",
        )

    def orthogonality_penalty(self) -> Float[Array, ""]:
        """|A Aᵀ - I|² + |Bᵀ B - I|², of the ranks that there are."""
        counts = self.applies & (jnp.arange(len(self.values)) < self.rank)
        down, up = self.down.dense_weight, self.up.dense_weight
        of_down = reduce(jnp.matmul(down, down.T, precision="highest"), over=self.in_.name)
        of_up = reduce(jnp.matmul(up.T, up, precision="highest"), over=self.out.name)
        off = jnp.square(of_down - jnp.eye(len(counts))) + jnp.square(of_up - jnp.eye(len(counts)))
        return jnp.where(counts & counts[:, None], off, 0).sum()


def orthogonality(model: Any) -> Float[Array, ""]:
    """The sum over all matrices of |A Aᵀ - I|² + |Bᵀ B - I|², by which AdaLoRA keeps ranks apart (Zhang et al.,
    arXiv:2303.10512, section 3.1, equation 4); PEFT takes the mean of the roots instead.

    It is one number, the same on every device of a mesh. In a loss that is a sum over tokens it counts with them:

        total, count = zoo.cross_entropy(model, batch)
        return total + 0.1 * count * adapters.orthogonality(model), count

    **Raises** `ValueError` for a model without an AdaLoRA.
    """
    found = []
    for numbers, adapter in find_adalora(gather(model)):
        apart = vmap_stacked(AdaLoRA.orthogonality_penalty, numbers)(adapter).sum()
        found.append(reduce(reduce(apart, over="layers"), over="experts"))
    return sum(found[1:], start=found[0])


def find_adalora(model: Any) -> list[tuple[IndexRanges, AdaLoRA]]:
    """Every AdaLoRA of a model, stacked as it is, with what its layers and experts are; of one matrix's the innermost
    first. **Raises** `ValueError` where there is none."""

    def around(node: Any) -> list[AdaLoRA]:
        if not isinstance(node, AbstractAdapter):
            return []
        return around(node.base) + ([node] if isinstance(node, AdaLoRA) else [])

    found = [(numbers, adapter) for _, numbers, node in find_linears(model) for adapter in around(node)]
    if not found:
        raise ValueError("the model has no AdaLoRA")
    return found


def adalora(
    model: _Model,
    *,
    targets: Targets = ("query", "value"),
    rank: int = 12,
    alpha: float | int | None = None,
    adapter_name: str = "adalora",
    key: Key[Array, ""],
) -> _Model:
    """The model with an `AdaLoRA` around each of the targets, its change scaled by alpha / (rank + 1e-5), as PEFT has
    it; `alpha` is `rank` unless given. **Raises** `ValueError` for a target that means no matrix, and for a rank below
    1."""
    scale = checked(alpha, rank) * rank / (rank + RANK_EPSILON)

    def make(base: AbstractLinear, *, key: Key[Array, ""], applies: Array) -> AdaLoRA:
        return AdaLoRA(base, rank=rank, scale=scale, applies=applies, adapter_name=adapter_name, key=key)

    return apply_uniform(model, make, targets, key, adapter_name)

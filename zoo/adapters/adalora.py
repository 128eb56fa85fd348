"""AdaLoRA: a change of a matrix in the form of its singular value decomposition, whose ranks can be weighed."""

from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from zoo.layers import AbstractLinear, Linear
from zoo.layers.linear import of_groups
from zoo.models.names import Numbers
from zoo.parallel import Dim, buffer, gather, reduce, transparent, tuned

from .abstract import AbstractAdapter, Matrix, Weight, dims_of, on, sizes_of
from .factors import matrix_of
from .targets import Targets, matrices, over_stacked
from .wrap import alike
from .wrap import scale as checked

Model = TypeVar("Model")
NEARLY_NONE = 1e-5
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

    base: AbstractLinear = transparent()
    down: Linear = tuned()
    """A."""
    up: Linear = tuned()
    """B."""
    values: Float[Array, "rank"] = tuned(full_precision=True)
    """e."""
    rank: Int[Array, ""]
    applies: Bool[Array, ""]
    """False in a layer that has no adapter, where it is stacked with others that have."""
    scale: Float[Array, ""] = buffer()
    weight: Weight = buffer()

    in_: Dim = eqx.field(static=True)
    out: Dim = eqx.field(static=True)
    label: str = eqx.field(static=True)

    def __init__(
        self,
        base: AbstractLinear,
        *,
        rank: int,
        scale: float | Float[Array, ""],
        applies: bool | Array = True,
        label: str = "adalora",
        key: Key[Array, ""],
    ):
        (self.in_, self.out), (out_size, in_size), keys = dims_of(base), sizes_of(base), jax.random.split(key)
        down = 0.02 * jax.random.normal(keys[0], (rank, in_size))
        up = 0.02 * jax.random.normal(keys[1], (out_size, rank))
        self.base, self.values = base, jnp.zeros(rank)
        self.down = matrix_of(down, in_=self.in_, out=Dim("rank"))
        self.up = matrix_of(up, in_=Dim("rank"), out=self.out)
        self.rank, self.applies = jnp.asarray(rank, jnp.int32), jnp.asarray(applies)
        self.scale, self.weight, self.label = jnp.asarray(scale, jnp.float32), on(), label

    def factors(self, counts: Float[Array, "..."]) -> Float[Array, "*rows rank"]:
        """scale e, as much as it counts."""
        return jnp.where(self.applies, counts, 0) * self.scale * self.values

    def __call__(self, x: Float[Array, "*rows in"]) -> Float[Array, "*rows out"]:
        inner = self.down(x.astype(self.down.weight.dtype)) * self.factors(self.counted(x))
        return self.up.plus(self.base(x), inner.astype(self.up.weight.dtype))

    def transposed(self, x: Float[Array, "*rows out"]) -> Float[Array, "*rows in"]:
        inner = self.up.transposed(x.astype(self.up.weight.dtype)) * self.factors(self.counted(x))
        return self.base.transposed(x) + self.down.transposed(inner.astype(self.down.weight.dtype)).astype(x.dtype)

    def grouped(self, x: Float[Array, "rows in"], sizes: Int[Array, "experts"]) -> Float[Array, "rows out"]:
        inner = self.down.grouped(x.astype(self.down.weight.dtype), sizes)
        inner = inner * of_groups(jax.vmap(AdaLoRA.factors)(self, self.alike(self.applies)), sizes, len(x))
        return self.base.grouped(x, sizes) + self.up.grouped(inner.astype(self.up.weight.dtype), sizes).astype(x.dtype)

    def changed(self, matrix: Matrix) -> Matrix:
        return matrix + jnp.matmul(
            self.up.matrix * self.factors(self.alike(self.applies)), self.down.matrix, precision="highest"
        )

    def apart(self) -> Float[Array, ""]:
        """|A Aᵀ - I|² + |Bᵀ B - I|², of the ranks that there are."""
        counts = self.applies & (jnp.arange(len(self.values)) < self.rank)
        down, up = self.down.matrix, self.up.matrix
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
    for numbers, adapter in ranked(gather(model)):
        apart = over_stacked(AdaLoRA.apart, numbers)(adapter).sum()
        found.append(reduce(reduce(apart, over="layers"), over="experts"))
    return sum(found[1:], start=found[0])


def ranked(model: Any) -> list[tuple[Numbers, AdaLoRA]]:
    """Every AdaLoRA of a model, stacked as it is, with what its layers and experts are; of one matrix's the innermost
    first. **Raises** `ValueError` where there is none."""

    def around(node: Any) -> list[AdaLoRA]:
        if not isinstance(node, AbstractAdapter):
            return []
        return around(node.base) + ([node] if isinstance(node, AdaLoRA) else [])

    found = [(numbers, adapter) for _, numbers, node in matrices(model) for adapter in around(node)]
    if not found:
        raise ValueError("the model has no AdaLoRA")
    return found


def adalora(
    model: Model,
    *,
    targets: Targets = ("query", "value"),
    rank: int = 12,
    alpha: float | int | None = None,
    label: str = "adalora",
    key: Key[Array, ""],
) -> Model:
    """The model with an `AdaLoRA` around each of the targets, its change scaled by alpha / (rank + 1e-5), as PEFT has
    it; `alpha` is `rank` unless given. **Raises** `ValueError` for a target that means no matrix, and for a rank below
    1."""
    scale = checked(alpha, rank) * rank / (rank + NEARLY_NONE)

    def make(base: AbstractLinear, *, key: Key[Array, ""], applies: Array) -> AdaLoRA:
        return AdaLoRA(base, rank=rank, scale=scale, applies=applies, label=label, key=key)

    return alike(model, make, targets, key, label)

"""AdaLoRA: a trainable update in the form of a singular value decomposition, whose ranks can be pruned."""

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from zoo._keywords import check_keywords
from zoo.layers import AbstractLinear, Linear
from zoo.models.parameter_paths import IndexRanges
from zoo.models.targets import Targets, find_linears, get_linear_shape, vmap_stacked
from zoo.ops.moe.grouped_matmul import expand_group_values
from zoo.parallel import Dim, buffer, gather, reduce
from zoo.parallel.fields import adapter_parameter
from zoo.parallel.tokens import match_tokens

from ..apply import apply_uniform, compute_scale
from ..base import AbstractUniformAdapter, Matrix, is_adapter
from ..merged_layers import require_unmerged
from ..peft_limits import resolve_targets
from .low_rank import linear_from_weight

_Model = TypeVar("Model")
RANK_EPSILON = 1e-5
"""Added to the rank that the scale is divided by, as in PEFT."""


class AdaLoRA(AbstractUniformAdapter):
    """y = W x + b + scale B (e ∘ (A x)), where a penalty (`orthogonality`) keeps the rows of A and the columns of B
    nearly orthogonal and e has the role of the singular values (Zhang et al., arXiv:2303.10512, section 3.1). A and B
    are initialized from a normal distribution with standard deviation 0.02, e with zeros.

    `keep_top_ranks` prunes ranks between steps (section 3.2): a rank whose e is zero has no effect. If stacked layers
    have different ranks, their arrays have the largest, padded with zeros that get no gradient.

    FLOPs: 2 rank (in + out) per token, in addition to the base's 2 in out.
    """

    down: Linear = adapter_parameter()
    """A."""
    up: Linear = adapter_parameter()
    """B."""
    values: Float[Array, "rank"] = adapter_parameter(full_precision=True)
    """e."""
    rank: Int[Array, ""]
    scale: Float[Array, ""] = buffer()

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
        super().__init__(base, applies=applies, adapter_name=adapter_name)
        out_size, in_size = get_linear_shape(base)
        keys = jax.random.split(key)
        down = 0.02 * jax.random.normal(keys[0], (rank, in_size), jnp.float32)
        up = 0.02 * jax.random.normal(keys[1], (out_size, rank), jnp.float32)
        self.values = jnp.zeros(rank, jnp.float32)
        self.down = linear_from_weight(down, in_=self.in_, out=Dim("rank"))
        self.up = linear_from_weight(up, in_=Dim("rank"), out=self.out)
        self.rank = jnp.asarray(rank, jnp.int32)
        self.scale = jnp.asarray(scale, jnp.float32)

    def _scale_singular_values(self, strength: Float[Array, "..."]) -> Float[Array, "*rows rank"]:
        """Return strength scale e, or zeros if the adapter does not apply."""
        return jnp.where(self.applies, strength, 0) * self.scale * self.values

    def __call__(self, x: Float[Array, "*rows in"]) -> Float[Array, "*tokens out"]:
        """Return W x + b + scale B (e ∘ (A x))."""
        inner = self.down(x.astype(self.down.weight.dtype)) * self._scale_singular_values(self.strength_per_row(x))
        y = self.base(x)
        return self.up.add_matmul(y, match_tokens(inner.astype(self.up.weight.dtype), y))

    def transposed(self, x: Float[Array, "*rows out"]) -> Float[Array, "*rows in"]:
        inner = self.up.transposed(x.astype(self.up.weight.dtype))
        inner = inner * self._scale_singular_values(self.strength_per_row(x))
        return self.base.transposed(x) + self.down.transposed(inner.astype(self.down.weight.dtype)).astype(x.dtype)

    def grouped(self, x: Float[Array, "rows in"], sizes: Int[Array, "experts"]) -> Float[Array, "rows out"]:
        inner = self.down.grouped(x.astype(self.down.weight.dtype), sizes)
        values = jax.vmap(AdaLoRA._scale_singular_values)(self, self.strength_per_expert(self.applies))
        inner = inner * expand_group_values(values, sizes, len(x))
        return self.base.grouped(x, sizes) + self.up.grouped(inner.astype(self.up.weight.dtype), sizes).astype(x.dtype)

    def merge_weight(self, weight: Matrix) -> Matrix:
        up = self.up.dense_weight * self._scale_singular_values(self.strength_per_expert(self.applies))
        return weight + jnp.matmul(up, self.down.dense_weight, precision="highest")

    def orthogonality_penalty(self) -> Float[Array, ""]:
        """Return |A Aᵀ - I|² + |Bᵀ B - I|², over the ranks of this layer."""
        is_used = self.applies & (jnp.arange(len(self.values)) < self.rank)
        down = self.down.dense_weight
        up = self.up.dense_weight
        down_gram = reduce(jnp.matmul(down, down.T, precision="highest"), over=self.in_.name)
        up_gram = reduce(jnp.matmul(up.T, up, precision="highest"), over=self.out.name)
        identity = jnp.eye(len(is_used), dtype=jnp.float32)
        squares = jnp.square(down_gram - identity) + jnp.square(up_gram - identity)
        return jnp.where(is_used & is_used[:, None], squares, 0).sum()


@check_keywords
def adalora(
    model: _Model,
    *,
    targets: Targets = ("query", "value"),
    rank: int = 12,
    alpha: float | int | None = None,
    adapter_name: str = "adalora",
    key: Key[Array, ""],
) -> _Model:
    """Wrap each target module with an `AdaLoRA` and freeze the rest of the model. The update is scaled by
    alpha / (rank + 1e-5), as in PEFT; `alpha` defaults to `rank`. **Raises** `ValueError` for a target that matches
    nothing, and for a rank below 1."""
    scale = compute_scale(alpha, rank) * rank / (rank + RANK_EPSILON)

    def factory(base: AbstractLinear, *, key: Key[Array, ""], applies: Array) -> AdaLoRA:
        return AdaLoRA(base, rank=rank, scale=scale, applies=applies, adapter_name=adapter_name, key=key)

    targets = resolve_targets(model, targets, find_linears(model, include_embeddings=True), "AdaLoRA")
    return apply_uniform(model, factory, targets, key, adapter_name)


def orthogonality(model: Any) -> Float[Array, ""]:
    """Sum AdaLoRA's orthogonality penalty |A Aᵀ - I|² + |Bᵀ B - I|² over all layers (Zhang et al., arXiv:2303.10512,
    section 3.1, equation 4); PEFT uses the mean of the square roots instead.

    The result is a scalar, replicated on a mesh. In a loss that is summed over tokens, weight it by their count:

        total, count = zoo.cross_entropy(model, batch)
        return total + 0.1 * count * adapters.orthogonality(model), count

    **Raises** `ValueError` for a model without an AdaLoRA.
    """
    penalties = []
    for ranges, adapter in find_adalora(gather(model)):
        penalty = vmap_stacked(AdaLoRA.orthogonality_penalty, ranges)(adapter).sum()
        penalties.append(reduce(reduce(penalty, over="layers"), over="experts"))
    return sum(penalties[1:], start=penalties[0])


def find_adalora(model: Any) -> list[tuple[IndexRanges, AdaLoRA]]:
    """List every AdaLoRA of a model, stacked over layers and experts, with their layer and expert indices; of nested
    adapters, the innermost first. **Raises** `ValueError` if there is none, or if they are merged."""
    require_unmerged(model)

    def find_in(module: Any) -> list[AdaLoRA]:
        if not is_adapter(module):
            return []
        return find_in(module.base) + ([module] if isinstance(module, AdaLoRA) else [])

    found = [(ranges, adapter) for _, ranges, module in find_linears(model) for adapter in find_in(module)]
    if not found:
        raise ValueError("the model has no AdaLoRA")
    return found

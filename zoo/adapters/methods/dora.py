"""DoRA: LoRA for the direction of each row of a weight, and a trainable magnitude per row."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Key

from zoo._keywords import check_keywords
from zoo.layers import AbstractLinear
from zoo.models.targets import Targets
from zoo.ops.moe.grouped_matmul import expand_group_values
from zoo.parallel import buffer, reduce
from zoo.parallel.fields import adapter_parameter
from zoo.parallel.tokens import match_tokens

from ..base import Matrix, is_adapter
from .lora import LoRA, LoRAInit, apply_low_rank
from .low_rank import AbstractLowRankAdapter, check_dropout_rate, linear_from_weight, low_rank_product
from .modules_to_save import BiasOption

_Model = TypeVar("Model")
_Adapter = TypeVar("_Adapter", bound="DoRA")
_Rows = Float[Array, "*rows out"]


class DoRA(AbstractLowRankAdapter):
    """y = m / |W + scale B A| (W + scale B A) x + b, where |.| is the norm of each row, over the inputs, and m a
    trainable magnitude per row, initialized to |W| (Liu et al., arXiv:2402.09353, section 4.1). The norm is a constant
    in the backward pass (section 4.3).

    The forward pass needs no dense W: |W|² is stored, and with V = scale B A

        |W + V|² = |W|² + 2 scale sum over rank of B (W Aᵀ)ᵀ + |V|²,     |V|² = scale² sum over rank of B (B A Aᵀ)

    where the base computes W Aᵀ as it multiplies any rows. FLOPs: LoRA's, and 2 rank in out per call.

    W includes adapters beneath this one, at their current strength. It then changes in training, so nothing is stored
    and each call computes the norm from the dense W + V, in a few in out FLOPs and a matrix of memory.

    Rounding: where W and V nearly cancel in a whole row, the sum has the rounding of its largest term.
    """

    magnitude: Float[Array, "out"] = adapter_parameter(full_precision=True)
    squares: Float[Array, "out"] = buffer()
    """|W|². Not used around another adapter."""

    def __init__(
        self,
        base: AbstractLinear,
        *,
        max_rank: int,
        rank: int | Int[Array, ""],
        scale: float | Float[Array, ""],
        init: LoRAInit = "zero",
        dropout: float | int = 0.0,
        adapter_name: str = "dora",
        key: Key[Array, ""],
    ):
        """Initialize like a `LoRA` with the same arguments. A layer of rank 0 has no adapter. **Raises** `ValueError`
        for an `init` that subtracts a part from W, whose row norms initialize m."""
        if init in ("pissa", "olora"):
            raise ValueError(
                f"init={init!r} takes a part out of the matrix whose lengths a DoRA starts from: take a LoRA"
            )
        lora = LoRA(
            base,
            max_rank=max_rank,
            rank=rank,
            scale=scale,
            init=init,
            dropout=dropout,
            adapter_name=adapter_name,
            key=key,
        )
        super().__init__(
            base,
            down=lora.down.weight,
            up=lora.up.weight,
            rank=lora.rank,
            scale=lora.scale,
            dropout=dropout,
            adapter_name=adapter_name,
        )
        self.squares = _sum_squares(base.dense_weight)
        self.magnitude = jnp.sqrt(self.squares)

    def with_base(self: _Adapter, base: AbstractLinear) -> _Adapter:
        dora = super().with_base(base)
        return eqx.tree_at(lambda dora: dora.squares, dora, _sum_squares(base.dense_weight))

    def __call__(self, x: Float[Array, "*rows in"]) -> Float[Array, "*tokens out"]:
        """Return m / |W + scale B A| (W + scale B A) x + b."""
        base_ratio, update_ratio = self._get_magnitude_ratios(self._compute_norm(), self.strength_per_row(x))
        bias = self.base.dense_bias
        product = self.base(x) if bias is None else self.base(x) - bias
        inner = match_tokens(self.project_down(x, self.scale), product)
        if update_ratio.ndim > 1:  # one strength per row of the batch
            y = base_ratio * product + update_ratio * self.up(inner)
        else:
            up = (update_ratio[:, None] * self.up.weight).astype(inner.dtype)
            y = linear_from_weight(up, in_=self.up.in_, out=self.out).add_matmul(base_ratio * product, inner)
        return (y if bias is None else y + bias).astype(x.dtype)

    def transposed(self, x: Float[Array, "*rows out"]) -> Float[Array, "*rows in"]:
        base_ratio, update_ratio = self._get_magnitude_ratios(self._compute_norm(), self.strength_per_row(x))
        inner = self.up.transposed((x * update_ratio).astype(self.up.weight.dtype)) * self.scale
        update = self.down.transposed(inner.astype(self.down.weight.dtype))
        return (self.base.transposed((x * base_ratio).astype(x.dtype)) + update).astype(x.dtype)

    def grouped(self, x: Float[Array, "rows in"], sizes: Int[Array, "experts"]) -> Float[Array, "rows out"]:
        if self.base.dense_bias is not None:
            raise NotImplementedError("a DoRA of experts that have biases: take a LoRA, or target other modules")
        norm = self._compute_norm_of_experts(sizes.dtype)
        ratios = jax.vmap(DoRA._get_magnitude_ratios)(self, norm, self.strength_per_expert(self.scale))
        base_ratio, update_ratio = (expand_group_values(ratio, sizes, len(x)) for ratio in ratios)
        inner = self.down.grouped(x.astype(self.down.weight.dtype), sizes) * expand_group_values(
            self.scale[:, None], sizes, len(x)
        )
        update = self.up.grouped(inner.astype(self.up.weight.dtype), sizes)
        return (base_ratio * self.base.grouped(x, sizes) + update_ratio * update).astype(x.dtype)

    def _compute_norm(self) -> Float[Array, "out"]:
        """Return |W + scale B A|, a constant in the backward pass."""
        if is_adapter(self.base):
            return lax.stop_gradient(self._compute_dense_norm(self.base.dense_weight))
        bias = self.base.dense_bias
        product = self.base(self.down.weight).astype(jnp.float32)
        return self._expand_norm(product if bias is None else product - bias)

    def _compute_norm_of_experts(self, dtype: Any) -> Float[Array, "experts out"]:
        """Return |W + scale B A| of each expert. `dtype` is the dtype of `sizes`."""
        if is_adapter(self.base):
            return jax.vmap(DoRA._compute_norm)(self)
        experts, rank, _ = self.down.weight.shape
        down_rows = self.down.weight.reshape(experts * rank, -1)
        product = self.base.grouped(down_rows, jnp.full((experts,), rank, dtype))
        product = reduce(product, over=self.in_.name).reshape(experts, rank, -1)
        return jax.vmap(DoRA._expand_norm)(self, product)

    def _expand_norm(self, base_times_down: Float[Array, "rank out"]) -> Float[Array, "out"]:
        """Return |W + scale B A| from |W|² and W Aᵀ, `base_times_down`."""
        up = self.up.weight.astype(jnp.float32)
        down = self.down.weight.astype(jnp.float32)
        down_gram = reduce(jnp.matmul(down, down.T, precision="highest"), over=self.in_.name)
        cross_term = 2 * self.scale * (up * base_times_down.T.astype(jnp.float32)).sum(-1)
        update_squares = jnp.square(self.scale) * (jnp.matmul(up, down_gram, precision="highest") * up).sum(-1)
        return lax.stop_gradient(jnp.sqrt(jnp.maximum(self.squares + cross_term + update_squares, 0)))

    def _compute_dense_norm(self, weight: Matrix) -> Float[Array, "out"]:
        """Return |W + scale B A| from W."""
        updated = weight + self.scale * low_rank_product(self.down, self.up)
        return jnp.sqrt(reduce(_sum_squares(updated), over=self.in_.name))

    def _get_magnitude_ratios(self, norm: Float[Array, "out"], strength: Float[Array, "..."]) -> tuple[_Rows, _Rows]:
        """Return the factors of W x and of scale B A x: the ratio of m to the norm, interpolated by `strength`."""
        ratio = self._get_ratio(norm)
        return 1 + strength * (ratio - 1), strength * ratio

    def _get_ratio(self, norm: Float[Array, "out"]) -> Float[Array, "out"]:
        """Return m / |W + scale B A|, or 1 in a layer without the adapter."""
        return jnp.where(self.rank > 0, self.magnitude / jnp.where(norm == 0, 1, norm), 1)

    def merge_weight(self, weight: Matrix) -> Matrix:
        updated = weight + self.scale * low_rank_product(self.down, self.up)
        ratio = self._get_ratio(self._compute_dense_norm(weight))
        return weight + self.strength_per_expert(self.scale) * (ratio[:, None] * updated - weight)


def _sum_squares(matrix: Matrix) -> Float[Array, "out"]:
    return jnp.square(matrix).sum(-1)


@check_keywords
def dora(
    model: _Model,
    *,
    targets: Targets = ("query", "value"),
    rank: int = 8,
    alpha: float | int | None = None,
    rank_pattern: Mapping[str, int] | None = None,
    alpha_pattern: Mapping[str, float | int] | None = None,
    rank_stabilized: bool = False,
    init: LoRAInit = "zero",
    dropout: float | int = 0.0,
    bias: BiasOption = "none",
    modules_to_save: Sequence[str] = (),
    adapter_name: str = "dora",
    key: Key[Array, ""],
) -> _Model:
    """Wrap each target module with a `DoRA` and freeze the rest of the model. Arguments and errors are as in `lora`."""
    factory = partial(DoRA, init=init, dropout=check_dropout_rate(dropout), adapter_name=adapter_name)
    return apply_low_rank(
        model,
        factory,
        targets=targets,
        rank=rank,
        alpha=alpha,
        rank_pattern=rank_pattern,
        alpha_pattern=alpha_pattern,
        rank_stabilized=rank_stabilized,
        bias=bias,
        modules_to_save=modules_to_save,
        key=key,
    )

"""DoRA: LoRA for the directions of a matrix's rows, and their lengths learnt apart."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Key

from zoo.layers import AbstractLinear, Linear
from zoo.layers.linear import expand_group_values
from zoo.parallel import Dim, adapter_parameter, buffer, implementation_option, reduce, wrapped

from ..base import Matrix, Strength
from .lora import LoRA, LoRAInit
from .low_rank import AbstractLowRankAdapter, linear_from_weight, low_rank_product

_Rows = Float[Array, "*rows out"]


class DoRA(AbstractLowRankAdapter):
    """y = m / |W + scale B A| (W + scale B A) x + b, |.| being the length of each row, over the inputs, and m a number
    a row that is learnt and starts as |W| (Liu et al., arXiv:2402.09353, section 4.1). The gradient takes the length as
    a constant (section 4.3).

    W is never needed as an array: |W|² is kept, and with V = scale B A

        |W + V|² = |W|² + 2 scale sum over rank of B (W Aᵀ)ᵀ + |V|²,     |V|² = scale² sum over rank of B (B A Aᵀ)

    takes W Aᵀ from the base, as it would multiply any rows. FLOPs: LoRA's, and 2 rank in out a call.

    Rounding: where W and V nearly cancel in a whole row, the sum has the rounding of its largest term.
    """

    base: AbstractLinear = wrapped()
    down: Linear = adapter_parameter()
    up: Linear = adapter_parameter()
    magnitude: Float[Array, "out"] = adapter_parameter(full_precision=True)
    squares: Float[Array, "out"] = buffer()
    """|W|²."""
    rank: Int[Array, ""]
    scale: Float[Array, ""] = buffer()
    strength: Strength = buffer()
    keys: Key[Array, "batch"] | None

    in_: Dim = eqx.field(static=True)
    out: Dim = eqx.field(static=True)
    adapter_name: str = eqx.field(static=True)
    dropout: float = implementation_option()

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
        """As a `LoRA` is made, and from the same numbers. In a layer of rank 0 nothing is changed. **Raises**
        `ValueError` for a `start` that takes a part out of W, whose lengths m starts as."""
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
        self.base, self.down, self.up, self.rank, self.scale = base, lora.down, lora.up, lora.rank, lora.scale
        self.squares = jnp.square(base.dense_weight).sum(-1)
        self.magnitude = jnp.sqrt(self.squares)
        self.strength, self.keys, self.dropout = lora.strength, lora.keys, lora.dropout
        self.in_, self.out, self.adapter_name = lora.in_, lora.out, adapter_name

    def __call__(self, x: Float[Array, "*rows in"]) -> Float[Array, "*rows out"]:
        of_base, of_change = self.get_magnitude_ratios(self.multiply_base(self.down.weight), self.strength_per_row(x))
        inner, shift = self.project_down(x, self.scale), self.base.dense_bias
        product = self.base(x) if shift is None else self.base(x) - shift
        if of_change.ndim > 1:  # rows of their own
            mixed = of_base * product + of_change * self.up(inner)
        else:
            up = (of_change[:, None] * self.up.weight).astype(inner.dtype)
            mixed = linear_from_weight(up, in_=self.up.in_, out=self.out).add_matmul(of_base * product, inner)
        return (mixed if shift is None else mixed + shift).astype(x.dtype)

    def transposed(self, x: Float[Array, "*rows out"]) -> Float[Array, "*rows in"]:
        of_base, of_change = self.get_magnitude_ratios(self.multiply_base(self.down.weight), self.strength_per_row(x))
        inner = self.up.transposed((x * of_change).astype(self.up.weight.dtype)) * self.scale
        change = self.down.transposed(inner.astype(self.down.weight.dtype))
        return (self.base.transposed((x * of_base).astype(x.dtype)) + change).astype(x.dtype)

    def grouped(self, x: Float[Array, "rows in"], sizes: Int[Array, "experts"]) -> Float[Array, "rows out"]:
        if self.base.dense_bias is not None:
            raise NotImplementedError("a DoRA of experts that have biases: take a LoRA, or target other modules")
        experts, rank, _ = self.down.weight.shape
        rows = self.down.weight.reshape(experts * rank, -1)
        each = jnp.full((experts,), rank, sizes.dtype)
        seen = reduce(self.base.grouped(rows, each), over=self.in_.name).reshape(experts, rank, -1)
        ratios = jax.vmap(DoRA.get_magnitude_ratios)(self, seen, self.strength_per_expert(self.scale))
        of_base, of_change = (expand_group_values(row, sizes, len(x)) for row in ratios)
        inner = self.down.grouped(x.astype(self.down.weight.dtype), sizes) * expand_group_values(
            self.scale[:, None], sizes, len(x)
        )
        change = self.up.grouped(inner.astype(self.up.weight.dtype), sizes)
        return (of_base * self.base.grouped(x, sizes) + of_change * change).astype(x.dtype)

    def multiply_base(self, rows: Float[Array, "rank in"]) -> Float[Array, "rank out"]:
        """W times each row, without the bias."""
        shift = self.base.dense_bias
        product = self.base(rows).astype(jnp.float32)
        return product if shift is None else product - shift

    def get_magnitude_ratios(
        self, base_times_down: Float[Array, "rank out"], strength: Float[Array, "..."]
    ) -> tuple[_Rows, _Rows]:
        """What W x and what scale B A x is multiplied with, `seen` being W Aᵀ: m over the length, or as much of it as
        the adapter `counts`."""
        up, down = self.up.weight.astype(jnp.float32), self.down.weight.astype(jnp.float32)
        among = reduce(jnp.matmul(down, down.T, precision="highest"), over=self.in_.name)
        crossed = 2 * self.scale * (up * base_times_down.T.astype(jnp.float32)).sum(-1)
        own = jnp.square(self.scale) * (jnp.matmul(up, among, precision="highest") * up).sum(-1)
        length = lax.stop_gradient(jnp.sqrt(jnp.maximum(self.squares + crossed + own, 0)))
        ratio = jnp.where(self.rank > 0, self.magnitude / jnp.where(length == 0, 1, length), 1)
        return 1 + strength * (ratio - 1), strength * ratio

    def merge_weight(self, weight: Matrix) -> Matrix:
        moved = weight + self.scale * low_rank_product(self.down, self.up)
        length = jnp.linalg.norm(moved, axis=-1)
        ratio = jnp.where(self.rank > 0, self.magnitude / jnp.where(length == 0, 1, length), 1)
        return weight + self.strength_per_expert(self.scale) * (ratio[:, None] * moved - weight)

"""DoRA: LoRA for the directions of a matrix's rows, and their lengths learnt apart."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Key

from zoo.layers import AbstractLinear, Linear
from zoo.layers.linear import of_groups
from zoo.parallel import Dim, buffer, manner, reduce, transparent, tuned

from .abstract import Matrix, Weight
from .factors import AbstractFactors, difference, matrix_of
from .lora import LoRA, Start

Rows = Float[Array, "*rows out"]


class DoRA(AbstractFactors):
    """y = m / |W + scale B A| (W + scale B A) x + b, |.| being the length of each row, over the inputs, and m a number
    a row that is learnt and starts as |W| (Liu et al., arXiv:2402.09353, section 4.1). The gradient takes the length as
    a constant (section 4.3).

    W is never needed as an array: |W|² is kept, and with V = scale B A

        |W + V|² = |W|² + 2 scale sum over rank of B (W Aᵀ)ᵀ + |V|²,     |V|² = scale² sum over rank of B (B A Aᵀ)

    takes W Aᵀ from the base, as it would multiply any rows. FLOPs: LoRA's, and 2 rank in out a call.

    Rounding: where W and V nearly cancel in a whole row, the sum has the rounding of its largest term.
    """

    base: AbstractLinear = transparent()
    down: Linear = tuned()
    up: Linear = tuned()
    magnitude: Float[Array, "out"] = tuned(full_precision=True)
    squares: Float[Array, "out"] = buffer()
    """|W|²."""
    rank: Int[Array, ""]
    scale: Float[Array, ""] = buffer()
    weight: Weight = buffer()
    keys: Key[Array, "batch"] | None

    in_: Dim = eqx.field(static=True)
    out: Dim = eqx.field(static=True)
    label: str = eqx.field(static=True)
    dropout: float = manner()

    def __init__(
        self,
        base: AbstractLinear,
        *,
        largest: int,
        rank: int | Int[Array, ""],
        scale: float | Float[Array, ""],
        start: Start = "zero",
        dropout: float | int = 0.0,
        label: str = "dora",
        key: Key[Array, ""],
    ):
        """As a `LoRA` is made, and from the same numbers. In a layer of rank 0 nothing is changed. **Raises**
        `ValueError` for a `start` that takes a part out of W, whose lengths m starts as."""
        if start in ("pissa", "olora"):
            raise ValueError(
                f"start={start!r} takes a part out of the matrix whose lengths a DoRA starts from: take a LoRA"
            )
        lora = LoRA(base, largest=largest, rank=rank, scale=scale, start=start, dropout=dropout, label=label, key=key)
        self.base, self.down, self.up, self.rank, self.scale = base, lora.down, lora.up, lora.rank, lora.scale
        self.squares = jnp.square(base.matrix).sum(-1)
        self.magnitude = jnp.sqrt(self.squares)
        self.weight, self.keys, self.dropout = lora.weight, lora.keys, lora.dropout
        self.in_, self.out, self.label = lora.in_, lora.out, label

    def __call__(self, x: Float[Array, "*rows in"]) -> Float[Array, "*rows out"]:
        of_base, of_change = self.lengths(self.times_base(self.down.weight), self.counted(x))
        inner, shift = self.inner(x, self.scale), self.base.shift
        product = self.base(x) if shift is None else self.base(x) - shift
        if of_change.ndim > 1:  # rows of their own
            mixed = of_base * product + of_change * self.up(inner)
        else:
            up = (of_change[:, None] * self.up.weight).astype(inner.dtype)
            mixed = matrix_of(up, in_=self.up.in_, out=self.out).plus(of_base * product, inner)
        return (mixed if shift is None else mixed + shift).astype(x.dtype)

    def transposed(self, x: Float[Array, "*rows out"]) -> Float[Array, "*rows in"]:
        of_base, of_change = self.lengths(self.times_base(self.down.weight), self.counted(x))
        inner = self.up.transposed((x * of_change).astype(self.up.weight.dtype)) * self.scale
        change = self.down.transposed(inner.astype(self.down.weight.dtype))
        return (self.base.transposed((x * of_base).astype(x.dtype)) + change).astype(x.dtype)

    def grouped(self, x: Float[Array, "rows in"], sizes: Int[Array, "experts"]) -> Float[Array, "rows out"]:
        if self.base.shift is not None:
            raise NotImplementedError("a DoRA of experts that have biases: take a LoRA, or target other modules")
        experts, rank, _ = self.down.weight.shape
        rows = self.down.weight.reshape(experts * rank, -1)
        each = jnp.full((experts,), rank, sizes.dtype)
        seen = reduce(self.base.grouped(rows, each), over=self.in_.name).reshape(experts, rank, -1)
        ratios = jax.vmap(DoRA.lengths)(self, seen, self.alike(self.scale))
        of_base, of_change = (of_groups(row, sizes, len(x)) for row in ratios)
        inner = self.down.grouped(x.astype(self.down.weight.dtype), sizes) * of_groups(
            self.scale[:, None], sizes, len(x)
        )
        change = self.up.grouped(inner.astype(self.up.weight.dtype), sizes)
        return (of_base * self.base.grouped(x, sizes) + of_change * change).astype(x.dtype)

    def times_base(self, rows: Float[Array, "rank in"]) -> Float[Array, "rank out"]:
        """W times each row, without the bias."""
        shift = self.base.shift
        product = self.base(rows).astype(jnp.float32)
        return product if shift is None else product - shift

    def lengths(self, seen: Float[Array, "rank out"], counts: Float[Array, "..."]) -> tuple[Rows, Rows]:
        """What W x and what scale B A x is multiplied with, `seen` being W Aᵀ: m over the length, or as much of it as
        the adapter `counts`."""
        up, down = self.up.weight.astype(jnp.float32), self.down.weight.astype(jnp.float32)
        among = reduce(jnp.matmul(down, down.T, precision="highest"), over=self.in_.name)
        crossed = 2 * self.scale * (up * seen.T.astype(jnp.float32)).sum(-1)
        own = jnp.square(self.scale) * (jnp.matmul(up, among, precision="highest") * up).sum(-1)
        length = lax.stop_gradient(jnp.sqrt(jnp.maximum(self.squares + crossed + own, 0)))
        ratio = jnp.where(self.rank > 0, self.magnitude / jnp.where(length == 0, 1, length), 1)
        return 1 + counts * (ratio - 1), counts * ratio

    def changed(self, matrix: Matrix) -> Matrix:
        moved = matrix + self.scale * difference(self.down, self.up)
        length = jnp.linalg.norm(moved, axis=-1)
        ratio = jnp.where(self.rank > 0, self.magnitude / jnp.where(length == 0, 1, length), 1)
        return matrix + self.alike(self.scale) * (ratio[:, None] * moved - matrix)

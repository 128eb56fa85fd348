"""IA3: each output of a matrix, or each input of it, multiplied with a number that is learnt."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from zoo.layers import AbstractLinear
from zoo.layers.linear import of_groups
from zoo.parallel import Dim, buffer, transparent, tuned

from .abstract import AbstractAdapter, Matrix, Shift, Weight, dims_of, on, sizes_of


class IA3(AbstractAdapter):
    """y = l ∘ (W x + b), or W (l ∘ x) + b for what leads out of a feed-forward layer; l starts as ones (Liu et al.,
    arXiv:2205.05638, section 3.3, where it stands on keys, values and the inner activations)."""

    base: AbstractLinear = transparent()
    of_out: Float[Array, "out"] | None = tuned(full_precision=True)
    of_in: Float[Array, "in"] | None = tuned(full_precision=True)
    applies: Bool[Array, ""]
    """False in a layer that has no adapter, where it is stacked with others that have."""
    weight: Weight = buffer()

    in_: Dim = eqx.field(static=True)
    out: Dim = eqx.field(static=True)
    label: str = eqx.field(static=True)

    def __init__(self, base: AbstractLinear, *, inputs: bool, applies: bool | Array = True, label: str = "ia3"):
        """`inputs`: whether these are multiplied, and not the outputs."""
        (self.in_, self.out), (out_size, in_size) = dims_of(base), sizes_of(base)
        self.base, self.applies, self.weight, self.label = base, jnp.asarray(applies), on(), label
        self.of_in = jnp.ones(in_size) if inputs else None
        self.of_out = None if inputs else jnp.ones(out_size)

    def __call__(self, x: Float[Array, "*rows in"]) -> Float[Array, "*rows out"]:
        return self.after(self.base(self.before(x)))

    def transposed(self, x: Float[Array, "*rows out"]) -> Float[Array, "*rows in"]:
        return self.before(self.base.transposed(self.after(x)))

    def grouped(self, x: Float[Array, "rows in"], sizes: Int[Array, "experts"]) -> Float[Array, "rows out"]:
        counts = self.alike(self.applies)
        gates = lambda gate: of_groups(jax.vmap(IA3.gates)(self, gate, counts), sizes, len(x))
        x = x if self.of_in is None else (x * gates(self.of_in)).astype(x.dtype)
        y = self.base.grouped(x, sizes)
        return y if self.of_out is None else (y * gates(self.of_out)).astype(y.dtype)

    def before(self, x: Float[Array, "*rows in"]) -> Float[Array, "*rows in"]:
        return x if self.of_in is None else (x * self.gates(self.of_in, self.counted(x))).astype(x.dtype)

    def after(self, y: Float[Array, "*rows out"]) -> Float[Array, "*rows out"]:
        return y if self.of_out is None else (y * self.gates(self.of_out, self.counted(y))).astype(y.dtype)

    def gates(self, gate: Float[Array, "size"], counts: Float[Array, "..."]) -> Float[Array, "*rows size"]:
        """l, as much as it counts."""
        return 1 + jnp.where(self.applies, counts, 0) * (gate - 1)

    def changed(self, matrix: Matrix) -> Matrix:
        if self.of_in is not None:
            return matrix * self.gates(self.of_in, self.alike(self.applies))
        return matrix if self.of_out is None else matrix * self.gates(self.of_out, self.alike(self.applies))[:, None]

    def changed_shift(self, shift: Shift | None) -> Shift | None:
        return (
            shift if shift is None or self.of_out is None else shift * self.gates(self.of_out, self.alike(self.applies))
        )

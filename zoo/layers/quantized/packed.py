"""Matrices that stay packed in memory and are decoded while they are multiplied."""

from collections.abc import Callable

import equinox as eqx
import jax
from jaxtyping import Array, Float, Int

from zoo.ops.quantized.packed_matmul import grouped_packed_matmul, packed_matmul
from zoo.parallel import Dim, reduce

from ..abstract import AbstractLinear
from ..linear import Linear, add_expert_biases


class AbstractPackedLinear(AbstractLinear):
    """y = W x + b, with W of shape [out, in] packed.

    It stands where a `Linear` would and lies on a mesh as that does, in whole blocks of inputs where it has blocks: an
    axis that splits `in` has to divide their number. What is packed is a buffer: gradients flow through the product and
    never into it. The bias is learnt. What is decoded, in the dtype of x, is a piece of a matrix while it is
    multiplied, and again in a backward pass; of experts one at a time (`zoo.ops.packed_matmul`).
    """

    bias: eqx.AbstractVar[Float[Array, "out"] | None]
    in_: eqx.AbstractVar[Dim]
    out: eqx.AbstractVar[Dim]

    format: eqx.AbstractClassVar[str]
    """What messages call it."""
    packed_fields: eqx.AbstractClassVar[tuple[str, ...]]
    """The fields that W is decoded from."""
    block_size: eqx.AbstractClassVar[int]
    """How many inputs are packed together."""
    encode: eqx.AbstractClassVar[Callable[..., tuple[Array, ...]]]
    """What is packed of numbers."""
    decode: eqx.AbstractClassVar[Callable[..., Float[Array, "*rows in"]]]
    """The numbers of what is packed, in a dtype that may follow it."""

    @classmethod
    def get_packing_error(cls, in_size: int, in_: Dim) -> str:
        """Why a matrix of so many inputs cannot be packed; nothing where it can."""
        if in_size % cls.block_size == 0 and (in_.unit == 1 or in_.unit % cls.block_size == 0):
            return ""
        sizes = f"{in_size}" if in_.unit == 1 else f"{in_size}, {in_.unit} to each of {in_.name},"
        return (
            f"{cls.format} packs the inputs of a matrix in blocks of {cls.block_size}, and {sizes} are no whole blocks"
        )

    @classmethod
    def get_block_dim(cls, in_: Dim) -> Dim:
        """What the dim of the blocks is called, whose inputs are `in_`."""
        return Dim(in_.name, max(in_.unit // cls.block_size, 1))

    @property
    def packed_arrays(self) -> tuple[Array, ...]:
        """What W is decoded from."""
        return tuple(getattr(self, part) for part in self.packed_fields)

    @property
    def dense_weight(self) -> Float[Array, "out in"]:
        return jax.jit(self.decode)(*self.packed_arrays)  # as one program, which holds no array for each of its steps

    @property
    def dense_bias(self) -> Float[Array, "out"] | None:
        return self.bias

    def repack(self, weight: Float[Array, "out in"], bias: Float[Array, "out"] | None) -> "AbstractPackedLinear":
        """The same with another W, rounded to what its packing holds, and another b, in the dtype that this has."""
        where = lambda x: (*(getattr(x, name) for name in x.packed_fields), x.bias)
        new = (*jax.jit(self.encode)(weight), self.cast_bias(bias))
        return eqx.tree_at(where, self, new, is_leaf=lambda x: x is None)

    def to_linear(self, weight: Float[Array, "out in"], bias: Float[Array, "out"] | None) -> Linear:
        """A `Linear` to stand in its place, of this W and this b."""
        sizes = {"in_": self.in_, "out": self.out, "bias": True, "key": jax.random.key(0)}
        return eqx.filter_eval_shape(Linear, *weight.shape[::-1], **sizes).with_weight(weight, self.cast_bias(bias))

    def cast_bias(self, bias: Float[Array, "out"] | None) -> Float[Array, "out"] | None:
        return bias if bias is None or self.bias is None else bias.astype(self.bias.dtype)

    def with_weight(self, weight: Float[Array, "out in"], bias: Float[Array, "out"] | None) -> "AbstractPackedLinear":
        raise NotImplementedError(
            f"a matrix in {self.format} is rounded, and what an adapter that starts as 'pissa' or 'olora' takes out of "
            "it, or puts back, would be rounded again: start from 'zero' or 'gaussian', or around a plain Linear"
        )

    def __call__(self, x: Float[Array, "*rows in"]) -> Float[Array, "*rows out"]:
        y = reduce(self.contract(x, "oi"), over=self.in_.name)
        return y if self.bias is None else y + self.bias

    def transposed(self, x: Float[Array, "*rows out"]) -> Float[Array, "*rows in"]:
        return reduce(self.contract(x, "io"), over=self.out.name)

    def grouped(self, x: Float[Array, "rows in"], sizes: Int[Array, "experts"]) -> Float[Array, "rows out"]:
        y = grouped_packed_matmul(x, self.packed_arrays, self.decode, sizes)
        return add_expert_biases(y, self.bias, sizes, self.in_)

    def contract(self, x: Float[Array, "*rows _"], weight_order: str) -> Float[Array, "*rows _"]:
        y = packed_matmul(x.reshape(-1, x.shape[-1]), self.packed_arrays, self.decode, weight_order)
        return y.reshape(*x.shape[:-1], y.shape[-1])

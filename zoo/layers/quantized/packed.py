"""Base class of linear layers whose quantized weight is dequantized inside the matmul."""

from collections.abc import Callable

import equinox as eqx
import jax
from jaxtyping import Array, Float, Int

from zoo.ops.quantized.packed_matmul import grouped_packed_matmul, packed_matmul
from zoo.parallel import Dim, reduce

from ..abstract import AbstractLinear
from ..linear import Linear, add_expert_biases, reduce_output


class AbstractPackedLinear(AbstractLinear):
    """y = W x + b, with W of shape [out, in] quantized.

    A drop-in for `Linear`, sharded in the same way. With a block-wise format, an axis that shards `in` must divide the
    number of blocks. The packed arrays are buffers: frozen, with gradients of the matmul for x only. The bias is
    trainable. W is dequantized to the dtype of x in tiles inside the matmul, and again in the backward pass; stacked
    experts one at a time (`zoo.ops.quantized.packed_matmul`).
    """

    bias: eqx.AbstractVar[Float[Array, "out"] | None]
    in_: eqx.AbstractVar[Dim]
    out: eqx.AbstractVar[Dim]

    format: eqx.AbstractClassVar[str]
    """Name of the number format in messages."""
    packed_fields: eqx.AbstractClassVar[tuple[str, ...]]
    """Names of the fields that hold the packed arrays of W."""
    block_size: eqx.AbstractClassVar[int]
    """Inputs per quantization block."""
    encode: eqx.AbstractClassVar[Callable[..., tuple[Array, ...]]]
    """Quantize a float32 matrix to the packed arrays."""
    decode: eqx.AbstractClassVar[Callable[..., Float[Array, "*rows in"]]]
    """Dequantize the packed arrays, to the dtype of an optional further argument."""

    @classmethod
    def get_packing_error(cls, in_size: int, in_: Dim) -> str:
        """Return why a matrix with `in_size` inputs cannot be packed, or an empty string if it can."""
        if in_size % cls.block_size == 0 and (in_.unit == 1 or in_.unit % cls.block_size == 0):
            return ""
        if in_.unit == 1:
            sizes = f"{in_size}"
        else:
            sizes = f"{in_size}, {in_.unit} to each of {in_.name},"
        return (
            f"{cls.format} packs the inputs of a matrix in blocks of {cls.block_size}, and {sizes} are not whole blocks"
        )

    @classmethod
    def get_block_dim(cls, in_: Dim) -> Dim:
        """Return the dim of the blocks along `in_`."""
        return Dim(in_.name, max(in_.unit // cls.block_size, 1))

    @property
    def packed_arrays(self) -> tuple[Array, ...]:
        """Packed arrays of W."""
        return tuple(getattr(self, name) for name in self.packed_fields)

    @property
    def shared_arrays(self) -> tuple[Array, ...]:
        """Further arrays that every slice of rows of W is dequantized with, passed after the packed ones."""
        return ()

    @property
    def dense_weight(self) -> Float[Array, "out in"]:
        arrays = (*self.packed_arrays, *self.shared_arrays)
        return jax.jit(self.decode)(*arrays)  # jitted, so that no intermediate array is materialized

    @property
    def dense_bias(self) -> Float[Array, "out"] | None:
        return self.bias

    def repack(self, weight: Float[Array, "out in"], bias: Float[Array, "out"] | None) -> "AbstractPackedLinear":
        """Return a copy with this weight quantized, and this bias in the dtype of the present one."""
        where = lambda x: (*(getattr(x, name) for name in x.packed_fields), x.bias)
        new = (*jax.jit(self.encode)(weight), self._cast_bias(bias))
        return eqx.tree_at(where, self, new, is_leaf=lambda x: x is None)

    def to_linear(self, weight: Float[Array, "out in"], bias: Float[Array, "out"] | None) -> Linear:
        """Return a `Linear` with the same dims, this weight, and this bias in the dtype of the present one."""
        options = {"in_": self.in_, "out": self.out, "bias": True, "key": jax.random.key(0)}
        return eqx.filter_eval_shape(Linear, *weight.shape[::-1], **options).with_weight(weight, self._cast_bias(bias))

    def _cast_bias(self, bias: Float[Array, "out"] | None) -> Float[Array, "out"] | None:
        if bias is None or self.bias is None:
            return bias
        return bias.astype(self.bias.dtype)

    def with_weight(self, weight: Float[Array, "out in"], bias: Float[Array, "out"] | None) -> "AbstractPackedLinear":
        raise NotImplementedError(
            f"a matrix in {self.format} is rounded, and what an adapter that starts as 'pissa' or 'olora' takes out of "
            "it, or puts back, would be rounded again: start from 'zero' or 'gaussian', or around a plain Linear"
        )

    def __call__(self, x: Float[Array, "*rows in"]) -> Float[Array, "*tokens out"]:
        y = reduce_output(self._contract(x, "oi"), self.in_, self.out)
        if self.bias is not None:
            y = y + self.bias
        return y

    def transposed(self, x: Float[Array, "*rows out"]) -> Float[Array, "*rows in"]:
        return reduce(self._contract(x, "io"), over=self.out.name)

    def grouped(self, x: Float[Array, "rows in"], sizes: Int[Array, "experts"]) -> Float[Array, "rows out"]:
        y = grouped_packed_matmul(x, self.packed_arrays, self.decode, sizes, shared=self.shared_arrays)
        return add_expert_biases(y, self.bias, sizes, self.in_)

    def _contract(self, x: Float[Array, "*rows _"], weight_order: str) -> Float[Array, "*rows _"]:
        rows = x.reshape(-1, x.shape[-1])
        shared = self.shared_arrays
        y = packed_matmul(rows, self.packed_arrays, self.decode, weight_order, shared=shared)
        return y.reshape(*x.shape[:-1], y.shape[-1])

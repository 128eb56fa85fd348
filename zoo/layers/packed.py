"""Matrices that stay packed in memory and are decoded while they are multiplied."""

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key, UInt8

from zoo.ops import mxfp4
from zoo.ops.packed_matmul import grouped_packed_matmul, packed_matmul
from zoo.parallel import Dim, buffer, reduce

from .abstract import AbstractLinear
from .linear import truncated_normal, with_biases


class PackedLinear(AbstractLinear):
    """y = W x + b, with W of shape [out, in] in MXFP4 (`zoo.ops.mxfp4`): 4.25 bits a number in place of 16 or 32.

    It stands where a `Linear` would and lies on a mesh as that does, in whole blocks of 32 inputs: an axis that splits
    `in` has to divide their number. W is a buffer: gradients flow through the product and never into it. The bias is
    learnt. What is decoded, in the dtype of x, is one matrix while it is multiplied, and again in a backward pass; of
    experts one at a time (`zoo.ops.packed_matmul`).
    """

    blocks: UInt8[Array, "out in_blocks 16"] = buffer()
    scales: UInt8[Array, "out in_blocks"] = buffer()
    bias: Float[Array, "out"] | None

    in_: Dim = eqx.field(static=True)
    out: Dim = eqx.field(static=True)
    in_blocks: Dim = eqx.field(static=True)

    def __init__(
        self,
        in_size: int,
        out_size: int,
        *,
        in_: Dim = Dim("in"),
        out: Dim = Dim("out"),
        bias: bool = False,
        scale: float = 1.0,
        key: Key[Array, ""],
    ):
        """Weights start as those of a `Linear` of the same key do, rounded to what MXFP4 holds.

        **Raises** `ValueError` where inputs, or the inputs of each unit of `in_`, are no whole blocks of 32.
        """
        if in_size % mxfp4.BLOCK or (in_.unit > 1 and in_.unit % mxfp4.BLOCK):
            units = "" if in_.unit == 1 else f", {in_.unit} to each of {in_.name},"
            raise ValueError(
                f"MXFP4 packs the inputs of a matrix in blocks of {mxfp4.BLOCK}, and {in_size}{units} are no whole "
                "blocks: take a Linear"
            )
        weight = truncated_normal(key, (out_size, in_size), scale * in_size**-0.5)
        self.blocks, self.scales = mxfp4.encode(weight)
        self.bias = jnp.zeros(out_size) if bias else None
        self.in_, self.out = in_, out
        self.in_blocks = Dim(in_.name, max(in_.unit // mxfp4.BLOCK, 1))

    @property
    def out_size(self) -> int:
        return self.scales.shape[-2]

    @property
    def matrix(self) -> Float[Array, "out in"]:
        return mxfp4.decode(self.blocks, self.scales)

    @property
    def shift(self) -> Float[Array, "out"] | None:
        return self.bias

    def exchanged(self, matrix: Float[Array, "out in"], shift: Float[Array, "out"] | None) -> "PackedLinear":
        raise NotImplementedError(
            "to exchange a matrix in MXFP4 would round the new one to 4 bits: load the checkpoint without packed=True"
        )

    def __call__(self, x: Float[Array, "*rows in"]) -> Float[Array, "*rows out"]:
        y = reduce(self.contract(x, "oi"), over=self.in_.name)
        return y if self.bias is None else y + self.bias

    def transposed(self, x: Float[Array, "*rows out"]) -> Float[Array, "*rows in"]:
        return reduce(self.contract(x, "io"), over=self.out.name)

    def grouped(self, x: Float[Array, "rows in"], sizes: Int[Array, "experts"]) -> Float[Array, "rows out"]:
        return with_biases(grouped_packed_matmul(x, self.blocks, self.scales, sizes), self.bias, sizes, self.in_)

    def contract(self, x: Float[Array, "*rows _"], how: str) -> Float[Array, "*rows _"]:
        y = packed_matmul(x.reshape(-1, x.shape[-1]), self.blocks, self.scales, how)
        return y.reshape(*x.shape[:-1], y.shape[-1])

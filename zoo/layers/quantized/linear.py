"""Linear layers quantized to int8, NF4 and MXFP4: frozen base weights of adapters."""

from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int8, Key, UInt8

from zoo.ops.quantized import int8, mxfp4, nf4
from zoo.parallel import Dim, buffer

from ..linear import truncated_normal
from .packed import AbstractPackedLinear


class Int8Linear(AbstractPackedLinear):
    """y = W x + b, with W in int8 and one float32 scale per row (`zoo.ops.quantized.int8`). The scales of a row are
    replicated over shards of `in`."""

    codes: Int8[Array, "out in"] = buffer()
    scales: Float[Array, "out"] = buffer()
    bias: Float[Array, "out"] | None

    in_: Dim = eqx.field(static=True)
    out: Dim = eqx.field(static=True)

    format: ClassVar[str] = "int8"
    packed_fields: ClassVar[tuple[str, ...]] = ("codes", "scales")
    block_size: ClassVar[int] = 1
    encode = staticmethod(int8.quantize_int8)
    decode = staticmethod(int8.dequantize_int8)

    def __init__(self, weight: Float[Array, "out in"], bias: Float[Array, "out"] | None = None, *, in_: Dim, out: Dim):
        """Quantize `weight`: see `zoo.ops.quantized.int8.quantize_int8`."""
        self.codes, self.scales = jax.jit(int8.quantize_int8)(weight)
        self.bias = bias
        self.in_ = in_
        self.out = out

    @property
    def out_size(self) -> int:
        return self.codes.shape[-2]


class NF4Linear(AbstractPackedLinear):
    """y = W x + b, with W in NF4 with double quantization (`zoo.ops.quantized.nf4`): the base weights of QLoRA
    (Dettmers et al., arXiv:2305.14314, section 3). 4.14 bits per parameter with 4,096 inputs."""

    codes: UInt8[Array, "out in_blocks 32"] = buffer()
    constants: UInt8[Array, "out in_blocks"] = buffer()
    offset: Float[Array, "out"] = buffer()
    step: Float[Array, "out"] = buffer()
    bias: Float[Array, "out"] | None

    in_: Dim = eqx.field(static=True)
    out: Dim = eqx.field(static=True)
    in_blocks: Dim = eqx.field(static=True)

    format: ClassVar[str] = "NF4"
    packed_fields: ClassVar[tuple[str, ...]] = ("codes", "constants", "offset", "step")
    block_size: ClassVar[int] = nf4.BLOCK_SIZE
    encode = staticmethod(nf4.quantize_nf4)
    decode = staticmethod(nf4.dequantize_nf4)

    def __init__(self, weight: Float[Array, "out in"], bias: Float[Array, "out"] | None = None, *, in_: Dim, out: Dim):
        """Quantize `weight`: see `zoo.ops.quantized.nf4.quantize_nf4`.

        **Raises** `ValueError` if the inputs, in all or per unit of `in_`, are not a multiple of the block size 64.
        """
        if reason := self.get_packing_error(weight.shape[-1], in_):
            raise ValueError(f"{reason}: take int8")
        self.codes, self.constants, self.offset, self.step = jax.jit(nf4.quantize_nf4)(weight)
        self.bias = bias
        self.in_ = in_
        self.out = out
        self.in_blocks = self.get_block_dim(in_)

    @property
    def out_size(self) -> int:
        return self.constants.shape[-2]


class MXFP4Linear(AbstractPackedLinear):
    """y = W x + b, with W in MXFP4 (`zoo.ops.quantized.mxfp4`): 4.25 bits per parameter."""

    blocks: UInt8[Array, "out in_blocks 16"] = buffer()
    scales: UInt8[Array, "out in_blocks"] = buffer()
    bias: Float[Array, "out"] | None

    in_: Dim = eqx.field(static=True)
    out: Dim = eqx.field(static=True)
    in_blocks: Dim = eqx.field(static=True)

    format: ClassVar[str] = "MXFP4"
    packed_fields: ClassVar[tuple[str, ...]] = ("blocks", "scales")
    block_size: ClassVar[int] = mxfp4.BLOCK_SIZE
    encode = staticmethod(mxfp4.quantize_mxfp4)
    decode = staticmethod(mxfp4.dequantize_mxfp4)

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
        """Initialize like a `Linear` with the same key, and quantize.

        **Raises** `ValueError` if the inputs, in all or per unit of `in_`, are not a multiple of the block size 32.
        """
        if reason := self.get_packing_error(in_size, in_):
            raise ValueError(f"{reason}: take a Linear")
        weight = truncated_normal(key, (out_size, in_size), scale * in_size**-0.5)
        self.blocks, self.scales = mxfp4.quantize_mxfp4(weight)
        self.bias = jnp.zeros(out_size, jnp.float32) if bias else None
        self.in_ = in_
        self.out = out
        self.in_blocks = self.get_block_dim(in_)

    @property
    def out_size(self) -> int:
        return self.scales.shape[-2]

"""FP8 formats, scales of tensors, and matrix products of scaled operands.

    q = cast(x * fp8_max / amax)        x ~ q * amax / fp8_max        amax = max |x|

E4M3 has 4 significant bits and a largest value of 448, E5M2 has 3 and 57344 (Micikevicius et al., arXiv:2209.05433,
table 1). A product of two operands sums q_a q_b in float32, and multiplies by both scales once.

On GPUs a product of operands with one scale each is a `dot_general` of float8 operands, which XLA compiles to FP8
tensor cores (cublasLt). Everywhere else, and for blocks, operands are decoded first: exactly, so that the results are
the same up to the order of float32 sums.
"""

from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Shaped

from ..matmul import einsum_dot_general
from ..platform import current_platform

E4M3 = jnp.float8_e4m3fn
E5M2 = jnp.float8_e5m2
_LARGEST_MULTIPLIER = 2.0**100
"""Bound of fp8_max / amax, so that it and its inverse are normal float32 numbers."""


class ScaledTensor(eqx.Module):
    """A tensor in a narrow format with its scales: x ~ values * block_scales * scale."""

    values: Float[Array, "*dims"]
    """Codes of a float8 or float4 dtype, in the layout of the tensor."""
    scale: Float[Array, "..."]
    """Float32 scale of the whole tensor, or scales of an expert's rows."""
    block_scales: Shaped[Array, "*blocks"] | None = None
    """One scale per block of `values`, in as many dims."""
    block: tuple[int, ...] = eqx.field(static=True, default=())
    """Size of a block in each dim. The last block of a dim may be smaller."""


class StoredTensor(eqx.Module):
    """A `ScaledTensor` as integers, for residuals of a gradient. `jax.checkpoint` applies `reduce_precision` to
    floating-point residuals, which takes the largest exponent of a format for infinity: E4M3 would end at 240."""

    integers: Any
    dtypes: tuple[Any, ...] = eqx.field(static=True)

    def __init__(self, x: ScaledTensor):
        """Store a tensor."""
        arrays, treedef = jax.tree.flatten(x)
        self.dtypes = tuple(array.dtype for array in arrays)
        self.integers = treedef.unflatten(map(_as_integers, arrays))

    def restore(self) -> ScaledTensor:
        """Return the tensor that was stored."""
        arrays, treedef = jax.tree.flatten(self.integers)
        restored = (lax.bitcast_convert_type(x, dtype) for x, dtype in zip(arrays, self.dtypes, strict=True))
        return treedef.unflatten(restored)


def _as_integers(x: Array) -> Array:
    return lax.bitcast_convert_type(x, f"uint{jnp.finfo(x.dtype).bits}")


def saturating_cast(x: Float[Array, "*dims"], dtype: Any) -> Float[Array, "*dims"]:
    """Round float32 values to a float8 or float4 dtype, to nearest with ties to even. Finite values saturate;
    infinities and NaN stay as they are, in E4M3 both as NaN.

    GPUs convert to float8 in hardware. Elsewhere the codes are computed: without optimizations, XLA's conversion to
    E2M1 on CPUs differs from ml_dtypes' (jaxlib 0.10.2).
    """
    info = jnp.finfo(dtype)
    mantissa_bits = int(info.nmant)
    bits = int(info.bits)
    largest = float(info.max)
    if current_platform() == "gpu" and bits == 8:
        return jnp.where(jnp.isfinite(x), jnp.clip(x, -largest, largest), x).astype(dtype)
    magnitude = jnp.minimum(jnp.abs(x), largest)
    exponent = (lax.bitcast_convert_type(magnitude, jnp.int32) >> 23) - 127
    exponent = jnp.maximum(exponent, int(info.minexp))
    inverse_spacing = lax.bitcast_convert_type((127 + mantissa_bits - exponent) << 23, jnp.float32)
    mantissa = jnp.round(magnitude * inverse_spacing).astype(jnp.int32)
    # A mantissa that is rounded up to the next power of two carries into the exponent, as it should.
    codes = ((exponent - int(info.minexp)) << mantissa_bits) + mantissa
    if bits == 8:  # the others have no such codes
        infinity, nan = np.array([np.inf, np.nan]).astype(dtype).view(np.uint8) & 0x7F
        codes = jnp.where(jnp.isinf(x), int(infinity), jnp.where(jnp.isnan(x), int(nan), codes))
    codes = codes | (jnp.signbit(x).astype(jnp.int32) << (bits - 1))
    code_dtype = jnp.uint8 if bits == 8 else jnp.uint4
    return lax.bitcast_convert_type(codes.astype(code_dtype), dtype)


def find_amax(x: Float[Array, "*dims"], axes: Sequence[str] = ()) -> Float[Array, ""]:
    """Return max |x| in float32, over the devices along mesh `axes` too."""
    amax = jnp.abs(x).max(initial=0).astype(jnp.float32)
    if not axes:
        return amax
    return lax.pmax(amax, tuple(axes))


def find_multiplier(amax: Float[Array, "*dims"], largest: float | int) -> Float[Array, "*dims"]:
    """Return largest / amax; 1 where amax is 0."""
    return jnp.where(amax > 0, jnp.minimum(largest / amax, _LARGEST_MULTIPLIER), 1)


def quantize_per_tensor(x: Float[Array, "*dims"], amax: Float[Array, "..."], dtype: Any) -> ScaledTensor:
    """Quantize with one scale, which takes `amax` to the largest value of `dtype`. Larger values saturate; an amax that
    is not finite gives NaN."""
    multiplier = find_multiplier(amax, float(jnp.finfo(dtype).max))
    multiplier = jnp.where(jnp.isfinite(amax), multiplier, jnp.nan)
    return ScaledTensor(saturating_cast(x.astype(jnp.float32) * multiplier, dtype), 1 / multiplier)


def decode_blocks(x: ScaledTensor, dtype: Any = jnp.float32) -> Float[Array, "..."]:
    """Return values * block_scales in `dtype`, without the scale of the tensor."""
    values = x.values.astype(dtype)
    if x.block_scales is None:
        return values
    return values * expand_blocks(x.block_scales.astype(dtype), x.block, values.shape)


def expand_blocks(
    values: Float[Array, "*blocks"], block: tuple[int, ...], shape: tuple[int, ...]
) -> Float[Array, "..."]:
    """Repeat the value of each block over an array of this shape. The last block of a dim may be smaller."""
    for dim, size in enumerate(block):
        if size > 1:
            values = jnp.repeat(values, size, axis=dim)
    return values[tuple(slice(0, length) for length in shape)]


def dequantize(x: ScaledTensor) -> Float[Array, "..."]:
    """Return the tensor in float32."""
    return decode_blocks(x) * x.scale


def multiply_scaled(left: str, right: str, out: str, x: ScaledTensor, y: ScaledTensor) -> Float[Array, "..."]:
    """Compute an einsum of two matrices with float32 accumulation and a float32 result. Leading dims are flattened.

    Decoded operands are bfloat16 on accelerators where block scales have one byte, which is exact: 4 significant bits
    of a scale times 2 of a value in NVFP4, powers of two in MX. Float32 scales take a product in full float32. The
    precision "highest" also keeps cublasLt from its fast accumulation, which has fewer bits than float32.
    """
    dtype = _choose_operand_dtype(x, y)
    operands = []
    for tensor in (x, y):
        values = tensor.values if dtype is None else decode_blocks(tensor, dtype)
        operands.append(values.reshape(-1, values.shape[-1]))
    with jax.default_matmul_precision("highest"):
        product = einsum_dot_general(left, right, out, *operands, jnp.float32)  # pyright: ignore[reportCallIssue]
    return product * (x.scale * y.scale)


def _choose_operand_dtype(*operands: ScaledTensor) -> Any:
    """Return the dtype that operands of a product are decoded to; None for operands that are multiplied as they are."""
    platform = current_platform()
    scales = [x.block_scales for x in operands if x.block_scales is not None]
    if platform == "gpu" and not scales:
        return None
    if platform == "cpu" or any(x.dtype.itemsize > 1 for x in scales):
        return jnp.float32
    return jnp.bfloat16

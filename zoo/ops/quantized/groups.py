"""Groups of inputs with a scale and a zero point: the formula of FP8 blocks, GPTQ, AWQ and INT4 checkpoints.

    W[o, i] = scale[o, g(i)] (code[o, i] - zero[o, g(i)])

in float32, with one rounding. Codes are float8_e4m3fn, bytes, or four bits: two in a byte, the earlier input in the low
nibble. Groups are consecutive inputs, or any: GPTQ orders inputs by their activations (Frantar et al.,
arXiv:2210.17323, section 3.3) and stores the group of each.

bitsandbytes has signed bytes, W = scale code / 127 (LLM.int8, arXiv:2208.07339), and NF4, W = scale level(code), whose
scales may be codes in turn (double quantization, arXiv:2305.14314, section 3):

    scale[o, g] = offset + step[n // 256] table[constant[o, g]]        n: the number of the group in memory order

Files of NVFP4 have codes in E2M1, and scales in E4M3 that a number of the whole matrix divides.
"""

import functools
from collections.abc import Callable
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, UInt8

from . import nvfp4
from .nf4 import BLOCK_SIZE, lookup_codebook

CodeKind = Literal["float8_e4m3fn", "uint4", "uint8", "int8", "nf4", "float4_e2m1fn"]
"""Number format of codes."""
CODES_PER_BYTE: dict[CodeKind, int] = {
    "float8_e4m3fn": 1,
    "uint4": 2,
    "uint8": 1,
    "int8": 1,
    "nf4": 2,
    "float4_e2m1fn": 2,
}
NESTED_GROUP_SIZE = 256
"""Number of NF4 constants that share a step."""
INT8_STEP = np.float32(1 / 127)
"""Factor of signed bytes: the scale is the largest magnitude of a row, which has the code 127."""
_MIDDLE: dict[CodeKind, int] = {"uint4": 8, "uint8": 128}
"""Zero point of codes without zero points: signed integers are stored with it added."""


@functools.cache
def get_group_dequantizer(
    kind: CodeKind, group_size: int | None, *, has_zeros: bool, indexed: bool
) -> Callable[..., Float[Array, "*rows in"]]:
    """Return the function `(codes, scales[, zeros][, index][, dtype]) -> W`. Equal arguments return the same function,
    so that jit finds its compiled programs.

    - `group_size`: consecutive inputs in a group; None for one group of all.
    - `indexed`: take the group of each input from `index` (..., in).
    """

    def dequantize(codes: UInt8[Array, "*rows codes"], scales: Float[Array, "*rows groups"], *rest: Any) -> Array:
        zeros = rest[0] if has_zeros else None
        index = rest[int(has_zeros)] if indexed else None
        dtype = rest[-1] if len(rest) > has_zeros + indexed else jnp.float32
        values = _decode_codes(codes, kind)
        expand = lambda x: _expand_groups(x.astype(jnp.float32), index, group_size, values.shape[-1])
        if zeros is not None or kind in _MIDDLE:
            zero = jnp.float32(_MIDDLE[kind]) if zeros is None else expand(zeros)
            values = values - zero
        values = values * expand(scales)
        if kind == "int8":
            values = values * INT8_STEP
        return values.astype(dtype)

    return dequantize


@functools.cache
def get_nested_dequantizer(*, indexed: bool) -> Callable[..., Float[Array, "*rows in"]]:
    """Return the function `(codes, constants, steps, first, table, offset[, index][, dtype]) -> W` of NF4 with double
    quantization, as bitsandbytes has it.

    - `steps`: the steps of each row's groups, in order.
    - `first`: place of each row's first group among the 256 that share its step.
    - `index`: as in `get_group_dequantizer`, for groups of 64.
    """
    dequantize_groups = get_group_dequantizer("nf4", BLOCK_SIZE, has_zeros=False, indexed=indexed)

    def dequantize(
        codes: UInt8[Array, "*rows codes"],
        constants: UInt8[Array, "*rows groups"],
        steps: Float[Array, "*rows steps"],
        first: UInt8[Array, "*rows"],
        table: Float[Array, "*layers 256"],
        offset: Float[Array, "*layers 1"],
        *rest: Any,
    ) -> Array:
        numbers = (first[..., None].astype(jnp.int32) + jnp.arange(constants.shape[-1])) // NESTED_GROUP_SIZE
        factors = jnp.take_along_axis(table[..., None, :], constants.astype(jnp.int32), axis=-1)
        scales = factors * jnp.take_along_axis(steps, numbers, axis=-1)
        # A select keeps product and sum apart. XLA's CPU code would fuse them, across a barrier too, and round once.
        scales = jnp.where(scales == 0, 0, scales)
        return dequantize_groups(codes, scales + offset[..., None, :], *rest)

    return dequantize


@functools.cache
def get_nvfp4_dequantizer(*, indexed: bool) -> Callable[..., Float[Array, "*rows in"]]:
    """Return the function `(codes, constants, global_scale[, index][, dtype]) -> W` of NVFP4 as `pack_nvfp4` returns
    it. `index`: as in `get_group_dequantizer`, for groups of 16."""
    dequantize_groups = get_group_dequantizer("float4_e2m1fn", nvfp4.BLOCK_SIZE, has_zeros=False, indexed=indexed)

    def dequantize(
        codes: UInt8[Array, "*rows codes"],
        constants: UInt8[Array, "*rows groups"],
        global_scale: Float[Array, "*layers 1"],
        *rest: Any,
    ) -> Array:
        scales = lax.bitcast_convert_type(constants, nvfp4.E4M3).astype(jnp.float32)
        return dequantize_groups(codes, scales * (1 / global_scale)[..., None, :], *rest)

    return dequantize


def quantize_groups(
    weight: Float[Array, "*rows in"], group_size: int, largest: int = 7
) -> tuple[UInt8[Array, "*rows codes"], Float[Array, "*rows groups"]]:
    """Quantize groups of consecutive inputs to `uint4` codes without zero points, rounding to nearest, and bfloat16
    scales.

        scale = max |group| / largest        code = 8 + round(W / scale), from 8 - largest to 8 + largest

    `largest` is 7 for int4. With 3 and 1 the codes have the levels of int3 and int2, and still four bits. Scales are
    rounded before they divide. The error is at most 0.504 scales.
    """
    groups = weight.astype(jnp.float32).reshape(*weight.shape[:-1], -1, group_size)
    scales = (jnp.abs(groups).max(axis=-1) / largest).astype(jnp.bfloat16)
    divisors = jnp.where(scales == 0, 1, scales).astype(jnp.float32)
    integers = jnp.clip(jnp.round(groups / divisors[..., None]), -largest, largest)
    codes = (integers + _MIDDLE["uint4"]).astype(jnp.uint8).reshape(weight.shape)
    return codes[..., 0::2] | (codes[..., 1::2] << 4), scales


def _decode_codes(codes: UInt8[Array, "*rows codes"], kind: CodeKind) -> Float[Array, "*rows in"]:
    if CODES_PER_BYTE[kind] == 2:
        codes = jnp.stack([codes & 15, codes >> 4], axis=-1).reshape(*codes.shape[:-1], -1)
    if kind == "nf4":
        return lookup_codebook(codes)
    if kind == "float4_e2m1fn":
        codes = lax.bitcast_convert_type(codes.astype(jnp.uint4), kind)
    elif kind in ("float8_e4m3fn", "int8"):
        codes = lax.bitcast_convert_type(codes, kind)
    return codes.astype(jnp.float32)


def _expand_groups(
    x: Float[Array, "*rows groups"], index: Int[Array, "*layers in"] | None, group_size: int | None, in_size: int
) -> Float[Array, "*rows _"]:
    """Repeat the value of each group for its inputs."""
    if index is not None:
        return jnp.take_along_axis(x, index[..., None, :], axis=-1)
    if group_size is None:
        return x
    return jnp.repeat(x, group_size, axis=-1)[..., :in_size]

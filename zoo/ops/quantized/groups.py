"""Groups of inputs with a scale and a zero point: the formula of FP8 blocks, GPTQ, AWQ and INT4 checkpoints.

    W[o, i] = scale[o, g(i)] (code[o, i] - zero[o, g(i)])

in float32, with one rounding. Codes are float8_e4m3fn, bytes, or four bits: two in a byte, the earlier input in the low
nibble. Groups are consecutive inputs, or any: GPTQ orders inputs by their activations (Frantar et al.,
arXiv:2210.17323, section 3.3) and stores the group of each.
"""

import functools
from collections.abc import Callable
from typing import Any, Literal

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, UInt8

CodeKind = Literal["float8_e4m3fn", "uint4", "uint8"]
"""Number format of codes."""
_MIDDLE: dict[str, int] = {"float8_e4m3fn": 0, "uint4": 8, "uint8": 128}
"""Zero point of codes without zero points: signed integers are stored with it added."""


@functools.cache
def get_group_dequantizer(
    kind: CodeKind, group_size: int | None, *, has_zeros: bool, indexed: bool
) -> Callable[..., Float[Array, "*rows in"]]:
    """Return the function `(codes, scales[, zeros][, index][, dtype]) -> W`. Equal arguments give the same function, by
    which jit caches programs.

    - `group_size`: consecutive inputs in a group; None for one group of all.
    - `indexed`: take the group of each input from `index` (..., in).
    """

    def dequantize(codes: UInt8[Array, "*rows codes"], scales: Float[Array, "*rows groups"], *rest: Any) -> Array:
        zeros = rest[0] if has_zeros else None
        index = rest[int(has_zeros)] if indexed else None
        dtype = rest[-1] if len(rest) > has_zeros + indexed else jnp.float32
        values = _decode_codes(codes, kind)
        expand = lambda x: _expand_groups(x.astype(jnp.float32), index, group_size, values.shape[-1])
        offset = jnp.float32(_MIDDLE[kind]) if zeros is None else expand(zeros)
        return ((values - offset) * expand(scales)).astype(dtype)

    return dequantize


def _decode_codes(codes: UInt8[Array, "*rows codes"], kind: CodeKind) -> Float[Array, "*rows in"]:
    if kind == "uint4":
        codes = jnp.stack([codes & 15, codes >> 4], axis=-1).reshape(*codes.shape[:-1], -1)
    codes = lax.bitcast_convert_type(codes, jnp.float8_e4m3fn) if kind == "float8_e4m3fn" else codes
    return codes.astype(jnp.float32)


def _expand_groups(
    x: Float[Array, "*rows groups"], index: Int[Array, "*layers in"] | None, group_size: int | None, in_size: int
) -> Float[Array, "*rows _"]:
    """Repeat the value of each group for its inputs."""
    if index is not None:
        return jnp.take_along_axis(x, index[..., None, :], axis=-1)
    return x if group_size is None else jnp.repeat(x, group_size, axis=-1)[..., :in_size]

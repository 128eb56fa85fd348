"""Linear layers as quantized checkpoint files hold them: codes, and scales and zero points of groups of inputs."""

from collections.abc import Callable
from typing import ClassVar, NoReturn

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Int32, UInt8

from zoo.ops.quantized import nvfp4
from zoo.ops.quantized.groups import (
    CODES_PER_BYTE,
    NESTED_GROUP_SIZE,
    CodeKind,
    get_group_dequantizer,
    get_nested_dequantizer,
    get_nvfp4_dequantizer,
    quantize_groups,
)
from zoo.ops.quantized.nf4 import BLOCK_SIZE
from zoo.parallel import Dim, buffer, reduce
from zoo.parallel.collectives import shard_offset

from ..linear import contract_per_head
from .packed import AbstractPackedLinear


def _refuse_to_encode(weight: Array) -> NoReturn:
    raise NotImplementedError(
        "a matrix of a quantized file is not quantized again: its scales came from a calibration. Merge adapters with "
        "quantized='decode'"
    )


class AbstractGroupLinear(AbstractPackedLinear):
    """y = W x + b, with W of a quantized file.

    Codes are sharded like W. What groups have in a row is replicated over shards of `in`: a shard may begin inside a
    group.
    """

    codes: eqx.AbstractVar[UInt8[Array, "out in_codes"]]
    kind: eqx.AbstractVar[CodeKind]
    group_size: eqx.AbstractVar[int | None]

    block_size: ClassVar[int] = 1
    encode = staticmethod(_refuse_to_encode)
    in_groups: ClassVar[Dim] = Dim("features")

    @property
    def out_size(self) -> int:
        return self.codes.shape[-2]

    def per_head(self, x: Float[Array, "*rows units in"]) -> Float[Array, "*rows units unit"]:
        y = reduce(self._contract_per_head("rui,uoi->ruo", x), over=self.in_.name)
        if self.bias is not None:
            y = y + self.bias.reshape(-1, self.out.unit)
        return y

    def per_head_transposed(self, x: Float[Array, "*rows units unit"]) -> Float[Array, "*rows units in"]:
        return self._contract_per_head("ruo,uoi->rui", x)

    def _contract_per_head(self, spec: str, x: Float[Array, "*rows u k"]) -> Float[Array, "*rows u n"]:
        """Dequantize the whole matrix, and again in the backward pass."""
        decode = self.decode
        unit = self.out.unit

        @jax.checkpoint
        def contract(x: Array, *arrays: Array) -> Array:
            weight = decode(*arrays, x.dtype)
            return contract_per_head(spec, x, weight.reshape(-1, unit, weight.shape[-1]))

        return contract(x, *self.packed_arrays, *self.shared_arrays)

    def _index_groups(self, num_groups: int) -> tuple[Int[Array, "*layers in"], ...]:
        """Return the group of each input on this device; () where groups are consecutive from the first input on."""
        in_size = self.codes.shape[-1] * CODES_PER_BYTE[self.kind]
        if self.group_size is None or -(-in_size // self.group_size) == num_groups:
            return ()
        first = shard_offset(self.codes, self.in_.name, in_size)
        index = (first + jnp.arange(in_size, dtype=jnp.int32)) // self.group_size
        return (jnp.broadcast_to(index, (*self.codes.shape[:-2], in_size)),)


def _make_codes(in_size: int, out_size: int, in_: Dim, kind: CodeKind) -> tuple[UInt8[Array, "out in_codes"], Dim]:
    """Return codes of zero and their input dim. **Raises** `ValueError` for an odd number of inputs of four bits, or of
    those in each unit of `in_`."""
    per_byte = CODES_PER_BYTE[kind]
    if in_size % per_byte or (in_.unit > 1 and in_.unit % per_byte):
        units = "" if in_.unit == 1 else f", {in_.unit} to each of {in_.name}"
        raise ValueError(f"two codes share a byte, and the inputs are odd: {in_size}{units}")
    return jnp.zeros((out_size, in_size // per_byte), jnp.uint8), Dim(in_.name, max(in_.unit // per_byte, 1))


class GroupQuantizedLinear(AbstractGroupLinear):
    """y = W x + b, with W in groups (`zoo.ops.quantized.groups`): FP8, GPTQ, AWQ, INT4, LLM.int8 or NF4 as
    `zoo.load(packed=True)` reads it. An FP8 block of rows has its scale once in each row."""

    codes: UInt8[Array, "out in_codes"] = buffer()
    scales: Float[Array, "out in_groups"] = buffer()
    zeros: UInt8[Array, "out in_groups"] | None = buffer()
    group_index: Int32[Array, "in"] | None = buffer()
    """Group of each input, if groups are not consecutive."""
    bias: Float[Array, "out"] | None

    in_: Dim = eqx.field(static=True)
    out: Dim = eqx.field(static=True)
    in_codes: Dim = eqx.field(static=True)
    kind: CodeKind = eqx.field(static=True)
    group_size: int | None = eqx.field(static=True)
    """Consecutive inputs in a group; None for one group."""

    format: ClassVar[str] = "groups of a quantized file"
    packed_fields: ClassVar[tuple[str, ...]] = ("codes", "scales", "zeros")

    def __init__(
        self,
        in_size: int,
        out_size: int,
        *,
        kind: CodeKind,
        group_size: int | None,
        has_zeros: bool = False,
        reordered: bool = False,
        in_: Dim = Dim("in"),
        out: Dim = Dim("out"),
    ):
        """Begin with codes and scales of zero, and without a bias: files hold the numbers.

        - `has_zeros`: store zero points; else the middle of the codes is zero.
        - `reordered`: store the group of each input.

        **Raises** `ValueError` for codes of four bits and an odd number of inputs, or of those in each unit of `in_`.
        """
        groups = 1 if group_size is None else -(-in_size // group_size)
        self.codes, self.in_codes = _make_codes(in_size, out_size, in_, kind)
        self.scales = jnp.zeros((out_size, groups), jnp.float32)
        self.zeros = jnp.zeros((out_size, groups), jnp.uint8) if has_zeros else None
        self.group_index = jnp.zeros(in_size, jnp.int32) if reordered else None
        self.bias = None
        self.in_ = in_
        self.out = out
        self.kind = kind
        self.group_size = group_size

    @classmethod
    def quantize(
        cls,
        weight: Float[Array, "out in"],
        bias: Float[Array, "out"] | None = None,
        *,
        group_size: int,
        largest: int = 7,
        in_: Dim,
        out: Dim,
    ) -> "GroupQuantizedLinear":
        """Quantize `weight` to int4, or to fewer levels: see `zoo.ops.quantized.groups.quantize_groups`."""
        layer = cls(*weight.shape[::-1], kind="uint4", group_size=group_size, in_=in_, out=out)
        codes, scales = jax.jit(quantize_groups, static_argnums=(1, 2))(weight, group_size, largest)
        where = lambda x: (x.codes, x.scales, x.bias)
        return eqx.tree_at(where, layer, (codes, scales, bias), is_leaf=lambda x: x is None)

    @property
    def decode(self) -> Callable[..., Float[Array, "*rows in"]]:
        has_zeros = self.zeros is not None
        indexed = bool(self.shared_arrays)
        return get_group_dequantizer(self.kind, self.group_size, has_zeros=has_zeros, indexed=indexed)

    @property
    def packed_arrays(self) -> tuple[Array, ...]:
        if self.zeros is None:
            return (self.codes, self.scales)
        return (self.codes, self.scales, self.zeros)

    @property
    def shared_arrays(self) -> tuple[Int[Array, "*layers in"], ...]:
        if self.group_index is None:
            return self._index_groups(self.scales.shape[-1])
        return (self.group_index,)


class NestedNF4Linear(AbstractGroupLinear):
    """y = W x + b, with W in NF4 with double quantization as bitsandbytes stores it: 4.14 bits per parameter with
    4,096 inputs.

    Blocks of 64 inputs share a constant, an index into `table`; 256 constants in the file's order of memory, which runs
    across rows, share a step. `NF4Linear` has steps of rows, which no file of bitsandbytes has.
    """

    codes: UInt8[Array, "out in_codes"] = buffer()
    constants: UInt8[Array, "out in_groups"] = buffer()
    steps: Float[Array, "out in_steps"] = buffer()
    """Steps of the row's constants, including steps that end or begin inside the row, so it can be sliced off."""
    first: UInt8[Array, "out"] = buffer()
    """Place of the row's first constant among the constants that share its step."""
    table: Float[Array, "256"] = buffer()
    offset: Float[Array, "1"] = buffer()
    bias: Float[Array, "out"] | None

    in_: Dim = eqx.field(static=True)
    out: Dim = eqx.field(static=True)
    in_codes: Dim = eqx.field(static=True)

    format: ClassVar[str] = "NF4 of bitsandbytes"
    packed_fields: ClassVar[tuple[str, ...]] = ("codes", "constants", "steps", "first")
    kind: ClassVar[CodeKind] = "nf4"
    group_size: ClassVar[int | None] = BLOCK_SIZE
    in_steps: ClassVar[Dim] = Dim("features")

    def __init__(self, in_size: int, out_size: int, *, in_: Dim = Dim("in"), out: Dim = Dim("out")):
        """Begin with codes and constants of zero, and without a bias: files hold the numbers.

        **Raises** `ValueError` if the inputs are not a multiple of the block size 64.
        """
        if in_size % BLOCK_SIZE:
            raise ValueError(f"NF4 has blocks of {BLOCK_SIZE}, and {in_size} inputs are not a whole number of blocks")
        groups = in_size // BLOCK_SIZE
        self.codes, self.in_codes = _make_codes(in_size, out_size, in_, "nf4")
        self.constants = jnp.zeros((out_size, groups), jnp.uint8)
        self.steps = jnp.zeros((out_size, self.count_steps(groups)), jnp.float32)
        self.first = jnp.zeros(out_size, jnp.uint8)
        self.table = jnp.zeros(256, jnp.float32)
        self.offset = jnp.zeros(1, jnp.float32)
        self.bias = None
        self.in_ = in_
        self.out = out

    @staticmethod
    def count_steps(groups: int) -> int:
        """Return the largest number of steps that a row of `groups` constants can have."""
        return (groups + NESTED_GROUP_SIZE - 2) // NESTED_GROUP_SIZE + 1

    @property
    def decode(self) -> Callable[..., Float[Array, "*rows in"]]:
        return get_nested_dequantizer(indexed=bool(self._index_groups(self.constants.shape[-1])))

    @property
    def shared_arrays(self) -> tuple[Array, ...]:
        return (self.table, self.offset, *self._index_groups(self.constants.shape[-1]))


class NVFP4Linear(AbstractGroupLinear):
    """y = W x + b, with W in NVFP4 as compressed-tensors stores it (`zoo.ops.quantized.nvfp4.pack_nvfp4`): 4.5 bits per
    parameter."""

    codes: UInt8[Array, "out in_codes"] = buffer()
    constants: UInt8[Array, "out in_groups"] = buffer()
    """Bytes of the E4M3 scales."""
    global_scale: Float[Array, "1"] = buffer()
    bias: Float[Array, "out"] | None

    in_: Dim = eqx.field(static=True)
    out: Dim = eqx.field(static=True)
    in_codes: Dim = eqx.field(static=True)

    format: ClassVar[str] = "NVFP4"
    packed_fields: ClassVar[tuple[str, ...]] = ("codes", "constants")
    kind: ClassVar[CodeKind] = "float4_e2m1fn"
    group_size: ClassVar[int | None] = nvfp4.BLOCK_SIZE

    def __init__(self, weight: Float[Array, "out in"], bias: Float[Array, "out"] | None = None, *, in_: Dim, out: Dim):
        """Quantize `weight`. **Raises** `ValueError` if the inputs are not a multiple of the block size 16."""
        in_size = weight.shape[-1]
        if in_size % nvfp4.BLOCK_SIZE:
            raise ValueError(f"NVFP4 has blocks of {nvfp4.BLOCK_SIZE}, and {in_size} inputs are not whole blocks")
        self.in_codes = _make_codes(in_size, weight.shape[-2], in_, self.kind)[1]
        self.codes, self.constants, self.global_scale = jax.jit(nvfp4.pack_nvfp4)(weight)
        self.bias = bias
        self.in_ = in_
        self.out = out

    @property
    def decode(self) -> Callable[..., Float[Array, "*rows in"]]:
        return get_nvfp4_dequantizer(indexed=bool(self._index_groups(self.constants.shape[-1])))

    @property
    def shared_arrays(self) -> tuple[Array, ...]:
        return (self.global_scale, *self._index_groups(self.constants.shape[-1]))
